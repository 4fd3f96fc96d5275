"""`lab compare LOG LOG`: whether two logs share their batches, and what lies between their losses."""

from __future__ import annotations

import json
import math
import re
import shlex
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lab import main
from lab.records import store
from labwatch.events import Log, detect
from labwatch.events.collapse import departure
from labwatch.events.logs import logs_of
from labwatch.events.twins import LEVEL, bumps, gaps, line_of, shared_batches
from planted import cards, write
from sweeping import OutputOf

ROWS = 600
HOME = Path(__file__).parents[1]
PAGE = (HOME / "docs" / "two_logs.md").read_text(encoding="utf-8")


def twin(
    batches: int, own: int, rows: int = ROWS, noise: float = 0.05, alone: float = 0.005, every: int = 10
) -> np.ndarray:
    """A falling loss with the noise of its batches, and some of its own: de-trended twins correlate at 0.99."""
    step_n = every * np.arange(rows)
    draw = [np.random.default_rng(seed).normal(0, 1, rows) for seed in (batches, 1000 + own)]
    return 2 + 8 * (1 + step_n / 60) ** -0.55 + noise * draw[0] + alone * draw[1]


def log(loss: np.ndarray, name: str = "planted", every: int = 10, **columns: np.ndarray) -> Log:
    return Log(name, every * np.arange(len(loss)), {"loss": loss, **columns})


def spliced(first: np.ndarray, then: np.ndarray, row: int) -> np.ndarray:
    return np.where(np.arange(len(first)) < row, first, then)


@pytest.mark.parametrize(("rows", "seed"), [(40, 0), (150, 1), (600, 2)])
def test_twins_share_their_batches_and_others_do_not(rows: int, seed: int) -> None:
    a, b, other = (log(twin(*seeds, rows=rows)) for seeds in ((seed, 1), (seed, 2), (50 + seed, 3)))
    shared, unrelated = shared_batches(a, b), shared_batches(a, other)
    assert (shared.until, shared.shared_rows) == (10 * (rows - 1), rows)
    assert shared.correlation > 0.9
    assert unrelated.until is None
    assert abs(unrelated.correlation) < 4 * unrelated.error


@pytest.mark.parametrize("row", [100, 480])
def test_batches_are_shared_up_to_a_step(row: int) -> None:
    a, b = log(twin(0, 1)), log(spliced(twin(0, 2), twin(9, 2), row))
    sharing = shared_batches(a, b)
    assert sharing.shared_rows == pytest.approx(row, abs=6)
    assert sharing.until == 10 * (sharing.shared_rows - 1)
    assert sharing.correlation > 0.9
    assert abs(sharing.afterwards) < 0.3


def test_a_spike_of_one_twin_does_not_part_them() -> None:
    spiked = twin(0, 2)
    spiked[300:340] += 3 * np.exp(-np.arange(40) / 15)
    assert shared_batches(log(twin(0, 1)), log(spiked)).is_lasting


@pytest.mark.slow
@pytest.mark.parametrize("name", ["curvature_alarm", "own_spike_curvature"])
def test_every_pair_of_committed_runs_is_told_by_its_data_seed(name: str) -> None:
    """Most of these runs spike, and the rule was amended after a first trial on them."""
    records = store.read(HOME / "results" / name)
    seeds = records.runs.set_index("id")["data.seed"]
    logs = [log for log in logs_of(records) if np.isfinite(log.columns["loss"]).all()]
    told = {
        (a.name, b.name): (shared_batches(a, b).is_lasting, bool(seeds[a.name] == seeds[b.name]))
        for a, b in combinations(logs, 2)
    }
    assert [pair for pair, (found, truth) in told.items() if found != truth] == []
    of_one_seed = sum(truth for _, truth in told.values())
    assert f"{of_one_seed} of {of_one_seed}" in PAGE
    assert f"{len(told) - of_one_seed} of {len(told) - of_one_seed}" in PAGE


def test_rows_that_are_missing_or_not_finite_are_left_out_and_few_rows_tell_nothing() -> None:
    broken = twin(0, 2)
    broken[50:60] = math.nan
    sparse = log(broken)._replace(step_n=10 * np.arange(ROWS) + 5 * (np.arange(ROWS) > 400))
    sharing = shared_batches(log(twin(0, 1)), sparse)
    assert sharing.is_lasting
    assert sharing.rows == 401 - 10
    few = shared_batches(log(twin(0, 1, 20)), log(twin(0, 2, 20)))
    assert not few.is_known
    assert few.until is None


def verdict(b: np.ndarray, margin: float = 0.01) -> str:
    a = log(twin(0, 1))
    (gap,) = gaps(a, log(b), shared_batches(a, log(b)), margin=margin)
    return gap.verdict


def test_each_verdict() -> None:
    twins, row_n = twin(0, 2), np.arange(ROWS)
    assert verdict(twins) == "equal"
    assert verdict(twins + 0.04) == "constant gap"
    assert verdict(twins + 1e-4 * row_n) == "growing gap"
    assert verdict(twins + 0.08 - 1e-4 * row_n) == "shrinking gap"
    assert verdict(twin(0, 2, alone=0.2)) == "open"
    wandering = np.cumsum(np.random.default_rng(0).normal(0, 0.02, ROWS))
    assert verdict(twins + wandering, margin=1.0) == "open"


@pytest.mark.parametrize("sign", [1, -1])
def test_a_gap_of_one_sign_is_decided_though_its_size_wanders(sign: int) -> None:
    """Unless it is no larger than the margin, or has the other sign in a single row; and also in few rows."""
    waves_n = 0.1 * np.sin(np.arange(ROWS) / 40)
    assert verdict(twin(0, 2) + sign * (0.25 + waves_n)) == "gap of one sign"
    assert verdict(twin(0, 2) + sign * (0.25 + waves_n), margin=0.5) == "open"
    assert verdict(twin(0, 2) + sign * (0.05 + waves_n)) == "open"
    crossing_n = 0.25 + waves_n - 0.4 * (np.arange(ROWS) == 500)
    assert verdict(twin(0, 2) + sign * crossing_n) == "gap of one sign"  # since a row that bumps does not count
    for rows, expected in ((12, "gap of one sign"), (6, "open")):  # of which half are judged
        a, b = (log(twin(0, seed, rows)) for seed in (1, 2))
        b = b._replace(columns={"loss": b.columns["loss"] + 0.5 * sign})
        (gap,) = gaps(a, b, shared_batches(a, b))
        assert gap.verdict == expected
        assert math.isnan(gap.error)


@pytest.mark.parametrize(("sign", "word"), [(1, "worse"), (-1, "better")])
def test_words_say_which_log_is_better(sign: int, word: str, tmp_path: Path, output_of: OutputOf) -> None:
    waves_n = 0.1 * np.sin(np.arange(ROWS) / 40)
    gap_of = {
        "constant": 0.1 + 0 * waves_n,
        "wanders": 0.25 + waves_n,
        "grows": 2e-4 * np.arange(ROWS),
        "shrinks": 0.2 - 2e-4 * np.arange(ROWS),
        "crosses": 4e-4 * (np.arange(ROWS) - 450),
    }
    first = written(tmp_path / "a.csv", twin(0, 1))
    shown = {
        name: output_of("compare", first, written(tmp_path / f"{name}.csv", twin(0, 2) + sign * gap_n))
        for name, gap_n in gap_of.items()
    }
    patterns = {
        "constant": rf"B is {word} by 0\.\d+ nats throughout",
        "wanders": rf"B is {word} by about 0\.\d+ nats in all rows; its size wanders",
        "grows": rf"B is {word}, and ever more: from \{'+' if sign > 0 else '-'}0\.0",
        "shrinks": rf"B is {word}, but ever less: from \{'+' if sign > 0 else '-'}0\.1",
    }
    other = "better" if word == "worse" else "worse"
    patterns["crosses"] = f"B is {other} at first and {word} at the end"
    assert [name for name, pattern in patterns.items() if not re.search(pattern, shown[name])] == []


def test_logs_of_reinforcement_learning_are_compared_by_their_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output_of: OutputOf
) -> None:
    """No gap of losses is judged, and none is in nats."""
    random, paths = np.random.default_rng(0), list[str]()
    for name, reward in (("a", 0.6), ("b", 0.2)):
        table = {
            "step": range(100),
            "loss": random.normal(0, 0.1, 100),
            "reward": np.where(np.arange(100) < 50, 9.0, reward),
        }
        pd.DataFrame(table).to_csv(tmp_path / f"{name}.csv", index=False)
        paths.append(str(tmp_path / f"{name}.csv"))
    assert compared(capsys, *paths)["pairs"][0]["gaps"] == []
    told, page = output_of("compare", *paths), tmp_path / "page.html"
    output_of("compare", *paths, "--html", page)
    for text in (told, page.read_text(encoding="utf-8")):
        assert "up to 99, is 0.6 of A and 0.2 of B" in text
        assert "nats" not in text


@pytest.mark.parametrize(
    ("first", "second", "start", "compare"),
    [
        (4.39, 10.9, 0, False),
        (8.99, 10.82, 1, False),
        (5.55, 11.7, 10, False),
        (10.82, 10.9, 0, True),
        (9.5, 10.4, 10, True),
    ],
)
def test_losses_per_token_of_two_vocabularies_do_not_compare(
    first: float, second: float, start: int, compare: bool, tmp_path: Path, output_of: OutputOf
) -> None:
    """The first losses of a log that begins with training are near the logarithm of the size of its vocabulary."""
    for name, loss, seed in (("a", first, 0), ("b", second, 1)):
        noise_n = np.random.default_rng(seed).normal(0, 0.02, 60)
        rows = zip(start + 10 * np.arange(60), loss * (0.3 + 0.7 * np.exp(-np.arange(60) / 15)) + noise_n, strict=True)
        (tmp_path / f"{name}.log").write_text("".join(f"step {step} loss {each:.4f}\n" for step, each in rows))
    said = " ".join(output_of("compare", str(tmp_path / "a.log"), str(tmp_path / "b.log")).split())
    assert ("nats per token do not compare, bits per byte of the same text do" in said) == (not compare)
    assert ("B is worse" in said) == compare
    if start == 0 and not compare:
        assert re.search(r"4.39 of A and 10.9 of B, are near ln 8\d and ln 5\d,000", said)


def test_of_two_logs_the_one_that_is_lost_is_worse(tmp_path: Path, output_of: OutputOf) -> None:
    """Also where too few rows are left for a verdict on the gap; two that are lost are not told apart by that."""
    losses = {
        "sound": [7.8, 5.1, 3.2, 3.1, 3.05, 3.0],
        "lost": [7.8, 5.2, 3.3, 310, 280, 260],
        "stuck": [*twin(0, 1)[:400], *(twin(0, 1)[400:] + 1.5)],
        "calm": twin(0, 2),
    }
    paths = {name: written(tmp_path / f"{name}.csv", np.array(loss)) for name, loss in losses.items()}
    assert "B is worse, since B is lost from step 30 on and A is not." in output_of(
        "compare", paths["sound"], paths["lost"]
    )
    assert "B is better, since A is lost from step 30 on and B is not." in output_of(
        "compare", paths["lost"], paths["sound"]
    )
    assert "B is worse, since B is lost from step 4000 on" in output_of("compare", paths["calm"], paths["stuck"])
    for one, other in (("lost", "lost"), ("sound", "sound")):
        assert "is lost" not in output_of("compare", paths[one], paths[other])


def test_the_gap_is_unpaired_where_batches_are_not_shared() -> None:
    a, b = log(twin(0, 1)), log(spliced(twin(0, 2), twin(9, 2), 300) + 0.02)
    paired, unpaired = gaps(a, b, shared_batches(a, b))
    assert (paired.is_paired, unpaired.is_paired) == (True, False)
    assert paired.last < unpaired.first
    assert paired.smallest_gap < unpaired.smallest_gap / 5
    assert abs(unpaired.mean - 0.02) < unpaired.half_width(0.999)


def test_logs_without_a_step_in_common_are_compared_unpaired() -> None:
    a, b = log(twin(0, 1)), log(twin(9, 2) + 0.5)._replace(step_n=10 * np.arange(ROWS) + 5)
    (gap,) = gaps(a, b, shared_batches(a, b))
    assert not gap.is_paired
    assert gap.mean == pytest.approx(0.5, abs=0.02)
    assert gap.verdict == "constant gap"


def test_the_line_is_that_of_least_squares_and_its_variance_that_of_slow_misses() -> None:
    """Against a regression in one go on the line and the shapes, which are orthogonal to it."""
    gap_n = np.random.default_rng(1).normal(0, 0.1, 200).cumsum() * 0.1 + np.random.default_rng(2).normal(0, 0.1, 200)
    gap = line_of(np.arange(200), gap_n, True, 0.01)
    x_n = np.arange(100) - 49.5
    design = np.column_stack(
        [np.ones(100), x_n, *(np.cos(np.pi * j * (x_n + 50) / 100) for j in range(1, gap.freedom + 1))]
    )
    mean, slope = np.linalg.lstsq(design[:, :2], gap_n[100:], rcond=None)[0]
    assert (gap.mean, gap.change) == pytest.approx((mean, 99 * slope))
    square = [float(np.linalg.lstsq(some, gap_n[100:], rcond=None)[1][0]) for some in (design[:, :2], design)]
    assert gap.error == pytest.approx(math.sqrt((square[0] - square[1]) / gap.freedom / 100))


def coverage(correlation: float, rows: int, runs: int) -> tuple[float, float]:
    """How often intervals of mean and change hold the truth, where misses of the line are correlated with the last."""
    rng, hits = np.random.default_rng(rows), np.zeros(2)
    step_n = np.arange(2 * rows)
    for _ in range(runs):
        miss_n, last = rng.normal(0, 1, 2 * rows + 200), 0.0
        for row, new in enumerate(miss_n):
            miss_n[row] = last = correlation * last + new
        gap = line_of(step_n, miss_n[200:] + 0.1 * step_n, True, 0.01)
        at_middle = 0.1 * (gap.first + gap.last) / 2
        hits += (
            abs(gap.mean - at_middle) < gap.half_width(),
            abs(gap.change - 0.1 * (rows - 1)) < gap.change_half_width(),
        )
    return float(hits[0] / runs), float(hits[1] / runs)


def test_intervals_of_white_noise_are_exact() -> None:
    assert coverage(0.0, 60, 400) == pytest.approx((LEVEL, LEVEL), abs=0.035)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "correlation", "least"),
    [(20, 0.0, 0.93), (50, 0.5, 0.92), (200, 0.0, 0.93), (200, 0.5, 0.92), (200, 0.8, 0.92), (1000, 0.95, 0.92)],
)
def test_intervals_of_correlated_misses_nearly_keep_their_level(rows: int, correlation: float, least: float) -> None:
    assert min(coverage(correlation, rows, 2000)) > least


def written(path: Path, loss: np.ndarray) -> str:
    pd.DataFrame({"step": 10 * np.arange(len(loss)), "loss": loss}).to_csv(path, index=False)
    return str(path)


def compared(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["compare", *words, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_the_command_compares_each_log_with_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output_of: OutputOf
) -> None:
    paths = [
        written(tmp_path / f"{name}.csv", loss)
        for name, loss in {"a": twin(0, 1), "b": twin(0, 2) + 0.05, "c": spliced(twin(0, 3), twin(9, 3), 300)}.items()
    ]
    pairs = compared(capsys, *paths)["pairs"]
    assert [pair["second"] for pair in pairs] == paths[1:]
    assert pairs[0]["batches"]["until"] == 10 * (ROWS - 1)
    assert [gap["verdict"] for gap in pairs[0]["gaps"]] == ["constant gap"]
    assert pairs[0]["gaps"][0]["low"] < 0.05 < pairs[0]["gaps"][0]["high"]
    assert [gap["is_paired"] for gap in pairs[1]["gaps"]] == [True, False]
    text = output_of("compare", *paths)
    assert "Batches: shared with A at all 600 steps" in text
    assert "Verdict: B is worse by 0.0" in text
    assert "C: " in text


def test_a_margin_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [written(tmp_path / f"{number}.csv", twin(0, number) + 0.05 * number) for number in range(2)]
    verdicts = [
        compared(capsys, *paths, *words)["pairs"][0]["gaps"][0]["verdict"] for words in ((), ("--within", "0.1"))
    ]
    assert verdicts == ["constant gap", "equal"]


def test_runs_of_a_folder_are_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str], output_of: OutputOf) -> None:
    runs = list(cards(arms=("z_loss",), widths=(32,), lrs=(1e-3,), seeds=(0, 1)))
    folder = write(tmp_path / "records", runs)
    first, second = (str(folder / card["id"]) for card in runs)
    assert compared(capsys, first, second)["first"] == first
    assert "holds 2 runs" in output_of("compare", folder, first, code=2)
    assert "no run none" in output_of("compare", folder / "none", first, code=2)


def test_events_of_one_log_are_told_from_those_of_its_twins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output_of: OutputOf
) -> None:
    spike = np.zeros(ROWS)
    spike[300:320] = 2 * np.exp(-np.arange(20) / 5)
    losses = {"a": twin(0, 1), "b": twin(0, 2) + spike, "c": twin(0, 3) + 0.7 * spike, "d": twin(9, 4) + spike}
    paths = {name: written(tmp_path / f"{name}.csv", loss) for name, loss in losses.items()}
    content = compared(capsys, *paths.values())
    shared = {
        Path(event["run"]).stem: [[Path(name).stem for name in event[key]] for key in ("in_twins", "not_in_twins")]
        for event in content["events"]
        if event["kind"] == "spike" and event["step"] in (3000, 3010)
    }
    assert shared == {"b": [["c"], ["a"]], "c": [["b"], ["a"]], "d": [[], []]}
    assert content["pairs"][0]["gaps"][0]["left_out"] > 3
    text = output_of("compare", *paths.values())
    assert "B step 3000: loss spike, " in text
    assert "; also in C; not in A" in text
    assert "no twin to compare" in text


def test_events_of_every_kind_are_looked_for_in_twins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of kinds that only logs have: a gradient norm that is not finite, and going back to a checkpoint."""
    step_n, norm_n = 10 * np.arange(ROWS), np.random.default_rng(0).lognormal(0, 0.1, ROWS)
    back = np.r_[0:400, 350:ROWS]
    tables = {
        "calm": pd.DataFrame({"step": step_n, "loss": twin(0, 1), "grad_norm": norm_n}),
        "norm": pd.DataFrame(
            {"step": step_n, "loss": twin(0, 2), "grad_norm": np.where(step_n < 3000, norm_n, math.nan)}
        ),
        "back": pd.DataFrame({"step": step_n[back], "loss": twin(0, 3)[back] + 0.001 * (np.arange(650) >= 400)}),
    }
    for name, table in tables.items():
        table.to_csv(tmp_path / f"{name}.csv", index=False, na_rep="nan")
    events = compared(capsys, *(str(tmp_path / f"{name}.csv") for name in tables))["events"]
    twins = {event["kind"]: (event["in_twins"], event["not_in_twins"]) for event in events}
    assert twins["norm_not_finite"] == ([], [str(tmp_path / "calm.csv")])
    assert twins["restart"] == ([], [])


def test_a_spike_is_left_out_of_the_gap() -> None:
    spiked = twin(0, 2)
    spiked[450:480] += 5.0
    a, b = log(twin(0, 1)), log(spiked)
    (gap,) = gaps(a, b, shared_batches(a, b), detect(b))
    assert gap.left_out >= 30
    assert gap.verdict == "equal"


@pytest.mark.parametrize(("size", "rows"), [(0.06, 1), (-0.03, 20)])
def test_a_bump_too_small_for_an_alarm_shows_in_the_gap(size: float, rows: int) -> None:
    bumped = twin(0, 2) + size * ((np.arange(ROWS) >= 400) & (np.arange(ROWS) < 400 + rows))
    a, b = log(twin(0, 1)), log(bumped)
    (bump,) = bumps(a, b, shared_batches(a, b))
    assert bump.first == pytest.approx(4000, abs=30)
    assert bump.last == pytest.approx(4000 + 10 * rows, abs=40)
    assert bump.size == pytest.approx(size, abs=0.02)
    (gap,) = gaps(a, b, shared_batches(a, b))
    assert gap.verdict == "equal"


def test_a_change_that_lasts_is_no_bump() -> None:
    """Also where both logs are equal to the bit before it."""
    parted = spliced(twin(0, 1), twin(0, 2) + 0.1, 400)
    a, b = log(twin(0, 1)), log(parted)
    assert bumps(a, b, shared_batches(a, b)) == []
    (gap,) = gaps(a, b, shared_batches(a, b))
    assert gap.left_out == 0
    assert gap.verdict == "open"


def test_noise_has_no_bumps() -> None:
    for seed in range(20):
        a, b = log(twin(seed, 1)), log(twin(seed, 2))
        assert bumps(a, b, shared_batches(a, b)) == []


def test_the_page_draws_each_pair_with_its_events(tmp_path: Path, output_of: OutputOf) -> None:
    spiked = twin(0, 2)
    spiked[300:310] += 2.0
    losses = {"a": twin(0, 1), "b": spiked, "c": spliced(twin(0, 3), twin(9, 3), 300), "<d>": twin(0, 4, 20)}
    page = tmp_path / "page.html"
    paths = [written(tmp_path / f"{name}.csv", loss) for name, loss in losses.items()]
    assert output_of("compare", *paths, "--html", page).endswith(f"\npage: {page}\n")
    content = page.read_text(encoding="utf-8")
    assert content.count("<svg role=") == 3
    assert "<h2>C against A</h2>" in content
    assert "B step 3000: loss spike" in content
    assert "&lt;d&gt;.csv" in content


COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
QUOTED = [line for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines() if line]


def test_the_commands_of_the_page_print_what_it_quotes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").symlink_to(HOME / "results")
    monkeypatch.chdir(tmp_path)
    for name, width in (("large", 128), ("small", 64), ("smaller", 32)):
        written(tmp_path / f"{name}.csv", sibling(width, 0).columns["loss"])
    for command in COMMANDS:
        assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out
    assert [line for line in QUOTED if line not in printed] == []
    assert (tmp_path / "two_logs.html").exists()


def test_the_gap_of_logs_without_common_steps_is_drawn_where_it_is_judged(tmp_path: Path, output_of: OutputOf) -> None:
    losses, paths = twin(0, 1), [str(tmp_path / f"{name}.csv") for name in "ab"]
    for first, path in enumerate(paths):
        pd.DataFrame({"step": range(first, 2 * len(losses), 2), "loss": losses}).to_csv(path, index=False)
    page = tmp_path / "page.html"
    output_of("compare", *paths, "--html", page)
    assert "gap B - A" in page.read_text(encoding="utf-8")


def sibling(width: int, seed: int, rows: int = 200) -> Log:
    """One curve for all sizes, up to an offset and a factor that depend on the width."""
    return log(width**-0.3 + 5 * width**-0.1 * twin(seed, width, rows) / 10, f"d{width}")


def test_a_run_that_follows_its_siblings_raises_no_alarm_and_one_that_leaves_them_does() -> None:
    siblings = [sibling(width, 0) for width in (32, 64, 128)]
    healthy = sibling(256, 0)
    found = departure(healthy, siblings)
    assert found is not None
    assert found.step is None
    rise_n = 0.3 * np.clip(np.arange(200) / 100 - 1, 0, None)
    rising = healthy._replace(columns={"loss": healthy.columns["loss"] + rise_n})
    alarm = departure(rising, siblings)
    assert alarm is not None
    assert alarm.step is not None
    assert 1000 < alarm.step < 1990
    early = rising._replace(step_n=rising.step_n[:90], columns={"loss": rising.columns["loss"][:90]})
    unfinished = departure(early, siblings)
    assert unfinished is not None
    assert unfinished.step is None
    np.testing.assert_allclose(unfinished.excess_n, alarm.excess_n[: len(unfinished.excess_n)])
    assert departure(healthy, [log(twin(0, 1, 8)), siblings[0]]) is None


def test_an_excess_is_that_of_the_last_pieces_above_a_line_through_those_before_them() -> None:
    """Siblings of one curve exactly; of 40 pieces the run leaves it in the last four, by a tenth of a nat."""
    curve_n = twin(0, 0, 400, noise=0.05, alone=0)
    siblings = [log(offset + factor * curve_n) for offset, factor in ((0.1, 1.2), (0, 1), (-0.1, 0.9))]
    run = log(0.3 + 0.8 * curve_n + 0.1 * (np.arange(400) >= 360))
    found = departure(run, siblings)
    assert found is not None
    assert found.tolerance < 1e-6
    assert found.excess_n[-1] == pytest.approx(0.1)
    assert found.excess_n[-4] == pytest.approx(0.025)
    np.testing.assert_allclose(found.excess_n[:-4], 0, atol=1e-9)
    assert found.step == 3690
    noisy = [
        log(sibling.columns["loss"] + shift * (np.arange(400) >= 360))
        for sibling, shift in zip(siblings, (0.03, 0, 0), strict=True)
    ]
    again = departure(run, noisy)
    assert again is not None
    assert 0.01 < again.tolerance < 0.05


@cache
def three_sizes(name: str) -> tuple[pd.DataFrame, dict[str, Log]]:
    """The runs of three widths in committed records, and their logs."""
    records = store.read(HOME / "results" / name)
    runs = records.runs[records.runs["model.width"].isin([32, 64, 128])].sort_values("model.width")
    return runs, {log.name: log for log in logs_of(records.of(list(runs["id"])))}


def alarms(name: str, arm: str, lr: float, planted: float = 0.0) -> list[bool]:
    """Whether the widest run of each seed at a rate raises an alarm against siblings at the tuned rate of 0.01."""
    runs, logs = three_sizes(name)
    runs, found = runs[runs["intervention"] == arm], []
    for _, of_seed in runs.groupby("data.seed"):
        small, target = of_seed[of_seed["model.width"] < 128], of_seed[of_seed["model.width"] == 128]
        run = logs[target.loc[target["optimizer.lr"] == lr, "id"].item()]
        share_n = run.step_n / run.step_n[-1]
        rising = run._replace(columns={"loss": run.columns["loss"] + planted * np.clip(2 * share_n - 1, 0, None)})
        judged = departure(rising, [logs[each] for each in small.loc[small["optimizer.lr"] == 0.01, "id"]])
        assert judged is not None
        found.append(judged.step is not None)
    return found


@pytest.mark.slow
def test_the_page_says_how_often_siblings_find_trouble_and_cry_wolf() -> None:
    both = ("z_loss", "qk_layernorm+z_loss")
    healthy = [(both[1], lr) for lr in (0.01, 0.03, 0.1, 0.3)] + [(both[0], lr) for lr in (0.01, 0.03)]
    costly = [(both[0], lr) for lr in (0.1, 0.3, 1.0)] + [(both[1], 1.0)]
    groups = [
        [alarms("qk_layernorm", arm, lr) for arm, lr in healthy],
        [alarms("qk_layernorm", arm, lr) for arm, lr in costly],
        [alarms("qk_layernorm", arm, 0.01, 0.2) for arm in both],
        [alarms("logit_growth", "z_loss", lr) for lr in (0.003, 0.01)],
        [alarms("logit_growth", "z_loss", lr) for lr in (0.1, 0.3)],
    ]
    counts = [f"{np.sum(found)} of {np.size(found)}" for found in groups]
    section = PAGE.split("## Siblings of other sizes")[1]
    assert counts == re.findall(r"\d+ of \d+", section)


def test_the_command_follows_siblings(tmp_path: Path, capsys: pytest.CaptureFixture[str], output_of: OutputOf) -> None:
    rise_n = 0.3 * np.clip(np.arange(200) / 100 - 1, 0, None)
    losses = {width: sibling(width, 0).columns["loss"] for width in (256, 32, 64)}
    paths = [written(tmp_path / f"{width}.csv", loss + rise_n * (width == 256)) for width, loss in losses.items()]
    content = compared(capsys, *paths, "--siblings")
    assert 1000 < content["alarm"] < 1990
    assert content["siblings"] == paths[1:]
    assert "leaves the curve of its siblings" in output_of("compare", *paths, "--siblings")
    page = tmp_path / "page.html"
    assert main(["compare", *paths, "--siblings", "--html", str(page)]) == 0
    assert "leaves the curve" in page.read_text()
    assert "keeps to the curve of its siblings" in output_of("compare", *paths[1:], *paths[1:], "--siblings")
    assert "two siblings" in output_of("compare", *paths[:2], "--siblings", code=2)
    flat = written(tmp_path / "flat.csv", np.zeros(200))
    assert "never changes" in output_of("compare", *paths, flat, "--siblings", code=2)
