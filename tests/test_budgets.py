"""The length of a run in tokens, batches that ramp as published, and learning rates that follow the tokens."""

from __future__ import annotations

import math
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
import torch

from lab import Fleet, RunConfig, run_config
from lab.core.errors import RequestError
from lab.optim.batch_schedule import Adaptive, Increments, LinearSamples, Steps, resolve
from lab.sweeping.capacity import Host, bytes_asked, most_runs
from lab.sweeping.cautions import find_cautions
from lab.sweeping.job import train_resumably
from lab.sweeping.launch import compose_points
from lab.sweeping.planner import training_flops
from lab.training.checkpoint import CheckpointConfig, Checkpointer
from lab.training.identity import columns, run_id
from lab.training.loop import train
from lab.training.recorder import Recorder
from small import configs

TOKENS = "steps=null"
PRESETS = ("palm", "glm_130b", "mt_nlg", "gpt3")


def config(*overrides: str) -> RunConfig:
    return configs("", shared=("batch_size=64", *overrides))[0]


def test_a_run_of_so_many_tokens_is_the_run_of_as_many_steps() -> None:
    """Steps times 64 sequences of 12 tokens; what does not make a batch is left over."""
    in_steps, in_tokens = config("steps=5"), config(TOKENS, "tokens=4500")
    assert in_tokens == in_steps
    assert columns(in_tokens)["tokens"] == 5 * 64 * 12
    ramp = ("batch=gpt3", "batch.micro_batch=16", "batch.start=16", "batch.ramp=80")
    # on the line from 16 to 64 lie 16, 25.6, 35.2 and 54.4 sequences
    in_tokens = config(*ramp, TOKENS, f"tokens={(112 + 2 * 64) * 12}")
    assert in_tokens.micro_batches.tolist() == [1, 1, 2, 3, 4, 4]
    assert in_tokens == config(*ramp, "steps=6")
    assert in_tokens.trained_tokens == (112 + 2 * 64) * 12


def test_an_id_does_not_depend_on_the_unit_of_the_budget() -> None:
    old = config("steps=5")
    assert (
        run_id(old, "data")
        == run_id(config(TOKENS, "tokens=3840"), "data")
        == run_id(config("steps=5", "schedule.over=steps"), "data")
    )
    assert "schedule.over" not in columns(old)
    over_tokens = config("steps=5", "schedule.over=tokens")
    assert columns(over_tokens)["schedule.over"] == "tokens"
    assert run_id(over_tokens, "data") != run_id(old, "data")


def test_tokens_replace_only_default_steps() -> None:
    (default,) = compose_points(["tokens=20480"])
    assert default["steps"] is None
    assert run_config(default).steps == 20480 // (16 * 32)
    (both,) = compose_points(["tokens=20480", "steps=400"])
    with pytest.raises(RequestError, match="steps=400 and tokens=20480 both set"):
        run_config(both)


def preset(name: str, batch_size: int, sequences: int) -> RunConfig:
    """A run of these sequences with the file of a preset, its micro-batch that of the paper."""
    micro_batch = {"palm": 512, "glm_130b": 24, "mt_nlg": 32, "gpt3": 16}[name]
    return configs(
        "",
        shared=(
            f"batch_size={batch_size}",
            f"batch={name}",
            f"batch.micro_batch={micro_batch}",
            "seq_len=1",
            TOKENS,
            f"tokens={sequences}",
        ),
    )[0]


@pytest.mark.slow
def test_presets_are_those_of_the_papers_at_their_size() -> None:
    """Steps of PaLM: 50 k, 65 k and 140 k; increments of GLM-130B and MT-NLG: 168 of 24 and 59 of 32 sequences."""
    palm = preset("palm", 2048, 50_000 * 512 + 65_000 * 1024 + 140_000 * 2048)
    assert palm.steps == 255_000
    assert [int((palm.micro_batches == size).sum()) for size in (1, 2, 4)] == [50_000, 65_000, 140_000]
    glm = preset("glm_130b", 4224, 450_000_000_000 // 2048).batch
    assert glm is not None
    assert glm.entry == Increments(24, start=192, increment=24, ramp=5_493_164)
    mt_nlg = preset("mt_nlg", 1920, 270_000_000_000 // 2048).batch
    assert mt_nlg is not None
    assert mt_nlg.entry == Increments(32, start=32, increment=32, ramp=5_859_375)
    gpt3 = preset("gpt3", 1600, 300_000_000_000 // 2048).batch
    assert gpt3 is not None
    assert gpt3.entry == LinearSamples(16, start=16, ramp=5_859_375)


@pytest.mark.parametrize("name", PRESETS)
def test_fractions_give_one_ramp_in_tokens_and_steps(name: str) -> None:
    in_tokens = config(TOKENS, "tokens=768000", f"batch={name}")
    assert in_tokens.batch is not None
    share = {"palm": 18 / 74, "glm_130b": 0.025, "mt_nlg": 12 / 270, "gpt3": 0.04}[name]
    before = in_tokens.micro_batches < in_tokens.micro_batches[-1]
    assert in_tokens.micro_batches[before].sum() * in_tokens.rows == pytest.approx(share * 64_000, abs=64)
    assert columns(in_tokens)["tokens"] == pytest.approx(768_000, abs=64 * 12)
    in_steps = config(f"steps={in_tokens.steps}", f"batch={name}")
    assert (in_steps.micro_batches != in_tokens.micro_batches).sum() <= 2  # shares of a batch more or less


@pytest.mark.parametrize(("name", "steps"), [("glm_130b", 320), ("palm", 80)])
def test_the_tokens_that_a_run_trained_on_are_a_run_of_as_many_steps(name: str, steps: int) -> None:
    """Also where the ramp, a share of all sequences, rounds down with the sequences of the run itself."""
    in_steps = config(f"steps={steps}", f"batch={name}")
    assert config(TOKENS, f"tokens={in_steps.trained_tokens}", f"batch={name}") == in_steps


def test_a_schedule_over_tokens_falls_with_the_tokens() -> None:
    """Batches of 1, 1, 2, 4, 4, 4 make sixteen sequences: the cosine after a quarter of them in warm-up."""
    ramp = ("batch=steps", "batch.micro_batch=1", "batch.half=2", "batch.full=4", "batch_size=4", "steps=6")
    fleet = Fleet(
        configs("optimizer.lr=1", shared=(*ramp, "schedule.over=tokens", "schedule.warmup=0.25", "schedule.floor=0"))
    )
    seen = torch.tensor([0.0, 1, 2, 4, 8, 12], dtype=torch.float64)
    expected = torch.where(seen < 4, seen / 4, (1 + torch.cos(torch.pi * (seen - 4) / 12)) / 2)
    torch.testing.assert_close(fleet.shape_sr[:, 0], expected)
    in_tokens = Fleet(
        configs("optimizer.lr=1", shared=(*ramp, "schedule.over=tokens", "schedule.warmup=48", "schedule.floor=0"))
    )
    assert torch.equal(
        in_tokens.shape_sr, fleet.shape_sr
    )  # a warm-up of 1 or more counts tokens, of which a sequence has 12


def test_a_warm_up_in_tokens_that_lasts_too_long_is_cautioned_against() -> None:
    (caution,) = find_cautions([config("steps=5", "schedule.over=tokens", "schedule.warmup=3500")])
    assert "one of 3500 tokens in a run of 3840" in caution
    assert not list(find_cautions([config("steps=5", "schedule.over=tokens", "schedule.warmup=3000")]))


def test_memory_is_that_of_a_micro_batch_and_work_that_of_the_ramp() -> None:
    small, large = (
        config(f"batch_size={size}", "batch=constant", "batch.micro_batch=8", "steps=5") for size in (8, 512)
    )
    whole = config("batch_size=512", "steps=5")
    tokens = 8 * (512 - 8) * 12  # 64-bit numbers while a batch is drawn
    assert bytes_asked(large) - bytes_asked(small) == tokens
    assert bytes_asked(whole) > 5 * bytes_asked(large)
    assert training_flops(whole) == training_flops(large)
    palm = config("batch=palm", TOKENS, "tokens=768000")
    assert training_flops(palm) == pytest.approx(training_flops(config("steps=1000")), rel=1e-3)
    assert palm.steps > 1300


def test_fractions_of_steps_are_those_of_the_sequences_that_the_steps_see() -> None:
    half = Steps(1, half=0.125, full=0.25)
    resolved = resolve(half, 4, 44)
    # 128 sequences: 16 of one each, 8 of two each, then 24 of four each would be 48 steps
    total = resolved.sequences(4, 44)
    assert (resolved.half, resolved.full) == (round(total * 0.125), round(total * 0.25))


ADAPTIVE = ("batch=adaptive", "batch.micro_batch=1", "batch_size=8", "batch.start=2", "batch.exchange=4")
ADAPTIVE = (*ADAPTIVE, "batch.memory=3", "schedule.over=tokens", "steps=30", "probes.every=2", "optimizer.lr=0.03")
ADAPTIVE = (*ADAPTIVE, "probes.names=[train_loss,batch]")


def trained(seed: int) -> tuple[Recorder, list[int]]:
    """An adaptive run of sixty sequences, and the sequences of each of its updates."""
    recorder, sizes = Recorder(Fleet(configs(f"seed={seed}", shared=ADAPTIVE))), []
    fleet = recorder.fleet
    fleet.evaluation.held_out_nt = fleet.evaluation.held_out_nt[:8]
    for result in train(fleet):
        recorder.keep(result)
        sizes.append(int(fleet.feed.seen))
    return recorder, [int(size) for size in np.diff(sizes)]


def test_an_adaptive_batch_follows_the_noise_and_ends_after_its_tokens() -> None:
    recorder, sizes = trained(0)
    assert sizes[0] == 2
    assert sum(sizes) == 60
    assert len(set(sizes)) > 1
    assert all(2 <= size <= 8 for size in sizes[:-1])
    ((outcome, rows, _),) = recorder.runs()
    measured = {(step, where): value for step, probe, where, value in rows if probe == "batch"}
    last = len(sizes) - 1
    assert measured[last, "sequences"] == sizes[-1]
    assert measured[last, "tokens"] == sum(sizes[:-1]) * 12
    assert (outcome["status"], outcome["updates"]) == ("finished", len(sizes))
    assert trained(0)[0].runs()[0][1] == rows


def test_the_adaptive_size_follows_its_formula() -> None:
    rule = Adaptive(micro_batch=4, start=8, exchange=100, memory=10)
    assert rule.adapted(trace=50.0, squared_norm=2.0, batch_size=64) == 48  # of sqrt(100 * 25) = 50
    assert rule.adapted(trace=1e9, squared_norm=1.0, batch_size=64) == 64
    assert rule.adapted(trace=5.0, squared_norm=-1.0, batch_size=64) == 64  # no telling the gradient from its noise
    assert rule.adapted(trace=0.1, squared_norm=1.0, batch_size=64) == 8
    for unknown in (0.0, -1.0, math.nan):
        assert rule.adapted(trace=unknown, squared_norm=1.0, batch_size=64) == 8


@pytest.mark.slow
def test_an_adaptive_run_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    whole, _ = trained(1)
    (config,) = configs("seed=1", shared=ADAPTIVE)
    keeper = Checkpointer(tmp_path, ["run"], CheckpointConfig(steps=3, minutes=0, keep=1))
    for stops in (iter([False] * 4 + [True]), repeat(False)):
        recorder = Recorder(Fleet([config]))
        recorder.fleet.evaluation.held_out_nt = recorder.fleet.evaluation.held_out_nt[:8]
        train_resumably(recorder, keeper, lambda result: None, print, partial(next, stops))
    assert recorder.runs()[0][1] == whole.runs()[0][1]


def test_adaptive_runs_train_alone() -> None:
    adaptive, ramp = config(*ADAPTIVE), config("steps=40", "batch=palm")
    assert most_runs(adaptive, Host(), 4) == 1
    assert most_runs(ramp, Host(), 4) == 4
