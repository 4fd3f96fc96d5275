"""The claims of studies, by study and by name: rows of their ``claims.yaml``, with functions of modules of effects.

Claims on runs that are none of the lab's stand in the ``claims.py`` of their study: ``RULES``, what they are judged on
(``read``), and what all of it is called (``SOURCE``).
"""

from types import ModuleType

from lab.core.shelf import HOME, modules
from studies.claims.rows import read_claims
from studies.claims.verdicts import Claim

BY_STUDY = {
    path.parent.name: list(read_claims(path, modules("effects", path.parent.name)))
    for path in sorted(HOME.glob("*/claims.yaml"))
}
RULED: dict[str, ModuleType] = {module.SOURCE: module for module in modules("claims")}
CLAIMS: dict[str, Claim] = {claim.name: claim for claims in BY_STUDY.values() for claim in claims}


def study_of(sweep: str) -> str:
    """The study with most claims about a sweep, or else the one whose claims answer its question; or empty."""
    counts = {
        study: sum(sweep in (claim.sweep, *claim.affirms, *claim.denies) for claim in claims)
        for study, claims in BY_STUDY.items()
    }
    return max(counts, key=lambda study: counts[study]) if any(counts.values()) else ""
