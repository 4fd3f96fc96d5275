"""The claims of studies, by study and by name: rows of their ``claims.yaml``, with functions of modules of effects."""

from lab.core.shelf import HOME, modules
from studies.claims.public_claims import PublicClaim
from studies.claims.rows import read_claims
from studies.claims.verdicts import Claim

_ROWS = {
    path.parent.name: list(read_claims(path, modules("effects", path.parent.name)))
    for path in sorted(HOME.glob("*/claims.yaml"))
}
BY_STUDY = {
    study: claims for study, rows in _ROWS.items() if (claims := [row for row in rows if isinstance(row, Claim)])
}
CLAIMS = {claim.name: claim for claims in BY_STUDY.values() for claim in claims}
PUBLIC_CLAIMS = {row.name: row for rows in _ROWS.values() for row in rows if isinstance(row, PublicClaim)}


def study_of(sweep: str) -> str:
    """The study with most claims about a sweep, or else the one whose claims answer its question; or empty."""
    counts = {
        study: sum(sweep in (claim.sweep, *claim.affirms, *claim.denies) for claim in claims)
        for study, claims in BY_STUDY.items()
    }
    return max(counts, key=lambda study: counts[study]) if any(counts.values()) else ""
