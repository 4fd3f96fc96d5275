"""What a run is: fields, keys and probes that are added or renamed change no id, and find the records there are."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from committed import RESULTS
from lab import PerRunSeed, RunConfig, main, run_config
from lab.analysis import from_frame
from lab.analysis.guard import baseline
from lab.core import schema
from lab.core.registry import BATCHES, BURSTS, DATA, INTERVENTIONS, LINKS, LOSS_SCALES, RESPONSES, SCHEDULES
from lab.model.config import ModelConfig
from lab.records import parts, store
from lab.sweeping.planner import SweepPlan, plan_sweep
from lab.training.identity import FIRST, columns, run_id, static_key
from labwatch.tables.run_table import write
from small import SMALL, tree

# A run that has something of every group but batches and restarts.
EVERYTHING = (
    *("intervention=[z_loss,qk_rmsnorm]", "bad_batches=rare_tokens", "response=rewind_and_skip", "recipe=llama"),
    *("precision=fp16_emulated", "loss_scale=torch", "optimizer=adamw"),
)


def with_later_field(config: Any, kind: type, value: int) -> Any:
    """A nested config, to whose entries of a class a field with the default 3 was added; it has this value."""
    if isinstance(config, Mapping):
        return {key: with_later_field(part, kind, value) for key, part in config.items()}
    if not dataclasses.is_dataclass(config):
        return config
    parts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    parts = {name: with_later_field(part, kind, value) for name, part in parts.items()}
    if type(config) is not kind:
        return type(config)(**parts)
    later = dataclasses.make_dataclass(
        "Later", [("later", int, dataclasses.field(default=3))], bases=(kind,), frozen=True
    )
    later.__module__ = kind.__module__
    return later(**parts, later=value)


@pytest.mark.parametrize(
    "kind",
    [
        RunConfig,
        ModelConfig,
        INTERVENTIONS["z_loss"],
        INTERVENTIONS["qk_rmsnorm"],
        LINKS["adam"],
        LINKS["peak"],
        SCHEDULES["cosine"],
        DATA["synthetic"],
        BURSTS["rare_tokens"],
        RESPONSES["rewind_and_skip"],
        LOSS_SCALES["torch"],
    ],
)
def test_a_field_that_is_added_changes_no_id_and_no_column(kind: Any) -> None:
    config = run_config(tree(*EVERYTHING))
    usual, other = (with_later_field(config, kind, value) for value in (3, 4))
    assert columns(usual) == columns(config)
    assert (run_id(usual, "text"), static_key(usual)) == (run_id(config, "text"), static_key(config))
    assert set(columns(other)) - set(columns(config))
    assert run_id(other, "text") != run_id(config, "text")


@dataclasses.dataclass(frozen=True)
class Counting:
    """The data of another package."""

    seed: PerRunSeed = 0
    upto: int = 9


def test_fields_of_other_packages_are_recorded_whatever_their_value() -> None:
    config = run_config(tree())
    own = dataclasses.replace(config, data=dataclasses.replace(config.data, name="counting", entry=Counting()))
    assert {key: value for key, value in columns(own).items() if key.startswith("data.")} == {
        "data.name": "counting",
        "data.seed": 0,
        "data.upto": 9,
    }


def test_readers_know_the_value_of_every_setting_that_records_leave_out() -> None:
    """Those of bursts and responses apart: a run without one has no value."""
    groups = {"schedule": SCHEDULES, "batch": BATCHES, "data": DATA, "loss_scale": LOSS_SCALES}
    kinds = [(group, registry[name]) for group, registry in groups.items() for name in registry]
    kinds += [(f"intervention.{name}", INTERVENTIONS[name]) for name in INTERVENTIONS]
    kinds += [("", RunConfig), ("model", ModelConfig), *(("optimizer", LINKS[name]) for name in LINKS)]
    known = {"schedule.over": "steps"}
    for group, kind in kinds:
        for field in dataclasses.fields(kind):
            usual = schema.usual_value(kind, field.name)
            if usual not in (dataclasses.MISSING, None) and field.name not in FIRST.get(group, ()):
                known[f"{group}.{field.name}".removeprefix(".")] = usual
    assert known == store.DEFAULTS


NEW_PROBE = "grad_lag_cosine"


def id_of(*words: str) -> str:
    return run_id(run_config(tree(*words)), "text")


@pytest.mark.parametrize("name", ["all", "experts"])
def test_a_probe_that_is_added_to_a_list_changes_no_id(name: str) -> None:
    grown = tree(f"probes={name}")
    names = grown["probes"]["names"]
    grown["probes"] = {**grown["probes"], "names": [NEW_PROBE, *names]}
    assert run_id(run_config(grown), "text") == id_of(f"probes={name}")
    assert columns(run_config(grown))["probes.names"] == "+".join([NEW_PROBE, *names])
    assert set(store.PROBES[name].split()) <= set(names)


def test_any_other_list_is_part_of_an_id_as_ever() -> None:
    lists = ("probes=all", "probes=none", "probes.names=[train_loss]", f"probes.names=[train_loss,{NEW_PROBE}]")
    assert len({id_of(words) for words in lists}) == len(lists)
    assert id_of("probes.names=[val_loss,train_loss]") == id_of("probes.names=[train_loss,val_loss]")


def recorded(folder: Path, *trees: Mapping[str, Any], status: str = "finished") -> list[str]:
    """Leave a record of each tree in a folder; returns the ids."""
    store.open_folder(folder, "eager")
    ids = []
    for config in map(run_config, trees):
        corpus = config.data.entry.open()
        card = {"id": run_id(config, corpus.fingerprint), **columns(config), "data_fingerprint": corpus.fingerprint}
        store.write_run(folder, {**card, "status": status, "final_val_loss": 2.0}, [(0, "train_loss", "", 5.0)])
        ids.append(card["id"])
    return ids


def planned(folder: Path, *trees: Mapping[str, Any], by_any_probes: bool = True) -> SweepPlan:
    trees = tuple({**one, "out": str(folder)} for one in trees)
    how: dict[str, Any] = {"max_runs": None, "is_single": False, "shard": "1/1", "is_local": True, "slots": [None]}
    return plan_sweep(trees, **how, by_any_probes=by_any_probes)


FEWER = (
    "probes=none",
    "probes.names=[train_loss,val_loss]",
    "probes.every=10",
    "probes.names=[val_loss] probes.every=15",
)


@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_run_is_not_trained_again_to_observe_less_of_it(tmp_path: Path, is_gathered: bool) -> None:
    (run,) = recorded(tmp_path, tree("seed=1"))
    if is_gathered:
        store.gather(tmp_path)
    for words in FEWER:
        plan = planned(tmp_path, tree("seed=1", *words.split()), tree("seed=2", *words.split()))
        assert [point.config.seed for point in plan.missing] == [2]
        assert [point.id for point in plan.requested if point.config.seed == 1] == [run]
        assert not plan.unmeasured
    assert len(planned(tmp_path, tree("seed=1", "probes=none"), by_any_probes=False).missing) == 1
    assert len(planned(tmp_path, tree("seed=1", "probes=none", "optimizer.lr=0.1")).missing) == 1


def test_what_a_recorded_run_lacks_is_known(tmp_path: Path) -> None:
    one, two = "probes.names=[train_loss]", "probes.names=[train_loss,val_loss]"
    few, more = recorded(tmp_path, tree(one, "probes.every=1"), tree(two))
    asked = [two, f"probes.names=[val_loss,{NEW_PROBE}]", f"probes.names=[train_loss,{NEW_PROBE}] probes.every=2"]
    plans = [planned(tmp_path, tree(*words.split())) for words in asked]
    assert not any(plan.missing for plan in plans)
    # of two records of a run the one that lacks less
    assert [plan.unmeasured for plan in plans] == [{}, {more: {NEW_PROBE: "names"}}, {few: {NEW_PROBE: "names"}}]
    recorded(tmp_path / "another", tree(two))
    rarer = planned(tmp_path / "another", tree(two, "probes.every=2"))
    assert rarer.unmeasured == {more: {"values every 2 steps": "every"}}


def test_a_failed_run_is_trained_again_whatever_observed_it(tmp_path: Path) -> None:
    recorded(tmp_path, tree("probes=none"), status="failed")
    assert len(planned(tmp_path, tree()).missing) == len(planned(tmp_path, tree("probes=none")).missing) == 1


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        ("", False),
        (f"probes.names=[{NEW_PROBE}]", True),
        ("probes=all", True),
        ("probes.every=1", False),  # names come from the file of the default
    ],
)
def test_a_request_that_names_what_a_record_lacks_is_refused_in_a_line(
    words: str, is_refused: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, tree("probes.names=[train_loss]", "probes.every=1"))
    small = [*SMALL, "hydra/launcher=basic", f"out={tmp_path}", *words.split()]
    code = main(["train", *small, "--dry-run"])
    out, error = capsys.readouterr()
    assert code == (2 if is_refused else 0)
    (line,) = error.splitlines()
    lacking = NEW_PROBE if NEW_PROBE in words else "val_loss, attention_logit_max"
    assert f"{tmp_path} has 1 of these runs without {lacking}" in line
    assert "out=" in line
    assert ("1 already there" in out) is not is_refused


# As if keys had other names until now: one that was renamed twice, one within an intervention, a number that restarts
# change, a group, and an intervention.
RENAMED = {
    "rounded_gains": "gains_of_norms",
    "intervention.nope.period": "intervention.nope.every",
    "optimizer.epsilon": "optimizer.eps",
    "gains_of_norms": "norm_gains",
    "restart_log": "restarts",
    "intervention.a_norm_of_keys": "intervention.qk_layernorm",
}
FIRST_NAMES = {
    "norm_gains": "rounded_gains",
    "intervention.nope.every": "intervention.nope.period",
    "optimizer.eps": "optimizer.epsilon",
    "restarts": "restart_log",
    store.ENTRIES: "restart_log.entries",
}
OLD_RUN = (
    *("precision=mxfp8", "norm_gains=rounded", "intervention=[nope,qk_layernorm]", "intervention.nope.every=2"),
    *("restarts=epsilon_decays", "optimizer.eps=1e-7"),
)


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gathered: bool) -> str:
    """The id of a run in this folder, whose record was written before keys were renamed, as they are now."""
    config = run_config(tree(*OLD_RUN))
    named = {FIRST_NAMES.get(key, key): value for key, value in columns(config).items()}
    named["intervention"] = "a_norm_of_keys+nope"
    named["restart_log.entries"] = named["restart_log.entries"].replace("optimizer.eps=", "optimizer.epsilon=")
    card = {**named, "data_fingerprint": config.data.entry.open().fingerprint}
    run = {"id": store.run_id(card), **card, "status": "finished", "final_val_loss": 2.0}
    store.open_folder(tmp_path, "eager")
    store.write_run(tmp_path, run, [(0, "train_loss", "", 5.0)])
    if is_gathered:
        records, part = store.read(tmp_path), parts.part(tmp_path, 1)
        store.write_metrics(part.metrics, records.metrics)
        store.write_runs(part, records.runs.drop(columns="restarts"))
        shutil.rmtree(tmp_path / "runs")
    for former, now in RENAMED.items():
        monkeypatch.setitem(schema.FORMER_KEYS, former, now)
    return str(run["id"])


@pytest.mark.parametrize("is_gathered", [False, True])
def test_records_under_former_keys_are_read_under_those_of_now_and_found(tmp_path: Path, old_run: str) -> None:
    (now,) = store.read(tmp_path).runs.to_dict("records")
    assert (now["norm_gains"], now["intervention.nope.every"]) == ("rounded", 2)
    assert now["intervention"] == "nope+qk_layernorm"
    assert (now["restarts"], now["optimizer.eps"]) == ("epsilon_decays", 1e-7)
    assert "optimizer.eps=" in now[store.ENTRIES]
    assert not [key for key in now if key in RENAMED or key.startswith("restart_log")]
    assert "optimizer.epsilon" not in now[store.ENTRIES]
    for words in (OLD_RUN, (*OLD_RUN, "probes=none")):
        plan = planned(tmp_path, tree(*words))
        assert ([point.id for point in plan.requested], plan.missing) == ([old_run], [])
    other = tree(*OLD_RUN, "norm_gains=fp32")
    assert planned(tmp_path, other).missing
    recorded(tmp_path, other)
    for runs in (store.read(tmp_path).runs, store.gather(tmp_path).runs):
        assert sorted(runs["norm_gains"].fillna("fp32")) == ["fp32", "rounded"]
        assert set(runs["optimizer.eps"]) == {1e-7}


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """An empty folder, and keys that were renamed."""
    for former, now in RENAMED.items():
        monkeypatch.setitem(schema.FORMER_KEYS, former, now)


@pytest.mark.usefixtures("renamed")
def test_a_plan_that_was_frozen_under_former_keys_is_carried_out() -> None:
    frozen = tree(*OLD_RUN)
    frozen["rounded_gains"], frozen["restart_log"] = frozen.pop("norm_gains"), frozen.pop("restarts")
    frozen["intervention"] = {"a_norm_of_keys": {}, "nope": {"period": 2}}
    frozen["optimizer"]["epsilon"] = frozen["optimizer"].pop("eps")
    assert run_config(frozen) == run_config(tree(*OLD_RUN))


@pytest.mark.usefixtures("renamed")
def test_columns_of_imported_tables_keep_the_names_of_the_user() -> None:
    frame = pd.DataFrame({"lr": [0.1, 0.3], "loss": [2.0, 2.1], "rounded_gains": ["yes", "no"]})
    write(Path("out"), from_frame(frame, arm="rounded_gains").records, "lab import")
    assert "rounded_gains" in store.read(Path("out")).runs


@pytest.mark.usefixtures("renamed")
def test_a_baseline_that_was_saved_under_former_keys_is_read() -> None:
    saved = (RESULTS / "baselines" / "smoke.json").read_text()
    Path("old.json").write_text(saved.replace("optimizer.eps", "optimizer.epsilon"))
    assert baseline.read(Path("old.json")).curves == baseline.read(RESULTS / "baselines" / "smoke.json").curves


OLD_SWEEP = """
rounded_gains: rounded
precision: mxfp8
intervention: {nope: {period: 2}}
defaults: [override /restart_log: epsilon_decays, override /intervention: [nope]]
hydra: {sweeper: {params: {optimizer.epsilon: "1e-7,1e-6"}}}
"""
OLD_WORDS = "train precision=mxfp8 rounded_gains=rounded intervention=[nope] intervention.nope.period=2"


@pytest.mark.usefixtures("renamed")
@pytest.mark.parametrize(
    "words",
    [
        f"{OLD_WORDS} optimizer.epsilon=1e-7 restart_log=epsilon_decays",
        f"{OLD_WORDS} optimizer.epsilon=1e-7 restart_log=log.yaml",
        "sweep old.yaml",
    ],
)
def test_a_request_under_former_keys_is_carried_out_with_a_note_on_each(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("old.yaml").write_text(OLD_SWEEP)
    Path("log.yaml").write_text("restarts: [{step: 0.5, optimizer.epsilon: 1e-5}]")
    assert main([*words.split(), "--cfg", "job", "--resolve"]) == 0
    out, error = capsys.readouterr()
    config = yaml.safe_load(out)
    assert (config["norm_gains"], config["intervention"]) == ("rounded", {"nope": {"every": 2}})
    assert float(config["optimizer"]["eps"]) == 1e-7
    assert all("optimizer.eps" in restart for restart in config["restarts"]["restarts"])
    where = "old.yaml: " if "old.yaml" in words else ""
    expected = {f"lab: {where}{former} is now {now}" for now, former in FIRST_NAMES.items() if now != store.ENTRIES}
    assert set(error.splitlines()) - {"lab: log.yaml: optimizer.epsilon is now optimizer.eps"} == expected
