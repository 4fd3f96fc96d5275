"""Keep the effects on earlier fresh seeds, whose records later ones replaced: ``python results/earlier_seeds.py``.

Takes the earlier records out of the history of git, and writes into each folder ``earlier_seeds.COMMIT.csv``, which
``lab claims`` pools with the folder's own seeds.  Left out are claims whose runs were trained otherwise than those of
today, which it prints, and seeds 0 to 2, on which rules were made.
"""

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pandas as pd

from lab.analysis.judging import earlier_seeds
from lab.analysis.judging.evidence import Evidence
from lab.analysis.judging.verdicts import Claim, effects_of, instability_effects
from lab.records import store
from lab.studies.claims import CLAIMS

RESULTS = Path(__file__).parent
# Commits of records on fresh seeds that later ones replaced.
COMMITS = {
    "adam_theory": ("17d2d50", "02558d7"),
    "architecture_arms": ("c34c5db",),
    "decay_and_epsilon": ("388a55a", "fdaa1aa"),
    "depth_width": ("f29315f",),
    "kappa": ("9ddaf70",),
    "ledgers": ("ae8d6d7",),
    "new_data": ("ae8d6d7",),
    "optimizer_arms": ("f4d95a8",),
    "spike_responses": ("6a63391",),
    "state_and_data": ("6f14a28",),
}


def effects_at(commit: str, name: str) -> tuple[pd.DataFrame, list[Claim]]:
    """Effects of the claims of a sweep on its records at a commit, and the claims that were trained otherwise."""
    shown = subprocess.run(["git", "-C", RESULTS, "archive", commit, name], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(shown)) as archive:
            archive.extractall(folder, filter="data")
        then, now = (
            Evidence(str(path), store.read(path), store.commands(path)) for path in (Path(folder, name), RESULTS / name)
        )
        tables, otherwise = list[pd.DataFrame](), list[Claim]()
        for claim in (claim for claim in CLAIMS.values() if claim.sweep == name):
            arms, effects = effects_of(claim, [then])
            config = earlier_seeds.config_of(arms)
            if config != earlier_seeds.config_of(effects_of(claim, [now])[0]):
                otherwise.append(claim)
                continue
            tables.append(earlier_seeds.rows(claim.name, config, effects))
            if any(arm.reads_sensitivity for arm in arms):
                part = earlier_seeds.INSTABILITY_PART
                tables.append(earlier_seeds.rows(claim.name, config, instability_effects(claim, arms), part))
    return pd.concat(tables) if tables else pd.DataFrame(), otherwise


if __name__ == "__main__":
    for sweep, commits in COMMITS.items():
        for commit in commits:
            effects, otherwise = effects_at(commit, sweep)
            for claim in otherwise:
                print(f"{sweep} at {commit}: other precision, engine or config, not pooled: {claim.name}")
            if len(effects):
                effects.to_csv(RESULTS / sweep / earlier_seeds.PATTERN.replace("*", commit))
