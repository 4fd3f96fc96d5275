"""Ids of committed runs and verdicts on committed records, which no change of the code may change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from committed import RESULTS
from composing import remember
from lab import run_config
from lab.analysis.judging.evidence import read_evidence
from lab.analysis.judging.verdicts import judge_claim
from lab.cli.compose import Composer, hydra_configs, resolved
from lab.cli.request import read_request
from lab.core.shipped import sweeps
from lab.records import store
from lab.studies.claims import CLAIMS
from lab.training.identity import run_id
from small import tree

GOLDEN = yaml.safe_load(Path(__file__).with_name("golden.yaml").read_text())


@pytest.fixture(scope="module", autouse=True)
def remembered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        remember(patch)
        yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize("name", GOLDEN["ids"])
def test_a_request_for_a_committed_run_finds_it(name: str) -> None:
    folder, words = GOLDEN["ids"][name]
    runs = pd.read_parquet(RESULTS / folder / "runs.parquet", columns=["id", "data_fingerprint"]).set_index("id")
    request = read_request(words.split(), "lab sweep", name="golden", sweep=sweeps().get(Path(folder).name))
    with hydra_configs(request.files):
        config = Composer().config(request.words)
    assert run_id(run_config(resolved(config)), runs.loc[name, "data_fingerprint"]) == name


@dataclass(frozen=True)
class Mine:
    """A custom model."""

    window: int = 3


def test_a_run_of_a_custom_model_keeps_its_id() -> None:
    config = replace(run_config(tree("intervention=[]")), guest={"mine": Mine()})
    assert run_id(config, "text") == "75cd2596722dec72"


@pytest.mark.parametrize("folder", GOLDEN["verdicts"])
def test_claims_have_the_verdicts_that_they_had(folder: str) -> None:
    records = store.read(RESULTS / folder)
    evidence = read_evidence(RESULTS / folder, records)
    expected = GOLDEN["verdicts"][folder]
    assert {name: judge_claim(CLAIMS[name], [evidence]).verdict for name in expected} == expected
