"""Alarms: planted spikes of every kind and ending, logs of other programs, and `lab watch`."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import planted
from lab import main
from lab.analysis import watch
from lab.core.errors import RequestError
from lab.core.spike_trigger import LEAST_RISE, STALLED_FOR, SpikeTrigger, triggered
from lab.core.windows import FEWEST, MERGE, window_statistics
from lab.records import store
from labwatch.events import Log, detect
from labwatch.events.detectors import HELD, LEAD
from labwatch.events.levels import Level, read_levels
from labwatch.events.log_names import OF_SAMPLES
from labwatch.events.logs import logs_of, read_logs
from labwatch.watch.pages import event_figure
from labwatch.watch.watching import remarks
from labwatch.watch.words import next_look, what_happened
from planted import cards, write

STEPS = np.arange(1000)


def calm(seed: int = 0, steps: int = 1000) -> np.ndarray:
    """A falling loss with noise of 0.02 nats."""
    return 2 + 4 * np.exp(-np.arange(steps) / 60) + np.random.default_rng(seed).normal(0, 0.02, steps)


def bump(height: float, at: int = 500, decay: float = 15.0) -> np.ndarray:
    """A sudden rise that decays."""
    after = np.maximum(STEPS - at, 0)
    return np.where(at <= STEPS, height * np.exp(-after / decay), 0.0)


def log(loss: np.ndarray, **columns: np.ndarray) -> Log:
    return Log("planted", STEPS[: len(loss)], {"loss": loss, **columns})


@pytest.mark.parametrize("seed", range(6))
def test_a_calm_run_raises_no_alarm(seed: int) -> None:
    norms = np.random.default_rng(seed).lognormal(0, 0.3, 1000)
    assert detect(log(calm(seed), grad_norm=norms)) == []


@pytest.mark.parametrize(("side", "value"), [("above", 200.0), ("below", 2.0)])
def test_a_level_raises_one_alarm_where_its_column_passes_it(side: str, value: float, tmp_path: Path) -> None:
    logits = np.full(1000, 20.0)
    logits[700:705] = value
    logits[:100] = np.nan
    path = tmp_path / "levels.json"
    path.write_text(json.dumps({"attention_logit_max": {side: 10 if side == "below" else 100}}))
    events = detect(log(calm(), attention_logit_max=logits), levels=read_levels(path))
    (event,) = (event for event in events if event.kind == "level_attention_logit_max")
    assert (event.step, event.value, event.usual) == (700, value, 10 if side == "below" else 100)


def test_a_level_of_a_column_that_a_log_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"step {step} loss {2 + 1e-3 * (step % 7)}\n" for step in range(100))
    (tmp_path / "a.log").write_text(rows)
    (tmp_path / "levels.json").write_text('{"eps_ratio": {"above": 1}, "loss": {"above": 2.005}}')
    assert main(["watch", str(tmp_path / "a.log"), "--thresholds", str(tmp_path / "levels.json")]) == 1
    printed = capsys.readouterr().out
    assert "no column eps_ratio" in printed
    assert "level of loss passed, 2.01 above 2" in printed


@pytest.mark.parametrize("height", [0.3, 1.0, 10.0])
def test_a_spike_is_one_event_and_recovers(height: float) -> None:
    (event,) = detect(log(calm() + bump(height)))
    assert (event.kind, event.step, event.ending) == ("spike", 500, "recovered")
    assert event.value == pytest.approx(2 + height, abs=0.1)
    assert event.usual == pytest.approx(2, abs=0.05)
    # exp(-n / 15) * height falls to two deviations, 0.04
    assert event.end is not None
    assert event.end - 500 == pytest.approx(15 * np.log(height / 0.04), abs=15)


def test_two_spikes_are_two_events_and_close_ones_are_one() -> None:
    assert [event.step for event in detect(log(calm() + bump(2.0, 400) + bump(2.0, 700)))] == [400, 700]
    assert [event.step for event in detect(log(calm() + bump(2.0, 500) + bump(2.0, 510)))] == [500]


def test_the_gradient_warns_before_the_loss() -> None:
    norms = np.ones(1000)
    norms[488:520] = 20.0
    first, second = detect(log(calm() + bump(2.0), grad_norm=norms))
    assert (first.kind, first.step) == ("gradient_spike", 488)
    assert (second.kind, second.step, second.lead) == ("spike", 500, 12)


def test_the_running_mean_of_norms_stands_still_in_an_event() -> None:
    """Else a long event would make its own end."""
    norms = np.ones(1000)
    norms[300:600] = 6.0
    (event,) = (event for event in detect(log(calm(), grad_norm=norms)) if event.kind == "gradient_spike")
    assert (event.step, event.usual) == (300, pytest.approx(1.0))


def test_the_usual_norm_of_an_event_is_that_before_it() -> None:
    norms = np.ones(1000)
    norms[300:] = 1.5
    norms[[300, 900]] = 50.0
    found = [event.usual for event in detect(log(calm(), grad_norm=norms)) if event.kind == "gradient_spike"]
    assert found == [pytest.approx(1.0), pytest.approx(1.5, rel=0.02)]


@pytest.mark.parametrize(
    ("column", "kind", "low", "high"),
    [
        ("attention_logit_max", "logit_growth", 10.0, 100.0),
        ("update_rms", "update_rms", 0.2, 0.6),
        ("eps_ratio", "epsilon_ratio", 0.01, 3.0),
        ("update_curvature", "curvature", 0.9, 1.1),
        ("expert_load_max", "router_collapse", 2.5, 4.0),
        ("router_logit_max", "router_logits", 5.0, 30.0),
    ],
)
def test_probes_raise_alarms_of_their_own(column: str, kind: str, low: float, high: float) -> None:
    (event,) = detect(log(calm(), **{column: np.where(STEPS >= 600, high, low)}))
    assert (event.kind, event.step) == (kind, 600)


def test_a_balancing_loss_alarms_where_it_stays_above_its_smallest_median() -> None:
    """Whatever the coefficient with which it is logged; a few high rows are no collapse."""
    balance = np.where(STEPS >= 600, 1.6, 1.0)
    for coefficient in (1.0, 1e-2):
        (event,) = detect(log(calm(), router_balance=coefficient * balance))
        assert (event.kind, event.step) == ("router_balance", 600)
        assert event.usual == pytest.approx(coefficient)
    brief = np.where((STEPS >= 600) & (600 + HELD - 1 > STEPS), 3.0, 1.0)
    assert detect(log(calm(), router_balance=brief)) == []
    assert detect(log(calm(), expert_load_max=brief + 1)) == []


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (
            " iteration {step}/ 3000 | lm loss {loss:.6E} | load_balancing_loss: {high:.6E} | z_loss: 9.0E+00 |",
            "balance",
        ),
        (" iteration {step}/ 3000 | lm loss {loss:.6E} | z_loss: {square:.6E} |", "logits"),
        ('{{"step": {step}, "loss": {loss}, "z_loss": {square}, "load_balancing_loss": 1.0}}', "logits"),
        ('{{"step": {step}, "train/CE loss": {loss}, "train/router Z loss": {square}}}', "logits"),
        ('{{"step": {step}, "train/loss": {loss}, "train/block 00/load imbalance": {high}}}', "collapse"),
    ],
)
def test_names_of_other_trainers_are_known(form: str, kind: str, tmp_path: Path) -> None:
    high = np.where(STEPS >= 600, 20.0, 2.0)
    rows = zip(STEPS, calm(), high, strict=True)
    (tmp_path / "a.log").write_text(
        "".join(f"{form.format(step=n, loss=x, high=y, square=y**2)}\n" for n, x, y in rows)
    )
    (run,), _ = read_logs(tmp_path / "a.log")
    assert [(event.kind, event.step) for event in detect(run)] == [(f"router_{kind}", 600)]


def pulses(*rows: int) -> np.ndarray:
    """Ones, and 20 at some rows."""
    return np.where(np.isin(STEPS, rows), 20.0, 1.0)


@pytest.mark.parametrize(
    ("factor", "low", "lead"), [(3.2, [], 15), (3.2, [490], 15), (3.2, [489, 490, 491], 8), (2.0, [], None)]
)
def test_a_gradient_norm_that_stays_high_up_to_a_spike_is_its_lead(
    factor: float, low: list[int], lead: int | None
) -> None:
    """Though it is no alarm; single low rows do not end it, and several do."""
    norm_n = np.random.default_rng(0).lognormal(0, 0.05, 1000)
    norm_n[485:501] *= factor
    norm_n[low] = 1.0
    (event,) = detect(log(calm() + bump(3.0), grad_norm=norm_n))
    assert (event.kind, event.step, event.lead) == ("spike", 500, lead)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((3e-4, 3e-4), "at the same learning rate as before"),
        ((2.998e-4, 3e-4), "at the same learning rate as before"),
        ((3e-4, 1.5e-4), "at learning rate 0.00015 instead of 0.0003"),
        ((None, None), "goes back from step 519"),
    ],
)
def test_the_rate_of_an_attempt_is_compared_with_the_first_one_at_the_same_step(
    rates: tuple[float | None, float | None], words: str, tmp_path: Path
) -> None:
    """A rate that falls with the steps is higher where training goes back to, but that is no difference of attempts."""
    steps, losses = [*range(520), *range(400, 900)], [*calm()[:520], *calm(1)[400:900]]
    lr_n = [
        rate and rate * (1 - (step - 400) / 2000)
        for step, rate in zip(steps, [rates[0]] * 520 + [rates[1]] * 500, strict=True)
    ]
    table = pd.DataFrame({"step": steps, "loss": losses, "lr": lr_n})
    table.dropna(axis=1).to_csv(tmp_path / "log.csv", index=False)
    run = read_logs(tmp_path / "log.csv").runs[1]
    (event,) = detect(run)
    said = what_happened(run, event)
    assert said.endswith(words)
    assert ("learning rate" in said) == (rates[0] is not None)


def test_a_level_says_the_value_where_it_is_passed_and_the_largest_later() -> None:
    for value_n, words in (
        (np.where(STEPS < 500, 100, 210.0), "210 above 200"),
        (np.where(STEPS < 500, 100, STEPS - 290.0), "210 above 200, later 709"),
    ):
        run = log(calm(), attention_logit_max=value_n)
        (event,) = (
            each for each in detect(run, levels={"attention_logit_max": Level(200.0, True)}) if "level" in each.kind
        )
        assert what_happened(run, event) == f"level of attention_logit_max passed, {words}"
    falls = log(calm(), loss_scale=np.where(STEPS < 500, 4096.0, 1500.0 - STEPS))
    (event,) = detect(falls, levels={"loss_scale": Level(2000.0, False)})
    assert what_happened(falls, event) == "level of loss_scale passed, 1e+03 below 2e+03, later 501"


@pytest.mark.parametrize(
    ("height", "until", "words", "advice"),
    [
        (1.0, 520, "loss spike, 2 to 3.0, recovered at step 52", "--replay, tells data from chance"),
        (
            1.0,
            1000,
            "loss spike, 2 to 3.0, not recovered, 499 steps, to the end of the log",
            "back to a checkpoint before step 500",
        ),
        (1.0, 930, "recovered at step 93", "--replay, tells data from chance"),
        (
            9.0,
            1000,
            "the loss diverges, 2 to 11, not recovered, 499 steps, to the end of the log",
            "back to a checkpoint",
        ),
        (1.0, 501, "a bump of one row", "--replay"),
    ],
)
def test_the_first_line_says_whether_a_spike_recovered_and_the_advice_follows(
    height: float, until: int, words: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = 2 + 4 * np.exp(-STEPS / 30) + np.random.default_rng(0).normal(0, 0.01, 1000)
    losses[500:until] += height
    _, out, _ = watched(capsys, write_log(tmp_path / "log.csv", STEPS, losses))
    line = next(line for line in out.splitlines() if line.startswith("log.csv step 500: "))
    pattern = "".join(r"\d*" if part == "" else re.escape(part) for part in [words])
    assert re.search(pattern.replace(r"3\.0", r"3(\.0\d)?"), line), line
    assert advice in line
    assert ("back to a checkpoint" in line) == (until == 1000)
    assert "stuck" not in line


@pytest.mark.parametrize(("apart", "events"), [(MERGE - 1, [300]), (MERGE, [300, 300 + MERGE])])
def test_alarms_are_one_event_when_closer_than_twenty_rows(apart: int, events: list[int]) -> None:
    assert [event.step for event in detect(log(calm(), grad_norm=pulses(300, 300 + apart)))] == events


@pytest.mark.parametrize(("apart", "events"), [(MERGE - 1, [300]), (MERGE, [300, 300 + MERGE])])
def test_a_rise_within_twenty_rows_of_a_spike_triggers_nothing(apart: int, events: list[int]) -> None:
    loss = 2 + 0.01 * (-1.0) ** STEPS
    # the spike ends with the row after its rise, so that is its last one
    loss[[299, 300 + apart]] = 4.0
    assert triggered(loss) == [299, *(step for step in events if step > 300)]


@pytest.mark.parametrize(("rows", "alarms"), [(STALLED_FOR - 1, 0), (STALLED_FOR, 1)])
def test_a_loss_scale_stalls_after_a_hundred_rows_at_its_floor(rows: int, alarms: int) -> None:
    scale = np.where((STEPS >= 700) & (700 + rows > STEPS), 1e-4, 128.0)
    assert len(detect(log(calm(), loss_scale=scale))) == alarms


@pytest.mark.parametrize(("row", "alarms"), [(4, 0), (5, 1), (19, 1), (20, 1)])
def test_a_gradient_norm_is_judged_from_the_sixth_on(row: int, alarms: int) -> None:
    assert len(detect(log(calm(), grad_norm=pulses(row)))) == alarms
    for largest in (0.9, 1.1):  # among the first twenty, the largest before counts, and the first norms are the largest
        norm_n = np.where(STEPS == 15, 5 * 7.0, 1.0)
        norm_n[0] = 7.0 * largest
        assert len(detect(log(calm(), grad_norm=norm_n))) == (largest < 1)


def test_a_warning_leads_a_spike_by_a_hundred_rows_at_most() -> None:
    for row, lead in ((500 - LEAD, LEAD), (499 - LEAD, None)):
        _, spike = detect(log(calm() + bump(2.0), grad_norm=pulses(row)))
        assert (spike.step, spike.lead) == (500, lead)


def fed(trigger: SpikeTrigger, *losses: float) -> list[str]:
    """The endings while a trigger reads losses, where the median is 2 and the deviation 0.01."""
    return [ending for loss in losses if (ending := trigger.add(loss, 2.0, 0.01))]


@pytest.mark.parametrize(
    ("after", "endings"),
    [
        ([2.02], ["recovered"]),
        ([2.0201], []),
        ([4.0] * 299, []),
        ([4.0] * 300, ["stuck"]),
        ([6.0] * 99, []),
        ([6.0] * 100, ["diverged"]),
        ([math.nan], ["diverged"]),
    ],
)
def test_how_what_triggered_a_response_ends(after: list[float], endings: list[str]) -> None:
    """The loss begins at 5 nats; it is back within two deviations, and lost after 100 rows above its first."""
    trigger = SpikeTrigger()
    trigger.add(5.0, math.nan, math.nan)
    assert fed(trigger, *[2.0] * 30, 4.0, *after) == endings


def test_a_trigger_that_forgets_sees_the_next_spike() -> None:
    """Where training went back, a rise soon after is a new spike, and the old one has no ending."""
    trigger = SpikeTrigger()
    fed(trigger, *[2.0] * 30, 4.0, *[4.0] * 9)
    trigger.forget()
    assert trigger.first == -1
    assert not fed(trigger, 4.0)
    assert trigger.begins
    assert trigger.first == trigger.row


def watched(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["watch", *words])
    out, err = capsys.readouterr()
    return code, out, err


def write_log(path: Path, steps: Iterable[int], losses: Iterable[float]) -> str:
    path.write_text("step,loss\n" + "".join(f"{n},{loss:.4f}\n" for n, loss in zip(steps, losses, strict=True)))
    return str(path)


@pytest.mark.parametrize(
    "order", [np.random.default_rng(1).permutation(1000), STEPS[::-1]], ids=["shuffled", "reversed"]
)
def test_rows_out_of_order_are_sorted_by_step(
    order: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = calm() + bump(3.0)
    shuffled = write_log(tmp_path / "log.csv", order, loss[order])
    told = json.loads(watched(capsys, shuffled, "--json")[1])
    assert [(event["step"], event["ending"]) for event in told["events"]] == [(500, "recovered")]
    read = "log.csv: step 'step', loss 'loss' in nats"
    assert told["notes"] == [read, "log.csv: sorted by step, the last row of each kept: 1000 of 1000 rows"]
    in_order = json.loads(watched(capsys, write_log(tmp_path / "log.csv", STEPS, loss), "--json")[1])
    assert in_order == {"events": told["events"], "notes": [read]}


def test_a_log_appended_to_itself_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = watched(capsys, write_log(tmp_path / "log.csv", [*STEPS, *STEPS], [*calm(), *calm()]))
    assert code == 0
    assert out.splitlines()[1:] == ["log.csv: steps 0 to 999 are written twice and count once", "0 alarms in 1 run"]


def test_a_run_that_goes_back_keeps_both_attempts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It spikes at step 500, goes back from step 519 to 490 at half the learning rate, and does not spike again."""
    loss = [*(calm() + bump(3.0))[:520], *calm(1)[490:]]
    rows = zip([*range(520), *range(490, 1000)], loss, [1e-3] * 520 + [5e-4] * 510, strict=True)
    path = tmp_path / "log.csv"
    path.write_text("step,loss,lr\n" + "".join(f"{step},{loss:.4f},{lr}\n" for step, loss, lr in rows))
    code, out, _ = watched(capsys, str(path), "--json")
    events = json.loads(out)["events"]
    assert code == 1
    assert [(event["run"], event["step"], event["kind"]) for event in events] == [
        ("log.csv attempt 1", 500, "spike"),
        ("log.csv", 490, "restart"),
    ]
    assert "goes back from step 519, at learning rate 0.0005 instead of 0.001" in events[1]["text"]


def test_steps_that_begin_again_at_another_loss_are_a_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine_tuning = calm() - 1.5 + bump(2.0)
    path = write_log(tmp_path / "log.csv", [*STEPS, *STEPS], [*calm() + 3, *fine_tuning])
    events = json.loads(watched(capsys, path, "--json")[1])["events"]
    assert [(event["run"], event["step"]) for event in events] == [("log.csv phase 2", 500)]


def lines_of_a_run(losses: Iterable[float], norms: Iterable[float]) -> str:
    rows = enumerate(zip(losses, norms, strict=True))
    return "".join(f"step {step} | loss {loss} | grad norm {norm} |\n" for step, (loss, norm) in rows)


@pytest.mark.parametrize(
    ("losses", "norms", "kind", "ending", "step"),
    [
        ([5 - n / 100 for n in range(80)] + [0.0] * 20, [1.0] * 80 + [math.nan] * 20, "spike", "diverged", 80),
        ([5 - n / 100 for n in range(80)] + [0.0] * 20, [1.0] * 100, "spike", "diverged", 80),
        ([5, 4.9, 4.8, math.nan], [1, 1, 1, math.nan], "spike", "diverged", 3),
        ([5 - n / 10 for n in range(9)] + [4, 40, 70, 70], [1] * 13, "spike", "diverged", 10),
        ([2, 2.01, 1.99, 2, 2.02, 2.01, 4.1, 3, 2.5, 2.0, 2.0], [1] * 11, "spike", "recovered", 6),
        ([5 - n / 100 for n in range(90)], [1.0] * 70 + [math.inf] * 20, "norm_not_finite", "none", 70),
        (
            [5 - n / 100 for n in range(40)] + [math.inf] + [4.6 - n / 100 for n in range(40)],
            [1] * 81,
            "spike",
            "isolated",
            40,
        ),
        ([3.0 - n / 2000 for n in range(60)] * 2, [1] * 120, "", "", 0),
        ([9 - n / 10 for n in range(60)] * 2, [1] * 120, "spike", "anew", 60),
    ],
    ids=[
        *("zero beside a NaN norm", "zero for good", "NaN in four rows", "an explosion in 13 rows"),
        *("eleven rows around a spike", "norm", "one infinite row", "a small saw", "anew"),
    ],
)
def test_every_ending_is_named(
    losses: list[float], norms: list[float], kind: str, ending: str, step: int, tmp_path: Path
) -> None:
    path = tmp_path / "train.log"
    path.write_text(lines_of_a_run(losses, norms))
    (run,) = read_logs(path).runs
    found = [(event.kind, event.ending, event.step) for event in detect(run)]
    assert found == ([(kind, ending, step)] if kind else [])
    assert not any("not yet ended" in what_happened(run, event) for event in detect(run) if event.ending != "none")


@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["a likelihood that falls below zero", "a loss that falls to zero"])
def test_a_loss_near_zero_is_a_number_beside_a_norm_that_is_seldom_logged(offset: float, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    losses = [offset + 0.53 - n / 100 for n in range(154 if offset else 120)]
    rows = (f"step {n} | loss {loss}" + " | grad norm 1.0" * (n % 10 == 0) for n, loss in enumerate(losses))
    path.write_text("\n".join(rows))
    (run,) = read_logs(path).runs
    assert np.isfinite(run.columns["loss"]).all()
    assert not detect(run)


@pytest.mark.parametrize("rows", [100, 30])
def test_a_shorter_attempt_takes_the_place_of_all_rows_from_its_first_step_on(rows: int, tmp_path: Path) -> None:
    second = calm(1)[400 : 400 + rows] + 0.01
    path = write_log(tmp_path / "log.csv", [*range(520), *range(400, 400 + rows)], [*calm()[:520], *second])
    before, after = read_logs(Path(path)).runs
    assert (before.name, after.name) == ("log.csv attempt 1", "log.csv")
    assert before.step_n[-1] == 519
    assert after.step_n.tolist() == list(range(400 + rows))
    assert after.went_back is not None
    assert (after.went_back.last, after.went_back.step) == (519, 400)


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_rows_that_repeat_most_losses_of_their_steps_are_a_copy(share: float, tmp_path: Path) -> None:
    """Of less than half of the losses, a repetition is chance, since they have few digits."""
    again = np.where(np.arange(500) % 10 < 10 * share, calm()[500:], calm(1)[500:] + 0.01)
    path = write_log(tmp_path / "log.csv", [*STEPS, *STEPS[500:]], [*calm(), *again])
    assert len(read_logs(Path(path)).runs) == (1 if share > 0.5 else 2)


@pytest.mark.parametrize(
    ("noise", "names"), [(0.4, ["log.csv attempt 1", "log.csv"]), (0.02, ["log.csv", "log.csv phase 2"])]
)
def test_losses_go_on_if_they_are_as_near_as_their_noise_allows(noise: float, names: list[str], tmp_path: Path) -> None:
    """A second attempt lies 0.6 nats above the first: that is within a noise of 0.4, and far outside one of 0.02."""
    losses = 3 + np.random.default_rng(0).normal(0, noise, 300)
    path = write_log(tmp_path / "log.csv", [*range(200), *range(100, 200)], losses + 0.6 * (np.arange(300) >= 200))
    assert [run.name for run in read_logs(Path(path)).runs] == names


def test_rows_of_micro_batches_of_which_one_has_no_loss_have_none(tmp_path: Path) -> None:
    losses = np.repeat(calm()[:200], 4) + np.tile([-0.1, 0.1, -0.2, 0.2], 200)
    losses[603] = math.nan
    path = write_log(tmp_path / "log.csv", np.repeat(np.arange(200), 4), losses)
    (run,) = read_logs(Path(path)).runs
    assert np.flatnonzero(~np.isfinite(run.columns["loss"])).tolist() == [150]
    np.testing.assert_allclose(run.columns["loss"][:150], calm()[:150], atol=1e-4)


@pytest.mark.parametrize("first", [0, 1, 10])
def test_steps_that_begin_anew_with_each_pass_are_counted_on(first: int, tmp_path: Path) -> None:
    """At the spacing of rows, also where the last pass ends early; a shorter log of the same passes reads the same."""
    steps = [*range(first, first + 500, 10)] * 3 + [*range(first, first + 200, 10)]
    losses = 2 + 4 * np.exp(-np.arange(len(steps)) / 30) + np.random.default_rng(0).normal(0, 0.02, len(steps))
    losses[120:124] += 1.5
    logs = read_logs(Path(write_log(tmp_path / "log.csv", steps, losses)))
    (run,) = logs.runs
    assert run.step_n.tolist() == [*range(first, first + 1700, 10)]
    assert "counted on" in logs.notes[-1]
    assert [event.step for event in detect(run)] == [first + 1200]


def test_an_alarm_before_the_step_gone_back_to_is_that_of_the_first_attempt_alone(tmp_path: Path) -> None:
    losses = calm() + bump(3.0, at=300)
    path = write_log(tmp_path / "log.csv", [*range(520), *range(490, 1000)], [*losses[:520], *(calm(1)[490:] + 0.01)])
    found = [(event.run, event.kind) for run in read_logs(Path(path)).runs for event in detect(run)]
    assert found == [("log.csv attempt 1", "spike"), ("log.csv", "restart")]


def test_two_passes_are_counted_on_where_the_loss_is_near_its_last_rows(tmp_path: Path) -> None:
    losses = calm(steps=400)
    logs = read_logs(Path(write_log(tmp_path / "log.csv", [*range(1, 201)] * 2, losses)))
    (run,) = logs.runs
    assert run.step_n.tolist() == list(range(1, 401))
    assert logs.notes[-1] == "log.csv: steps begin anew once while the loss goes on, so they are counted on"


def test_losses_of_zero_within_a_log_are_losses(tmp_path: Path) -> None:
    """As of batches that are masked; at the end they stand for NaN. Four decimals tell that they are small."""
    losses = calm(steps=80)
    losses[[40, 41, 42, 60, 79]] = 0
    (run,) = read_logs(Path(write_log(tmp_path / "log.csv", range(80), losses))).runs
    assert run.note == ""
    assert np.flatnonzero(run.columns["loss"] < 1e-4).tolist() == [40, 41, 42, 60, 79]


def test_trainings_of_the_same_steps_in_one_file_are_phases(tmp_path: Path) -> None:
    """Each begins at the loss at initialization, unlike passes over the data."""
    losses = np.concatenate([calm(seed, 300) for seed in range(3)])
    logs = read_logs(Path(write_log(tmp_path / "log.csv", [*range(300)] * 3, losses)))
    assert [run.name for run in logs.runs] == ["log.csv", "log.csv phase 2", "log.csv phase 3"]
    assert all(run.step_n.tolist() == list(range(300)) for run in logs.runs)


def test_a_run_that_begins_where_it_was_resumed_goes_back_before_that(tmp_path: Path) -> None:
    """To a checkpoint before its first row; a run that begins at step 0 does not go back, but starts again."""
    losses = 2.3 + np.random.default_rng(0).normal(0, 0.02, 200)
    path = Path(write_log(tmp_path / "log.csv", [*range(1000, 1100), *range(980, 1080)], losses))
    assert [run.name for run in read_logs(path).runs] == ["log.csv attempt 1", "log.csv"]
    assert [event.kind for event in detect(read_logs(path).runs[1])] == ["restart"]


ROWS = np.arange(300)


def of_rewards(seed: int = 0, **columns: np.ndarray) -> Log:
    """A calm run of reinforcement learning; given columns take the place of its own."""
    random = np.random.default_rng(seed)
    calm_ones = {
        "loss": random.normal(0, 0.01, 300),
        "reward": 0.2 + 0.4 * ROWS / 300 + random.normal(0, 0.03, 300),
        "kl": 0.001 * ROWS**0.8 * random.lognormal(0, 0.3, 300),
        "entropy": 1.2 * np.exp(-ROWS / 200) + random.normal(0, 0.01, 300),
        "grad_norm": random.lognormal(-0.7, 0.4, 300),
    }
    return Log("planted", STEPS[:300], calm_ones | columns)


def collapsing(value_n: np.ndarray, row: int = 200, rows: float = 5.0) -> np.ndarray:
    return np.where(row <= ROWS, value_n * np.exp(-np.maximum(ROWS - row, 0) / rows), value_n)


def exploding(value_n: np.ndarray, row: int = 200) -> np.ndarray:
    return value_n * np.exp(np.clip((ROWS - row) / 4, 0, 5))


@pytest.mark.parametrize("seed", range(8))
def test_a_calm_run_of_reinforcement_learning_raises_no_alarm(seed: int) -> None:
    """Though the loss means nothing, the entropy falls, and the KL divergence grows and is noisy; in any units."""
    run = of_rewards(seed)
    assert detect(run) == []
    assert detect(run._replace(columns={name: 1e3 * value_n for name, value_n in run.columns.items()})) == []
    assert detect(of_rewards(seed, reward=run.columns["reward"] - 5)) == []
    loss_n = np.where(np.arange(300) % 50 > 40, 9.0, run.columns["loss"])
    assert detect(of_rewards(seed, loss=loss_n)) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_divergence_that_grows_from_its_first_row_and_an_entropy_that_falls_are_calm(seed: int) -> None:
    """Steadily and with little noise, so that the first rows only rise or only fall."""
    random = np.random.default_rng(seed)
    grows_n, falls_n = 5e-4 * ROWS * random.lognormal(0, 0.05, 300), 1.2 * np.exp(-ROWS / 150)
    assert detect(of_rewards(seed, kl=grows_n, entropy=falls_n + random.normal(0, 0.004, 300))) == []


@pytest.mark.parametrize(
    ("column", "kind", "change"),
    [
        ("reward", "reward_fall", collapsing),
        ("entropy", "entropy_fall", collapsing),
        ("kl", "kl_growth", exploding),
        ("grad_norm", "gradient_spike", exploding),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_what_collapses_or_explodes_in_reinforcement_learning_alarms_where_it_begins(
    column: str, kind: str, change: Any, scale: float
) -> None:
    usual_n = of_rewards(3).columns[column]
    run = of_rewards(3, **{column: scale * change(usual_n)})
    (event,) = (each for each in detect(run) if each.kind != "norm_drift")
    assert event.kind == kind
    assert 198 <= event.step <= 208
    assert event.ending in ("stuck", "none")
    assert event.usual == pytest.approx(scale * np.median(usual_n[170:200]), rel=0.35)
    assert event.value == pytest.approx((np.min if "fall" in kind else np.max)(run.columns[column][200:]))
    assert "to the end of the log" in what_happened(run, event)
    passing_n = np.where(ROWS < 220, run.columns[column], scale * usual_n)
    (passing,) = detect(of_rewards(3, **{column: passing_n}))
    assert passing.ending == "recovered"
    assert f"recovered at step {passing.end}" in what_happened(run, passing)


@pytest.mark.parametrize(
    ("change", "said"), [(collapsing, "fall of the reward"), (np.zeros_like, "the reward is 0 in")]
)
def test_a_log_of_rewards_needs_no_loss(
    change: Callable[[np.ndarray], np.ndarray], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = of_rewards(3).columns
    rows = zip(STEPS, change(columns["reward"]), columns["kl"], strict=False)
    text = "".join(f"step {step} mean_reward: {reward:.4f} approx_kl: {kl:.5f}\n" for step, reward, kl in rows)
    (tmp_path / "rl.log").write_text(text)
    code, out, _ = watched(capsys, str(tmp_path / "rl.log"))
    assert (code, out.count("alarm in")) == (1, 1)
    assert "no loss, of reinforcement learning, reward 'mean_reward', update_kl 'approx_kl'" in out
    assert said in out
    assert "loss, nats" not in (tmp_path / "rl.log.alarms" / "rl.log.html").read_text()


def test_a_reward_that_falls_too_slowly_for_its_trend_alarms_once_half_is_lost() -> None:
    usual_n = of_rewards(1).columns["reward"]
    slow = of_rewards(1, reward=usual_n - 0.009 * np.maximum(ROWS - 120, 0))
    (event,) = detect(slow)
    assert (event.kind, event.ending) == ("reward_fall", "stuck")
    assert 120 < event.step < 260
    noise_n = np.random.default_rng(2).normal(0, 0.03, 300)
    hardly = of_rewards(1, reward=0.6 + noise_n - 0.2 * np.clip((ROWS - 100) / 100, 0, 1))
    assert detect(hardly) == []


@pytest.mark.parametrize(("rows", "first"), [(20, 13), (14, 9), (40, 28)])
def test_a_reward_of_a_few_rows_alarms_where_it_begins_to_fall(rows: int, first: int) -> None:
    row_n, noise_n = np.arange(rows), np.random.default_rng(rows).normal(0, 0.01, rows)
    rising_n = 0.3 + 0.02 * row_n + noise_n
    falling_n = np.where(row_n < first, rising_n, 0.3 + 0.02 * first - 0.08 * (row_n - first + 1) + noise_n)
    columns = {"loss": noise_n, "grad_norm": np.full(rows, 0.3) + noise_n}
    (event,) = detect(Log("planted", row_n, {**columns, "reward": falling_n}))
    assert (event.kind, event.step, event.ending) == ("reward_fall", first, "stuck")
    assert detect(Log("planted", row_n, {**columns, "reward": rising_n})) == []


def test_of_a_few_rows_one_low_reward_is_no_fall() -> None:
    reward_n = 0.3 + 0.02 * np.arange(20) + np.random.default_rng(0).normal(0, 0.01, 20)
    reward_n[-1] = 0.0
    assert detect(Log("planted", np.arange(20), {"loss": reward_n - 0.5, "reward": reward_n})) == []


@pytest.mark.parametrize(("returns", "ending"), [(0.0, "stuck"), (0.004, "recovered")])
def test_a_slow_fall_of_the_reward_lasts_to_the_end_or_until_it_has_come_back(returns: float, ending: str) -> None:
    noise_n = np.random.default_rng(3).normal(0, 0.03, 300)
    reward_n = 0.6 + noise_n - 0.004 * np.clip(ROWS - 60, 0, 120) + returns * np.maximum(ROWS - 230, 0)
    (event,) = detect(of_rewards(1, reward=reward_n))
    assert (event.kind, event.ending) == ("reward_fall", ending)
    assert (event.end == 299) == (ending == "stuck")


@pytest.mark.parametrize(
    ("column", "usual", "small", "large"),
    [("reward", 10.0, 8.5, 7.0), ("entropy", 1.0, 0.6, 0.4), ("kl", 1.0, 1.7, 2.5), ("grad_norm", 1.0, 1.7, 2.5)],
)
def test_small_departures_are_no_alarm_in_reinforcement_learning(
    column: str, usual: float, small: float, large: float
) -> None:
    """However little noise there is: a reward falls by a fifth, an entropy by half, and what rises doubles."""
    noise_n = np.random.default_rng(0).normal(0, 0.005, 300)
    for value, alarms in ((small, 0), (large, 1)):
        value_n = np.where(ROWS < 200, usual, value) + noise_n
        assert len(detect(of_rewards(5, **{column: value_n}))) == alarms


def test_a_loss_of_rewards_is_judged_only_where_it_is_not_finite() -> None:
    loss_n = of_rewards().columns["loss"].copy()
    loss_n[150:] = math.nan
    assert [(event.kind, event.step, event.ending) for event in detect(of_rewards(loss=loss_n))] == [
        ("spike", 150, "diverged")
    ]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"loss": 0, "grad_norm": 0}, "the loss is 0 and the gradient norm is 0"),
        ({"advantage": 0}, "the advantage is 0"),
        ({"loss": 0}, ""),
        ({"grad_norm": 0}, "the gradient norm is 0"),
    ],
)
@pytest.mark.parametrize("first", [0, 200])
def test_reinforcement_learning_that_learns_nothing_is_named(
    columns: dict[str, float], words: str, first: int, tmp_path: Path
) -> None:
    """From the first row on or a later one; a loss of 0 is no NaN, and beside a gradient it says nothing."""
    run = of_rewards(advantage=np.random.default_rng(0).random(300))
    table = pd.DataFrame({"step": ROWS, **run.columns})
    table.loc[table["step"] >= first, [*columns]] = [*columns.values()]
    table.to_csv(tmp_path / "log.csv", index=False)
    (read,) = read_logs(tmp_path / "log.csv").runs
    idle = [event for event in detect(read) if event.kind == "nothing_learned"]
    assert not any(event.kind == "spike" for event in detect(read))
    if not words:
        assert not idle
        return
    assert [event.step for event in idle] == [first]
    assert (
        what_happened(read, idle[0]) == f"nothing is learned: {words} in {'the last 100' if first else 'all 300'} rows"
    )


def test_a_loss_of_zero_without_a_gradient_norm_is_judged_by_the_reward() -> None:
    """A trainer that uses each sample once prints 0, whatever it learns."""
    zero_n, columns = 0.0 * ROWS, of_rewards().columns
    for reward_n, kinds in ((columns["reward"], []), (columns["reward"] - 0.4 * ROWS / 300, ["nothing_learned"])):
        run = Log("planted", STEPS[:300], {"loss": zero_n, "reward": reward_n, "kl": columns["kl"]})
        assert [event.kind for event in detect(run)] == kinds


def moved(value: float, to: float, noise: float, row: int = 150, rows: int = 5) -> np.ndarray:
    """A measurement that moves within some rows and stays there."""
    noise_n = np.random.default_rng(4).normal(0, noise, 300)
    return np.asarray(value + (to - value) * np.clip((ROWS - row) / rows, 0, 1) + noise_n)


MOVES = [
    ("zero_variance", "zero_variance_growth", 0.2, 0.95, 0.05),
    ("response_length", "length_growth", 400.0, 1024.0, 20.0),
    ("response_length", "length_fall", 400.0, 40.0, 20.0),
    ("truncated", "truncation_growth", 0.05, 0.8, 0.03),
    ("clip_fraction", "clipping_growth", 0.1, 0.4, 0.02),
    ("entropy", "entropy_fall", 0.8, 0.05, 0.02),
    ("update_kl", "update_kl_growth", 0.01, 0.2, 0.001),
]


@pytest.mark.parametrize("rows", [5, 60])
@pytest.mark.parametrize(("column", "kind", "usual", "to", "noise"), MOVES)
def test_what_moves_for_long_is_named_unless_the_reward_rises_with_it(
    column: str, kind: str, usual: float, to: float, noise: float, rows: int
) -> None:
    """Suddenly or slowly; a policy that learns may answer in other lengths, and solves whole groups."""
    value_n = moved(usual, to, noise, rows=rows)
    flat_n, rises_n = moved(0.3, 0.3, 0.02), moved(0.3, 0.8, 0.02, rows=rows)
    (event,) = detect(of_rewards(2, reward=flat_n, **{column: value_n}))
    assert event.kind == kind
    assert event.ending in ("stuck", "none")
    assert 145 <= event.step <= 150 + rows
    assert event.usual == pytest.approx(usual, abs=3 * noise)
    run = of_rewards(2, reward=rises_n, **{column: value_n})
    assert detect(run) == []
    assert any("while the reward rises, so the policy has learned" in remark for remark in remarks(run))
    assert list(remarks(of_rewards(2, reward=rises_n))) == []


@pytest.mark.parametrize(
    ("rewards", "falls"), [((40, 80, 60, 20), True), ((40, 80, 60, 50), False), ((80, 20, 60, 30), False)]
)
def test_a_reward_that_halves_in_a_few_rows_is_remarked(rewards: tuple[float, ...], falls: bool) -> None:
    """As no alarm, since so few rows may be noise, and only where the last rows fall one after another."""
    run = Log("planted", STEPS[:4], {"loss": np.full(4, 4.0) + ROWS[:4], "reward": np.array(rewards, dtype=float)})
    said = [remark for remark in remarks(run) if "falls to 20 in the last rows, from 80 at step" in remark]
    assert bool(said) == falls


@pytest.mark.parametrize(("column", "kind", "usual", "to", "noise"), MOVES[:5])
def test_a_move_of_few_rows_is_no_alarm(column: str, kind: str, usual: float, to: float, noise: float) -> None:
    value_n = np.where((ROWS >= 150) & (ROWS < 157), to, moved(usual, usual, noise))
    assert detect(of_rewards(2, reward=moved(0.3, 0.3, 0.02), **{column: value_n})) == []


def test_a_length_that_grows_slowly_and_groups_that_are_solved_are_calm() -> None:
    """As of a model that learns to reason."""
    for seed in range(4):
        random = np.random.default_rng(seed)
        learned_n = 1 - np.exp(-ROWS / 100)
        solved_n = random.binomial(32, 0.1 + 0.7 * learned_n) / 32
        length_n = 500 * (1 + 3 * learned_n) * random.lognormal(0, 0.06, 300)
        reward_n = 0.2 + 0.7 * learned_n + random.normal(0, 0.04, 300)
        run = of_rewards(seed, reward=reward_n, zero_variance=solved_n, response_length=length_n)
        assert detect(run) == []


def test_measurements_of_samples_have_the_names_of_trainers(tmp_path: Path) -> None:
    """Those that TRL, verl and rllm write; the share that a limit cuts is not that of clipped ratios."""
    forms = {
        "trl": (
            "{{'loss': 0.0, 'reward': {x}, 'kl': 0.1, 'frac_reward_zero_std': 0.25, 'completions/mean_length': 300.0, "
            "'completions/clipped_ratio': 0.1, 'clip_ratio/region_mean': 0.02}}"
        ),
        "verl": (
            "step:{n} - critic/rewards/mean:{x} - response_length/mean:300.0 - response_length/clip_ratio:0.1 "
            "- prompt_length/clip_ratio:0.7 - actor/pg_clipfrac:0.02 - batch/solve_none:0.05 - batch/solve_all:0.2"
        ),
    }
    for name, form in forms.items():
        path = tmp_path / f"{name}.log"
        path.write_text("".join(form.format(n=n, x=2 + n % 7 / 10) + "\n" for n in range(1, 60)))
        (run,) = read_logs(path).runs
        for column, value in zip(OF_SAMPLES, (0.25, 300, 0.1, 0.02), strict=True):
            np.testing.assert_allclose(run.columns[column], value)


@pytest.mark.parametrize("peak_is_logged", [False, True])
def test_a_warm_up_is_not_to_blame_while_its_rate_is_tiny(peak_is_logged: bool) -> None:
    """At step 2 the rate doubles, and in a log that ends soon it is the largest so far."""
    losses = np.array([10.9, 10.9, 300.0, 500.0, 900.0, *[900.0] * 400])
    rates = 1e-6 * np.minimum(np.arange(405) + 1, 300)
    rows = 405 if peak_is_logged else 5
    run = log(losses[:rows], lr=rates[:rows])
    (event,) = (event for event in detect(run) if event.kind == "spike")
    advice = next_look(run, event, {})
    assert event.step == 2
    assert "still that of the first steps of a warm-up there, 3e-6" in advice
    assert "which changes" not in advice
    jump = log(losses[:rows], lr=np.where(np.arange(rows) < 2, 1e-5, 1e-3))
    assert "which changes there from 1e-5 to 0.001" in next_look(jump, event, {})


@pytest.mark.parametrize(
    ("losses", "norms", "row"),
    [
        ([14.2, 12.1, 4.4, 2.5, 1.6, 5.1, 6.8, 9.4], [40, 15, 22, 8, 7.5, 16, 17, 72], 5),
        ([14.2, 12.1, 4.4, 2.5, 1.6, 5.1, 6.8, 9.4], None, 5),
        ([9.0, 5.1, 3.2, 2.6, 2.4, 2.9, 4.9], [30, 9, 4, 3.5, 3.8, 9, 41], 5),
        ([9.0, 5.1, 3.2, 2.6, 2.4, 2.9, 4.9], [30, 9, 4, 3.5, 3.8, 4.1, 4.6], None),
        ([9.0, 5.1, 3.2, 2.6, 2.4, 2.6, 2.5], [30, 9, 4, 3.5, 3.8, 9, 41], None),
        ([2.4, 2.3, 2.5, 2.2, 2.4, 2.5, 2.6], [1, 1.4, 0.8, 1.2, 1.0, 1.1, 5.9], None),
    ],
)
def test_a_rise_of_the_last_of_few_rows_is_found(
    losses: list[float], norms: list[float] | None, row: int | None
) -> None:
    """If it doubles the loss and takes back half of the fall, or the gradient norm explodes with it."""
    columns = {"grad_norm": np.array(norms)} if norms else {}
    found = [(event.step, event.ending) for event in detect(log(np.array(losses), **columns)) if event.kind == "spike"]
    assert found == ([] if row is None else [(row, "none")])


def test_few_rows_of_noise_are_calm() -> None:
    for seed in range(300):
        random = np.random.default_rng(seed)
        rows = int(random.integers(5, 31))
        loss_n = 2.5 + random.choice([0.0, 6.0]) * np.exp(-np.arange(rows) / 4) + random.normal(0, 0.08, rows)
        run = log(loss_n, grad_norm=random.lognormal(0, 0.4, rows))
        assert [event for event in detect(run) if event.kind == "spike" and event.ending == "none"] == []


def evaluated(losses: list[float], training: np.ndarray) -> list[str]:
    """The remarks on a run that is evaluated every 50 steps."""
    held_out = pd.Series(losses, 50 * np.arange(1, len(losses) + 1))
    run = Log("planted", 10 * np.arange(1, len(training) + 1), {"loss": training}, held_out={"val_loss": held_out})
    assert detect(run) == []
    return list(remarks(run))


def test_a_held_out_loss_that_has_turned_is_remarked_on() -> None:
    falls_n = 1.3 * np.exp(-np.arange(100) / 60) + np.random.default_rng(0).normal(0, 0.02, 100)
    turns = [1.16 - 0.04 * n for n in range(8)] + [0.9 + 0.03 * n for n in range(12)]
    (remark,) = evaluated(turns, falls_n)
    assert "lowest at step 400, 0.88, and has risen to 1.23 since, while the training loss falls" in remark
    (remark,) = evaluated([1.2, 1.0, 1.05, 1.2], falls_n[:20])
    assert "lowest at step 100, 1, and" in remark
    random = np.random.default_rng(1)
    assert evaluated(turns, 1.3 - falls_n / 20) == []  # since the training loss does not fall
    assert evaluated([1.2, 1.0, 0.95, 0.96], falls_n[:20]) == []
    for _ in range(200):
        level_n = 0.9 + 0.3 * np.exp(-np.arange(20) / 4) + random.normal(0, 0.02, 20)
        assert evaluated(level_n.tolist(), falls_n) == []


def test_a_gradient_of_zero_may_be_rounded_where_a_loss_falls_that_tells_something() -> None:
    falls_n, zero_n = 1 - ROWS / 300, 0.0 * ROWS
    assert [event.kind for event in detect(of_rewards(loss=falls_n, grad_norm=zero_n))] == ["nothing_learned"]
    assert detect(log(falls_n, grad_norm=zero_n)) == []
    noise_n = np.random.default_rng(0).normal(0, 0.01, 300)
    assert [event.kind for event in detect(log(1 + noise_n, grad_norm=zero_n))] == ["nothing_learned"]


@pytest.mark.parametrize(
    ("form", "columns"),
    [
        ('{{"step": {n}, "actor/pg_loss": 0.1, "actor/entropy": {x}, "critic/rewards/mean": {x}}}', "reward entropy"),
        ("{{'loss': {x}, 'grad_norm': 1.5, 'reward': {x}, 'reward_std': 0.5, 'kl': {x}}}", "reward kl advantage"),
        ("{{'objective/kl': {x}, 'objective/entropy': {x}, 'loss/policy_avg': 0.1, 'episode': {n}}}", "kl entropy"),
        ("step {n} loss {x} approx_kl {x} entropy_loss -{x}", "update_kl entropy"),
        ("step {n} loss {x} rewards/chosen {x} rewards/margins {x}", ""),
        ("step {n} loss {x} kl {x} ce_loss {x}", ""),
        ("step {n} loss {x} entropy {x}", ""),
    ],
)
def test_logs_of_reinforcement_learning_are_known_by_their_columns(form: str, columns: str, tmp_path: Path) -> None:
    """Preference learning and distillation have a loss that tells something; an entropy has the sign of none."""
    path = tmp_path / ("log.jsonl" if '"' in form else "log.txt")
    path.write_text("".join(form.format(n=n, x=round(2 + n % 7 / 10, 3)) + "\n" for n in range(1, 60)))
    logs = read_logs(path)
    (run,) = logs.runs
    assert run.is_of_rewards == bool(columns)
    assert ("of reinforcement learning" in logs.notes[0]) == bool(columns)
    for column in columns.split():
        np.testing.assert_allclose(
            np.unique(run.columns[column]), 0.5 if column == "advantage" else 2 + np.arange(7) / 10
        )


def test_a_loss_that_is_left_out_beside_other_measurements_diverged(tmp_path: Path) -> None:
    """Megatron leaves the loss out of a line once it is NaN."""
    rows = [
        f" iteration {n}/ 90 | learning rate: 1.0E-04 | lm loss: {5 - n / 50} | grad norm: 1.0 |" for n in range(60)
    ]
    rows += [f" iteration {n}/ 90 | learning rate: 1.0E-04 | grad norm: nan |" for n in range(60, 90)]
    path = tmp_path / "train.log"
    path.write_text("\n".join(rows))
    (run,) = read_logs(path).runs
    assert [(event.ending, event.step) for event in detect(run)] == [("diverged", 60)]
    assert "missing" in run.note


def test_the_advice_follows_from_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning before the spike, a learning rate at its peak, and the same step in all runs are told apart."""
    norm = np.where((STEPS >= 480) & (STEPS < 560), 9.0, 1.0)
    lr = np.minimum(STEPS + 1, 500) / 500 * np.where(STEPS > 501, 0.5, 1.0)

    def advice(**columns: Any) -> str:
        path = tmp_path / "log.jsonl"
        losses = calm() + bump(3.0)
        path.write_text(
            "".join(
                json.dumps({"step": n, "loss": losses[n], **{key: value[n] for key, value in columns.items()}}) + "\n"
                for n in range(1000)
            )
        )
        events = json.loads(watched(capsys, str(path), "--json")[1])["events"]
        return str(next(event["next"] for event in events if event["kind"] == "spike"))

    assert "from step 480 on" in advice(grad_norm=norm)
    assert "at its peak" in advice(lr=lr)
    warm_up = np.minimum(STEPS + 1, 100) / 1e5
    sparse = np.where(STEPS % 50 == 0, warm_up, math.nan)
    for constant in (np.full(1000, 1e-3), np.where(STEPS == 200, math.nan, 1e-3), warm_up, sparse):
        assert "the batches just before" in advice(lr=constant)
    assert "the batches just before" in advice(lr=1e-3 * (1 - STEPS / 2000))  # past its peak
    for factor, change in ((0.5, "0.001 to 0.0005"), (3.0, "0.001 to 0.003")):
        assert f"which changes there from {change}" in advice(lr=1e-3 * np.where(STEPS >= 500, factor, 1.0))
    assert "--replay" in advice()
    for name in "ab":
        write_log(tmp_path / f"{name}.csv", STEPS, calm() + bump(3.0))
    (tmp_path / "log.jsonl").unlink()
    events = json.loads(watched(capsys, str(tmp_path), "--json")[1])["events"]
    assert all("batches of step 500, since all 1 other runs" in event["next"] for event in events)


def test_a_line_per_event_and_a_page_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = watched(capsys, write_log(tmp_path / "log.csv", STEPS, calm() + bump(3.0)))
    assert code == 1
    _, alarm, page, last = out.splitlines()
    assert alarm.startswith("log.csv step 500: loss spike, 2 to 5.0")
    assert last == "1 alarm in 1 run"
    assert "<h2>Step 500</h2>" in Path(page.strip()).read_text()


@pytest.mark.parametrize(("rows", "views"), [(60, 1), (1000, 2)])
def test_a_short_run_has_no_closer_view(rows: int, views: int) -> None:
    run = log((calm() + bump(3.0, 40))[:rows])
    assert len(event_figure(run, detect(run)[0]).axes) == views


def test_what_was_measured_every_so_many_rows_is_drawn_through_its_rows() -> None:
    norm = np.where(np.arange(1000) % 5 == 0, 1.0, math.nan)
    run = log(calm() + bump(3.0), grad_norm=norm)
    whole, of_norm, *_ = [axes.lines[0] for axes in event_figure(run, detect(run)[0]).axes]
    assert (len(whole.get_ydata()), of_norm.get_ydata().tolist()) == (1000, [1.0] * 200)


def test_a_notebook_shows_alarms_and_their_figures(tmp_path: Path) -> None:
    found = watch(write_log(tmp_path / "log.csv", STEPS, calm() + bump(3.0)))
    assert found.alarms[["run", "step", "kind", "ending"]].to_numpy().tolist() == [
        ["log.csv", 500, "spike", "recovered"]
    ]
    assert "loss &#39;loss&#39; in nats" in found._repr_html_()
    assert found.show(500).png.startswith(b"\x89PNG")
    with pytest.raises(RequestError, match="some at 500"):
        found.show(501)
    (alarm,) = watch(write_log(tmp_path / "a: b.csv", STEPS, calm() + bump(3.0))).alarms.to_dict("records")
    assert alarm["what"].startswith("loss spike, 2 to 5.0"), "the name of the run is left out, whatever it holds"


def test_a_results_folder_is_watched_run_by_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The attention logits of the planted runs at the higher learning rate grow; no loss of theirs spikes."""
    runs = list(cards(arms=("z_loss",), widths=(32,), lrs=(1e-3, 1e-1), seeds=(0, 1)))
    code, out, _ = watched(capsys, str(write(tmp_path / "runs", runs, every=4)), "--json")
    told = {(event["run"], event["kind"]) for event in json.loads(out)["events"]}
    assert code == 1
    assert told == {(run["id"], "logit_growth") for run in runs if run["optimizer.lr"] == 1e-1}


def test_runs_of_one_name_in_two_files_are_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, loss in (("a", calm() + bump(3.0)), ("b", calm(1))):
        table = pd.DataFrame({"run": "default", "step": STEPS, "loss": loss})
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    code, out, _ = watched(capsys, str(tmp_path))
    assert code == 1
    assert "\na.csv: default step 500: loss spike" in out
    assert out.endswith("\n1 alarm in 2 runs\n")


def test_watching_loads_neither_torch_nor_what_draws_before_there_is_an_alarm(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss\n0,3\n1,2\n2,2\n")
    program = "import sys; from lab.__main__ import main\nmain(['watch', sys.argv[1]])\n"
    program += "sys.exit(len({'torch', 'matplotlib'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "log.csv")], check=True, capture_output=True)


def test_a_rise_of_exactly_a_tenth_of_a_nat_is_none() -> None:
    for loss, begins in ((LEAST_RISE, False), (float(np.nextafter(LEAST_RISE, 1)), True)):
        trigger = SpikeTrigger()
        trigger.add(loss, 0.0, 0.001)
        assert trigger.begins == begins


@pytest.mark.parametrize(("finite", "known"), [(FEWEST - 1, False), (FEWEST, True)])
def test_statistics_take_twenty_finite_measurements(finite: int, known: bool) -> None:
    window_nw = np.where(np.arange(50) < finite, 2.0, np.nan)[None]
    assert [bool(np.isfinite(number_n[0])) for number_n in window_statistics(window_nw)] == [known, known]


# Rounded output logits.

# What each column holds where log Z has a level: the mean of its square, or a mean logit of either sign.
OUTPUT_LOGITS = {
    "log_z": lambda level: -level,
    "z_loss": lambda level: level**2,
    "log_z_squared": lambda level: level**2,
    "mean_logit": lambda level: -level,
}


def output_logit_log(path: Path, level: np.ndarray, column: str = "log_z") -> str:
    values = zip(STEPS, calm(), OUTPUT_LOGITS[column](level), strict=True)
    path.write_text(f"step,loss,{column}\n" + "".join(f"{n},{loss:.4f},{value:.6g}\n" for n, loss, value in values))
    return str(path)


def rounding_alarms(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    events = json.loads(watched(capsys, *words, "--json")[1])["events"]
    return [event for event in events if event["kind"] == "logit_rounding"]


@pytest.mark.parametrize("column", OUTPUT_LOGITS)
def test_costly_rounding_of_output_logits_alarms_once(
    column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bf16 a level of 300 has neighbours 2 apart: log sinh 1, 0.161 nats."""
    level = np.where((STEPS >= 400) & (STEPS < 600) | (STEPS >= 800), 300.0, 60.0)
    path = output_logit_log(tmp_path / "log.csv", level, column)
    first, second = rounding_alarms(capsys, path)
    assert (first["step"], second["step"]) == (400, 800)
    assert first["value"] == pytest.approx(np.log(np.sinh(1)), rel=1e-6)
    assert (first["level"], first["mantissa_bits"]) == (pytest.approx(300), 7)
    line = "log.csv step 400: rounding of output logits, a level of 300 costs 0.161 nats per token in bf16"
    assert str(first["text"]).startswith(line)


@pytest.mark.parametrize(("rows", "alarms"), [(HELD - 1, 0), (HELD, 1)])
def test_a_costly_rounding_must_last(rows: int, alarms: int) -> None:
    """Five measurements, also where only every tenth row has one."""
    cost = np.where((STEPS >= 500) & (500 + rows > STEPS), 0.02, 0.001)
    assert len(detect(log(calm(), logit_rounding=cost, output_logit=cost))) == alarms
    sparse = np.where(STEPS % 10, np.nan, np.where((STEPS >= 500) & (500 + 10 * rows > STEPS), 0.02, 0.001))
    events = detect(log(calm(), logit_rounding=sparse, output_logit=sparse))
    assert [event.step for event in events] == [500] * alarms


@pytest.mark.parametrize(("bits", "level"), [(2, 2), (3, 4), (7, 64), (10, 512), (23, 2**22)])
def test_the_format_sets_the_level_of_the_alarm(
    bits: int, level: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neighbours half a unit apart cost 0.0104 nats, a quarter apart 0.0026."""
    for factor, alarms in ((1.01, 1), (0.99, 0)):
        path = output_logit_log(tmp_path / "log.csv", np.full(1000, level * factor))
        assert len(rounding_alarms(capsys, path, "--mantissa-bits", str(bits))) == alarms


def test_log_z_counts_before_mean_logit_and_z_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{n},{loss:.4f},30,0.09,500\n" for n, loss in zip(STEPS, calm(), strict=True))
    (tmp_path / "log.csv").write_text(f"step,loss,log_z,z_loss,mean_logit\n{rows}")
    assert rounding_alarms(capsys, str(tmp_path / "log.csv")) == []
    (event,) = rounding_alarms(capsys, str(tmp_path / "log.csv"), "--mantissa-bits=3")
    assert event["level"] == 30


@pytest.mark.parametrize(
    ("precision", "bits", "alarms"),
    [("fp32", 0, 0), ("fp16_emulated", 0, 0), ("bf16", 0, 1), ("mantissa", 3, 1), ("mantissa", 11, 0)],
)
def test_records_say_in_which_format_logits_are_rounded(precision: str, bits: int, alarms: int) -> None:
    (run,) = cards(arms=("z_loss",), widths=(32,), lrs=(1e-3,), seeds=(0,), precision=precision, mantissa_bits=bits)
    rows = [
        (run["id"], n, probe, "", value)
        for n in STEPS
        for probe, value in (("train_loss", 2.0 + n % 2 / 100), ("log_z", -300.0))
    ]
    metrics = pd.DataFrame(rows, columns=list(store.METRIC_COLUMNS)).astype(store.METRIC_COLUMNS)
    records = store.Records(planted.table([run]), metrics)
    for override, expected in ((None, alarms), (23, 0), (2, 1)):
        (made,) = logs_of(records, override)
        assert [event.kind for event in detect(made)] == ["logit_rounding"] * expected
