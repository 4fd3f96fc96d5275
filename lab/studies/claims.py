"""The claims of all studies, by name: rows of their ``claims.yaml``, with functions of their modules of effects."""

from lab.analysis.judging.rows import read_claims
from lab.analysis.judging.verdicts import Claim
from lab.studies import HOME, modules

CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for path in sorted(HOME.glob("*/claims.yaml"))
    for claim in read_claims(path, modules("effects", path.parent.name))
}
