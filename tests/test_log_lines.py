"""Forms in which programs and people write the rows of a log, and what is asked or said where they are not clear."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lab.core.errors import RequestError
from labwatch.events import detect
from labwatch.events.log_lines import fields_of, number
from labwatch.events.log_names import given_pattern, usual_columns
from labwatch.events.logs import Logs, read_logs
from sweeping import OutputOf

ROWS = [(10 * n, round(8 - n / 10, 2)) for n in range(1, 31)]
# One row, with ``s`` for the step and ``x`` for the loss; names and numbers stand beside each other.
BESIDE = [
    "step {s} - loss - {x}",
    "step:\t{s}\tloss:\t{x}",
    "step | {s} | loss | {x}",
    "('step', {s}), ('loss', {x})",
    "step {s}: the training loss is {x}",
    "Loss at step {s}: {x}",
    "after {s} steps, the loss has reached {x}",
    "{s}: 9.9, {x} avg loss, 0.001 rate, 3.6 seconds",
    "{s} iterations; {x} loss",
    "{s}: loss {x}",
    "[{s}] loss={x} loss_time=9.0 loss_scale=64",
    "#{s} loss [{x}]",
    '{{"level": "info", "message": "step {s}: loss {x}"}}',
    "step\uff1a{s}\uff0closs\uff1a{x}",
    "{{\u2018step\u2019: {s}, \u201closs\u201d: {x}, 'lr': 4e\u201305}}",
    "step {s} loss tensor({x}, device='cuda:0', grad_fn=<MeanBackward0>)",
    "{{'step': {s}, 'loss': np.float64({x}), 'lr': [1e-4]}}",
    "{{'step': {s}, 'loss': [{x}]}}",
    "step {s} loss <tf.Tensor: shape=(), dtype=float32, numpy={x}>",
    "--------\n| time/    |      |\n|   step   | {s} |\n|   loss   | {x} |\n--------",
    "loss: {x}\nlr: 0.1\nstep: {s}\n",
    "=== Iteration {s} ===\n  loss      : {x}\n",
    "{s} of it, step {s}, checkpoint_step 9, loss {x}\nsaved: checkpoint_step : {s}1",
]
# Names stand above the numbers: what begins the log, and one row.
ABOVE = [
    ("  step       loss       lr\n", "{s:>6} {x:>10} {s:>8}"),
    ("Step Training Loss Validation Loss\n", "{s} {x} 9.9"),
    ("  Iter       Train Loss   Remaining Time\n", "{s:>6} {x:>16}  1.5s"),
    ("", "  Iter   GPU_mem  loss  Size\n  {s}/300   7.1G   {x}   640: 100%|###| 9/9 [00:41<00:00, 2.3it/s]"),
    ("### What happened (lr=5e-4, step 7)\n\n| Step | Loss |\n|---|---|\n", "| **{s}** | `{x}` |"),
    ("| key | value |\n|---|---|\n| layers | 12 |\n\n| Iteration | Loss (nats) |\n|:--|--:|\n", "| *{s}* | {x} |"),
]


def read(tmp_path: Path, text: str, suffix: str = "log") -> Logs:
    path = tmp_path / f"train.{suffix}"
    path.write_text(text)
    return read_logs(path, with_parts=True)


def rows_of(logs: Logs) -> list[tuple[int, float]]:
    (log,) = logs.runs
    return list(zip(log.step_n.tolist(), log.columns["loss"].tolist(), strict=True))


@pytest.mark.parametrize(("head", "form"), [*(("", form) for form in BESIDE), *ABOVE])
def test_a_row_is_read_in_every_form(head: str, form: str, tmp_path: Path) -> None:
    logs = read(tmp_path, head + "".join(f"{form.format(s=step, x=loss)}\n" for step, loss in ROWS))
    assert rows_of(logs) == ROWS
    assert not any("left out" in note for note in logs.notes)


@pytest.mark.parametrize(
    ("form", "suffix"),
    [
        ("step,{steps}\nloss,{losses}\n", "csv"),
        ("steps = [{steps}]\nlosses = [{losses}]\n", "log"),
        ("{{'loss': [{losses}], 'step': [{steps}]}}", "log"),
        ('{{"loss": [{losses}],\n "step": [{steps}]}}', "json"),
    ],
)
def test_a_table_that_lies_on_its_side_is_read(form: str, suffix: str, tmp_path: Path) -> None:
    steps, losses = zip(*ROWS, strict=True)
    text = form.format(steps=", ".join(map(str, steps)), losses=", ".join(map(str, losses)))
    assert rows_of(read(tmp_path, text, suffix)) == ROWS


def test_numbers_are_those_that_were_meant() -> None:
    assert number("1,450") == 1450
    assert number("1,450", has_decimal_comma=True) == 1.45
    assert (number("0,318"), number("1,45e-3"), number("1,234,567")) == (0.318, 1.45e-3, 1234567)
    assert fields_of("step 5 loss 2,31 lr 0,001") == {"step": "5", "loss": "2,31", "lr": "0,001"}


@pytest.mark.parametrize(
    ("form", "first"),
    [("step: {s} loss: {x}", 7.9), ("step {s:,} of 9,000 loss {x} tokens {s},000,000", 7.9), ("{s};{x}", 7.9)],
)
def test_a_decimal_comma_is_found_by_its_rows(form: str, first: float, tmp_path: Path) -> None:
    text = "".join(form.format(s=step, x=f"{loss:.3f}".replace(".", ",")) + "\n" for step, loss in ROWS)
    assert rows_of(read(tmp_path, f"step;loss\n{text}" if form == "{s};{x}" else text)) == ROWS


def test_thousands_stay_thousands(tmp_path: Path) -> None:
    """A perplexity that falls from thousands below one is written without a comma there."""
    values = [4000 / (n + 1) for n in range(30)]
    text = "".join(f"step {1000 * n:,} loss {value:,.0f}\n" for n, value in enumerate(values))
    assert rows_of(read(tmp_path, text)) == [(1000 * n, round(value)) for n, value in enumerate(values)]


def test_only_held_out_losses_count_where_there_are_no_others_and_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_of: OutputOf
) -> None:
    monkeypatch.chdir(tmp_path)
    losses = [*(2 - n / 20 for n in range(20)), *(4.0 * 2**n for n in range(5))]
    Path("val.log").write_text("".join(f"epoch {n} val_loss {loss:.3f}\n" for n, loss in enumerate(losses)))
    assert "val.log step 20: the loss diverges" in output_of("watch", "val.log", code=1)
    said = "of held-out data, since no loss of training was found"
    assert said in Path("val.log.alarms/val.log.html").read_text()
    assert said in json.loads(output_of("watch", "val.log", "--json", code=1))["notes"][0]
    Path("both.log").write_text("".join(f"epoch {n} loss 2 val_loss {loss:.3f}\n" for n, loss in enumerate(losses)))
    assert set(read_logs(Path("both.log")).runs[0].columns["loss"]) == {2.0}
    Path("table.csv").write_text("lr,val_loss\n" + "".join(f"{n},{loss}\n" for n, loss in enumerate(losses)))
    with pytest.raises(RequestError, match="--columns loss=val_loss"):  # of runs, since it has no step
        read_logs(Path("table.csv"))


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("[{s}/300] D: 0.{k} G: {x}", ["D", "G"]),
        ("step {s} Loss_D: 0.{k} Loss_G: {x} D(x): 0.5", ["Loss_D", "Loss_G"]),
        ("step {s} enc_loss 0.{k} dec_loss {x} time 0.3", ["enc_loss", "dec_loss"]),
    ],
)
def test_losses_without_a_total_are_judged_each_under_its_name(form: str, names: list[str], tmp_path: Path) -> None:
    text = "".join(form.format(s=step, x=loss, k=n + 10) + "\n" for n, (step, loss) in enumerate(ROWS))
    logs = read(tmp_path, text)
    found = {log.name: log for log in logs.runs}
    assert set(found) == {f"train.log {name}" for name in names}
    assert found[f"train.log {names[1]}"].columns["loss"].tolist() == [loss for _, loss in ROWS]
    assert "without a total, each judged by itself" in logs.notes[0]
    with pytest.raises(RequestError, match="several losses and no total"):  # as for lab import
        read_logs(tmp_path / "train.log")


@pytest.mark.parametrize("form", ["(epoch: {e}, iters: {i}) loss: {x}", "Epoch {e}\n  [{i}/100] loss {x}"])
@pytest.mark.parametrize("validation", ["", "valid iters: 3 loss: 5\nvalid iters: 5 loss: 5\n"])
def test_a_pass_and_its_iterations_together_are_the_step(form: str, validation: str, tmp_path: Path) -> None:
    """Also where the loss jumps at the beginning of a pass, so that it does not go on."""
    losses = [3.0 + 0.01 * n for n in range(10)] + [9.0] * 10
    lines = [form.format(e=n // 10, i=10 * (n % 10) + 10, x=loss) + "\n" for n, loss in enumerate(losses)]
    text = "".join(line + (validation if n % 10 == 9 else "") for n, line in enumerate(lines))
    assert rows_of(read(tmp_path, text)) == [(10 * n + 10, loss) for n, loss in enumerate(losses)]


@pytest.mark.parametrize("spoiled", [range(3), range(20, 40), range(40)])
def test_a_bar_that_says_nan_before_its_first_loss_has_none_yet(spoiled: range, tmp_path: Path) -> None:
    text = "".join(
        f"\r{n}%|##   | {n}/40 [00:01<00:09, 9it/s, loss={'nan' if n in spoiled else 2 + n % 3 / 10}]"
        for n in range(40)
    )
    (log,) = read(tmp_path, text).runs
    expected = [n for n in range(40) if n not in range(3) or len(spoiled) == 40]
    assert log.step_n.tolist() == (expected if spoiled.start == 0 else [*range(40)])
    assert [event.ending for event in detect(log)] == ([] if spoiled == range(3) else ["diverged"])


def test_a_zero_that_was_rounded_is_none(tmp_path: Path) -> None:
    """But ``0.0`` is one, as Python prints it."""
    text = "".join(f"step {n} loss {max(0, 1 - n / 20):.3f} grad_norm 0.00 lr 0.0\n" for n in range(40))
    (log,) = read(tmp_path, text).runs
    assert (log.columns["loss"] > 0).all()
    assert "grad_norm" not in log.columns
    assert set(log.columns["lr"]) == {0.0}
    assert detect(log) == []
    with pytest.raises(RequestError, match=r"prints 'loss' as 0\.000 in every row"):
        read(tmp_path, "".join(f"step {n} loss 0.000 grad_norm 0.{n}\n" for n in range(40)))


@pytest.mark.parametrize("part", ["critic/vf_loss", "aux_loss", "loss_mask"])
def test_a_part_that_is_nan_is_an_alarm_of_its_own(part: str, tmp_path: Path, output_of: OutputOf) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {n} loss {2 + n % 3} {part} {math.nan if n > 24 else 0.5}\n" for n in range(40)))
    (event,) = json.loads(output_of("watch", path, "--json", code=1))["events"]
    assert (event["run"], event["step"], event["ending"]) == (f"train.log {part}", 25, "diverged")
    path.write_text("".join(f"step {n} loss {2 + n % 3} {part} 0.5\n" for n in range(40)))
    assert json.loads(output_of("watch", path, "--json"))["events"] == []


REWARDS = [0.3 + 0.01 * n if n < 30 else 0.6 - 0.08 * (n - 29) for n in range(50)]
# Lines of trainers, with ``r`` for the reward of step ``s``, and what they call it.
TRAINERS = {
    "verl": (
        "step:{s} - actor/pg_loss:0.01 - critic/score/max:1 - critic/rewards/mean:np.float64({r})"
        " - timing_s/reward:1.{k} - perf/throughput:100 - val-core/gsm8k/reward/mean@1:0.5",
        "critic/rewards/mean",
    ),
    "OpenRLHF": (
        "{{'policy_loss': 0.1, 'actor_lr': 1e-6, 'reward': {r}, 'return': 0.{k}, 'global_step': {s}}}",
        "reward",
    ),
    "TRL": ("{{'loss': 0.0{k}, 'rewards/format/mean': 1.0, 'reward': {r}, 'step': {s}}}", "reward"),
    "TRL's PPO": (
        "{{'objective/non_score_reward': -0.1, 'objective/rlhf_reward': {r},"
        " 'loss/policy_avg': 0.{k}, 'episode': {s}}}",
        "objective/rlhf_reward",
    ),
    "slime": (
        "x.py:4 - step {s}: {{'train/loss': 0.1{k}}}\n"
        "y.py:3 - rollout {s}: {{'rollout/raw_reward': {r}, 'rollout/rewards': 0.0, 'perf/rollout_time': 3.{k}}}",
        "rollout/raw_reward",
    ),
    "prime-rl": ("10:00:00 SUCCESS Step {s} | Time: 2.{k}s | Reward: {r} | Throughput: 12.5 tokens/s", "Reward"),
    "SB3": (
        "----\n| rollout/ | |\n| ep_rew_mean | {r} |\n| time/ | |\n| iterations | {k} |\n| total_timesteps | {s} |\n"
        "| train/ | |\n| loss | 0.{k} |\n----",
        "ep_rew_mean",
    ),
    "CleanRL": ("global_step={s}, episodic_return=[{r}]\nSPS: 12{k}", "episodic_return"),
    "ChainerRL": (
        "outdir:out step:{s} episode:{k} R:{r}\nstatistics:[('average_q', 1.{k}), ('average_loss', 0.{k})]",
        "R",
    ),
    "a line above": ("mean reward: {r}\nstep {s} loss 0.{k}", "mean reward"),
    "a line below": ("step {s} loss 0.{k}\n  mean_reward={r}", "mean_reward"),
    "a line of its own": ('{{"iteration": {s}, "reward": {r}}}\n{{"step": {s}, "loss": 0.{k}}}', "reward"),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_reward_of_each_trainer_is_found_and_belongs_to_its_step(trainer: str, tmp_path: Path) -> None:
    form, name = TRAINERS[trainer]
    text = "".join(form.format(s=10 * n, r=round(reward, 3), k=n + 11) + "\n" for n, reward in enumerate(REWARDS))
    logs = read(tmp_path, text)
    (log,) = logs.runs
    assert f"reward '{name}'" in logs.notes[0]
    known = log.columns["reward"]
    np.testing.assert_allclose(known[~np.isnan(known)], np.round(REWARDS, 3)[log.step_n[~np.isnan(known)] // 10])
    assert len(known) >= len(REWARDS) - 1
    assert "reward_fall" in [event.kind for event in detect(log)]


def test_times_are_no_rewards_and_a_missing_reward_is_said(tmp_path: Path) -> None:
    text = "".join(f"step:{n} - pg_loss:0.{n} - kl:0.1 - entropy:0.5 - timing_s/reward:{n}\n" for n in range(10, 50))
    logs = read(tmp_path, text)
    assert "reward" not in logs.runs[0].columns
    assert "no reward was found (--columns reward=COLUMN)" in logs.notes[0]
    for other in (
        "reward_time",
        "time/reward",
        "perf/reward",
        "rewards/chosen",
        "reward_std",
        "non_score_reward",
        "score",
    ):
        assert "reward" not in usual_columns(["step", "loss", other], {})
    assert usual_columns(["episode", "loss", "score"], {})["reward"] == "score"


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("step {s} loss {x} train_loss {y}", "step 'step', loss 'loss'"),
        ("step {s} num_updates {s} lm_loss {x} avg_loss {y} box_loss {y}", "step 'step' (not 'num_updates'), loss "
         "'lm_loss' (not 'avg_loss', 'box_loss')"),
    ],
)  # fmt: skip
def test_what_else_a_name_could_have_been_is_said(form: str, said: str, tmp_path: Path) -> None:
    text = "".join(form.format(s=step, x=loss, y=loss) + "\n" for step, loss in ROWS)
    assert said in read(tmp_path, text).notes[0]


@pytest.mark.parametrize(
    ("form", "column"),
    [("{n},{up},{calm}\n", "loss"), ("{n},{calm},{up}\n", "loss"), ("{n},{calm},0.2,0.1,{fall},{calm}\n", "reward")],
)
def test_two_readings_with_different_verdicts_are_asked_about(
    form: str, column: str, tmp_path: Path, output_of: OutputOf
) -> None:
    names = ("loss", "nll_loss") if column == "loss" else ("reward", "score_mean")
    head = "step,loss,nll_loss\n" if column == "loss" else "step,loss,kl,entropy,reward,score_mean\n"
    change: Callable[[int], dict[str, float]] = lambda n: {  # noqa: E731
        "up": 2 + n % 3 / 100 if n < 40 else 9.0 + n, "calm": 2 + n % 3 / 100, "fall": 1.0 if n < 40 else -1.0
    }  # fmt: skip
    path = tmp_path / "log.csv"
    path.write_text(head + "".join(form.format(n=n, **change(n)) for n in range(60)))
    said = output_of("watch", path, code=2)
    assert said.count("\n") == 1
    codes = []
    for name in names:
        assert f"--columns {column}={name}" in said
        codes.append(1 if f"alarms if {column}={name} is" in said else 0)
        output_of("watch", path, "--columns", f"{column}={name}", "--json", code=codes[-1])
    assert sorted(codes) == [0, 1]


def test_a_pattern_reads_what_no_form_does(tmp_path: Path, output_of: OutputOf) -> None:
    path = tmp_path / "odd.log"
    path.write_text("".join(f"~{n}~L<{2 if n < 30 else 2.0**n}>\n" for n in range(40)))
    (event,) = json.loads(output_of("watch", path, "--pattern", r"~(?P<step>\d+)~L<(?P<loss>[^>]+)", "--json", code=1))[
        "events"
    ]
    assert event["step"] == 30
    for pattern, why in (
        ("(", "no regular expression"),
        ("(?P<los>.)", "nearest: loss"),
        (r"(?P<step>\d)", "no group"),
    ):
        with pytest.raises(RequestError, match=why):
            given_pattern(pattern)
