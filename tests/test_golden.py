"""Ids of committed runs and verdicts on committed records, which no change of the code may change."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

from committed import RESULTS
from lab import RunConfig, run_config
from lab.core import shelf
from lab.core.registry import (
    BATCHES,
    BURSTS,
    DATA,
    INTERVENTIONS,
    LINKS,
    LOSS_SCALES,
    PARAMETRIZATIONS,
    RESPONSES,
    SCHEDULES,
    Registry,
)
from lab.core.roles import TUNABLE_ROLES
from lab.core.schema import key_now
from lab.core.shipped import sweeps
from lab.model.config import ModelConfig
from lab.probes.listener import ProbesConfig
from lab.records import store
from lab.sweeping.compose import Composer
from lab.sweeping.request import read_request
from lab.training.config import Budget
from lab.training.identity import run_id
from small import tree
from studies.claims.evidence import read_evidence
from studies.claims.registry import CLAIMS
from studies.claims.verdicts import committed, judge_claim

GOLDEN = yaml.safe_load(Path(__file__).with_name("golden.yaml").read_text())


@pytest.mark.parametrize("name", GOLDEN["ids"])
def test_a_request_for_a_committed_run_finds_it(name: str) -> None:
    folder, words = GOLDEN["ids"][name]
    runs = pd.read_parquet(RESULTS / folder / "runs.parquet", columns=["id", "data_fingerprint"]).set_index("id")
    request = read_request(words.split(), "lab sweep", name="golden", sweep=sweeps().get(Path(folder).name))
    tree = Composer(request.config_dir, request.files).tree(request.words)
    assert run_id(run_config(tree), runs.loc[name, "data_fingerprint"]) == name


@dataclass(frozen=True)
class Mine:
    """A custom model."""

    window: int = 3


def test_a_run_of_a_custom_model_keeps_its_id() -> None:
    config = replace(run_config(tree("intervention=[]")), custom_model={"mine": Mine()})
    assert run_id(config, "text") == "75cd2596722dec72"


@pytest.mark.parametrize("folder", GOLDEN["verdicts"])
def test_claims_have_the_verdicts_and_the_effects_that_they_had(folder: str) -> None:
    """Effects on earlier seeds, which a folder keeps under a digest of the keys of their runs, count as well."""
    evidence = read_evidence(RESULTS / folder, store.read(RESULTS / folder))
    expected, before = GOLDEN["verdicts"][folder], committed()
    found = {name: judge_claim(CLAIMS[name], [evidence]) for name in expected}
    assert {name: verdict.verdict for name, verdict in found.items()} == expected
    for name, verdict in found.items():
        for number in ("effect", "low", "high"):
            wanted = before[name][number]
            assert getattr(verdict, number) == pytest.approx(
                math.nan if wanted is None else wanted, rel=1e-6, nan_ok=True
            )


def named_probes(node: Any) -> set[str]:
    """The probes that the row of a claim names."""
    if isinstance(node, dict):
        own = {node["probe"]} if isinstance(node.get("probe"), str) else set()
        return own.union(*map(named_probes, node.values()))
    return set().union(*map(named_probes, node)) if isinstance(node, list) else set()


def probes_of_claims() -> dict[tuple[str, str], set[str]]:
    """By sweep and claim the probes that its row names."""
    found = {}
    for path in sorted(shelf.HOME.glob("*/claims.yaml")):
        for block in yaml.safe_load(path.read_text()):
            for name, row in block["claims"].items():
                if probes := named_probes(row):
                    found[row.get("sweep", block.get("sweep")), name] = probes
    return found


def test_folders_keep_the_probes_that_their_claims_name() -> None:
    """A claim on values that its folder has pruned would not be run, which nothing else says."""
    kept = {
        path.name: set[str]().union(
            *(pq.read_table(file, columns=["probe"])["probe"].unique().to_pylist() for file in files)
        )
        for path in RESULTS.iterdir()
        if (files := sorted(path.glob("metrics*.parquet")))
    }
    claims = probes_of_claims()
    assert len(claims) > 20
    assert {claim: lacking for claim, probes in claims.items() if (lacking := probes - kept.get(claim[0], set()))} == {}


def of_the_lab(registry: Registry[Any]) -> list[str]:
    return [name for name in registry if registry[name].__module__.startswith("lab.")]


def keys() -> set[str]:
    """The columns that the config of a run can have now."""
    groups = {
        **{"batch": BATCHES, "bad_batches": BURSTS, "data": DATA, "loss_scale": LOSS_SCALES, "response": RESPONSES},
        **{"parametrization": PARAMETRIZATIONS, "schedule": SCHEDULES},
    }
    kinds: list[tuple[str, Any]] = [("", RunConfig), ("", Budget), ("model.", ModelConfig), ("probes.", ProbesConfig)]
    # other tests register entries of their own
    kinds += [(f"{group}.", registry[name]) for group, registry in groups.items() for name in of_the_lab(registry)]
    kinds += [(f"intervention.{name}.", INTERVENTIONS[name]) for name in of_the_lab(INTERVENTIONS)]
    links = of_the_lab(LINKS)
    owners = ["", *(f"{name}." for name in (*links, *TUNABLE_ROLES))]
    kinds += [(f"optimizer.{owner}", LINKS[name]) for owner in owners for name in links]
    named = {f"{group}.name" for group in (*groups, "optimizer", "scale")}
    found = {f"{prefix}{field.name}" for prefix, kind in kinds for field in fields(kind)}
    return found | named | {*store.RUN_COLUMNS, store.ORDER, store.ENTRIES, "schedule.over", "optimizer.chain"}


def test_every_column_of_committed_records_is_a_key_of_now() -> None:
    """A key that was renamed has its row in ``FORMER_KEYS``; one that no committed record has is pinned by its name."""
    known, tables = keys(), sorted(RESULTS.glob("**/runs*.parquet"))
    assert len(tables) > 60
    columns = {table: {*map(key_now, pq.read_schema(table).names)} for table in tables}
    unknown = {
        f"{table.relative_to(RESULTS)}: {column}" for table, of_table in columns.items() for column in of_table - known
    }
    assert not unknown
    pinned = {key_now(key) for key in GOLDEN["keys"].split()}
    owned = re.compile(rf"optimizer\.({'|'.join((*LINKS, *TUNABLE_ROLES))})\.")  # as optimizer.KEY, of which it is told
    assert pinned <= known
    assert {key for key in known if not owned.match(key)} <= set.union(pinned, *columns.values())
