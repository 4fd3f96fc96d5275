"""The claims of all studies, by name: rows of their ``claims.yaml``, with functions of their modules of effects."""

from typing import Any

from lab.analysis.judging.rows import read_claims
from lab.analysis.judging.verdicts import Claim
from lab.studies import HOME, modules

CLAIMS: dict[str, Claim] = {}
for _path in sorted(HOME.glob("*/claims.yaml")):
    _named: dict[str, Any] = {}
    for _module in modules("effects", _path.parent.name):
        _named |= vars(_module)
    CLAIMS |= {claim.name: claim for claim in read_claims(_path, _named)}
