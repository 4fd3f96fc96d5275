"""The pytest plugin, as a repository that guards its recipe uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import pytest_plugin
from lab.analysis.guard import baseline
from lab.features.guard import baselines
from planted import card_folder, cards, write
from sweeping import finished

TINY = """
defaults:
  - override /data: synthetic
hydra: {sweeper: {params: {optimizer.lr: "1e-2,1e-1", seed: "0,1,2"}}}
model: {width: 16, head_width: 8}
seq_len: 12
batch_size: 4
steps: 12
validation: short
"""
TESTS = """
import pytest

@pytest.mark.sensitivity(sweep="tiny.yaml", baseline="good.json")
def test_as_it_was(sensitivity_curve):
    sensitivity_curve.check()
    assert list(sensitivity_curve.curves["arm"]) == ["with qk-layernorm and z-loss"]

@pytest.mark.sensitivity(sweep="tiny.yaml", baseline="better.json")
def test_it_was_better(sensitivity_curve):
    sensitivity_curve.check()

@pytest.mark.sensitivity(sweep="tiny.yaml", baseline="better.json", margin="90%")
def test_who_cares(sensitivity_curve):
    sensitivity_curve.check()

@pytest.mark.sensitivity(sweep="tiny.yaml", baseline="better.json", margin="90%", strict=True)
def test_not_a_bit(sensitivity_curve):
    sensitivity_curve.check()

@pytest.mark.sensitivity(sweep="tiny.yaml", baseline="none.json")
def test_nothing_to_compare(sensitivity_curve):
    assert sensitivity_curve.checked.verdict == "cannot judge"
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Planted records; and libraries loaded before a pytester begins, which unloads what is loaded after that."""
    return write(tmp_path_factory.mktemp("planted") / "folder", list(cards()))


@pytest.fixture
def outside(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A repository of somebody else's."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return pytester


def write_baseline(folder: Path, file: Path) -> None:
    baselines.save(folder, file)


def run(outside: pytest.Pytester, *words: str | Path) -> pytest.RunResult:
    return outside.runpytest_inprocess("-p", "no:cacheprovider", *words)


@pytest.mark.slow
def test_a_test_trains_its_sweep_and_compares(outside: pytest.Pytester) -> None:
    (outside.path / "tiny.yaml").write_text(TINY)
    finished(outside.path / "before", "sweep", "tiny.yaml", "hydra/launcher=basic")
    baseline.save(baseline.from_folder(outside.path / "before"), outside.path / "good.json")
    told = json.loads((outside.path / "good.json").read_text())
    for one in told["curves"][0]["runs"]:
        one["loss"] -= 1
    (outside.path / "better.json").write_text(json.dumps(told))
    outside.makepyfile(TESTS)
    ended = run(outside, "--lab-out", "kept")
    ended.assert_outcomes(passed=3, failed=2)
    ended.stdout.fnmatch_lines(["*RegressionError: regression: *", "*regression *best loss *"])
    ended.stdout.fnmatch_lines(["*RegressionError: drift: *", "*drift *best loss *"])
    run(outside, "--lab-out", "kept").stdout.fnmatch_lines(["*tiny is not empty; a guarded recipe is trained anew*"])


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_options_alone_are_a_test(folder: Path, outside: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest_plugin, "train", lambda command, sweep, overrides, out: folder)
    baseline.save(baseline.from_folder(folder), outside.path / "b.json")
    words = ("--lab-sweep", "smoke", "--lab-baseline")
    run(outside, *words, "b.json").assert_outcomes(passed=1)
    ended = run(outside, *words, "none.json")
    ended.assert_outcomes(failed=1)
    ended.stdout.fnmatch_lines(["cannot judge: *", "- no baseline none.json: No such file or directory"])
    outside.makepyfile("def test_mine(sensitivity_curve): assert sensitivity_curve.checked.verdict == 'ok'")
    run(outside, *words, "b.json").assert_outcomes(passed=1)
    other = "import pytest\n@pytest.mark.sensitivity(sweep='other', baseline='b.json')\n"
    outside.makepyfile(f"{other}def test_mine(sensitivity_curve): sensitivity_curve.check()")
    run(outside, *words, "none.json").assert_outcomes(passed=1, failed=1)


@pytest.mark.slow
def test_a_card_is_guarded_by_its_fixture_or_by_the_options(
    outside: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    monkeypatch.setattr(pytest_plugin, "train", lambda *words: trained.append(words) or card_folder(tmp_path, 0.35))
    write_baseline(card_folder(tmp_path / "good", 0.35), outside.path / "b.json")
    write_baseline(card_folder(tmp_path / "better", 0.12), outside.path / "better.json")
    words = ("--lab-stress", "mine.yaml", "--lab-baseline")
    run(outside, *words, "b.json").assert_outcomes(passed=1)
    assert trained[0][:3] == ("stress", "mine.yaml", ())
    ended = run(outside, *words, "better.json")
    ended.assert_outcomes(failed=1)
    ended.stdout.fnmatch_lines(["regression: *", "*regression *learning-rate tolerance*"])
    marker = "import pytest\n@pytest.mark.crash_test(recipe='mine', baseline='b.json', overrides=['seed=1'])\n"
    outside.makepyfile(f"{marker}def test_mine(crash_card):\n crash_card.check()\n assert crash_card.card['is_judged']")
    run(outside, "--strict-markers").assert_outcomes(passed=1)
    assert trained[-1][:3] == ("stress", "mine", ["seed=1"])
    outside.makepyfile(f"{marker.replace('recipe=', 'sweep=')}def test_mine(crash_card): pass")
    run(outside).stdout.fnmatch_lines(["*UsageError: unknown key 'sweep'*recipe=*"])


def test_what_is_missing_is_said(outside: pytest.Pytester) -> None:
    outside.makepyfile("def test_mine(sensitivity_curve): pass")
    ended = run(outside)
    ended.assert_outcomes(errors=1)
    ended.stdout.fnmatch_lines(["*UsageError: no sweep; give --lab-sweep NAME|FILE*"])
    ended = run(outside, "--lab-sweep", "smok", "--lab-margin", "five")
    ended.stdout.fnmatch_lines(["*--margin must be a part of the best loss*"])
    ended = run(outside, "--lab-sweep", "smok")
    ended.stdout.fnmatch_lines(["*lab: unknown sweep 'smok'; nearest: smoke; or give a FILE.yaml*"])
    outside.makepyfile("def test_mine(): pass")
    for words in (["--lab-sweep", "smoke"], ["--lab-baseline", "b.json"]):
        assert run(outside, *words).ret == pytest.ExitCode.USAGE_ERROR
    outside.makepyfile("def test_mine(request): assert 'sensitivity' in str(request.config.getini('markers'))")
    run(outside, "--strict-markers").assert_outcomes(passed=1)
