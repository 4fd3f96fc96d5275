"""What a person types or gives and the lab cannot carry out: exit code 2, one line that names it, and nothing written.

A row holds the words of a command, then what its line must name: the offending key, file or value and, where the lab
suggests one, the nearest valid choice. The wording of the line is not tested.
"""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import planted
from lab.__main__ import main

# Of each run below, unless its row says otherwise.
RUN = ["data=synthetic", "model.width=16", "steps=12", "batch_size=4", "seq_len=12", "validation=short"]

KEYS = [
    # words and keys
    ("swep", "'swep'", "nearest: sweep"),
    ("sweep", "name"),
    ("sweep quickstrat", "'quickstrat'", "nearest: quickstart"),
    ("sweep none.yaml", "none.yaml"),
    ("train foo", "'foo'"),
    # crash tests
    ("stress foo", "'foo'", "KEY=VALUE"),
    ("stress --tests lr_x1O", "'lr_x1O'", "nearest: lr_x10"),
    ("stress --minutes 2", "--minutes", "1, 5 or 30", "2"),
    ("stress --minutes soon", "--minutes", "1, 5 or 30", "soon"),
    ("stress optimizer=adamw,sgd", "optimizer", "several values"),
    ("stress stepz=3", "'stepz'", "nearest: steps"),
    ("stress --shard 1/2", "--shard"),
    ("train lr=0.1", "'lr'", "nearest: optimizer.lr"),
    ("train stepz=3", "'stepz'", "nearest: steps"),
    ("train +optimizer.lrr=3", "'optimizer.lrr'", "nearest: lr"),
    ("train scale=toy optimizer.lr=-1", "optimizer.lr", "scale=toy"),
    ("train scale=toy -m optimizer.nope=1,2", "optimizer.nope", "scale=toy"),
    ("train optimizer.momentum=0.9", "'optimizer.momentum'", "optimizer=momentum"),
    ("train +schedule.cooldown=1", "'schedule.cooldown'", "schedule=wsd"),
    ("train +model.depth=1", "'model.depth'"),
    ("train schedule=constant schedule.floor=0", "'schedule.floor'"),
    ("train intervention=null", "intervention"),
    ("train intervention.z_loss=null", "intervention.z_loss"),
    ("train model=3", "group"),
    ("train '+optimizer={1:2}'", "'optimizer.1'"),
    ("coordcheck '+optimizer={1:2}'", "'optimizer.1'"),
    ("train model=d65", "'d65'", "nearest: d64"),
    ("train recipe=lama", "'lama'", "nearest: llama"),
    ("train recipe=3", "group"),
    ("train recipe.name=[1]", "recipe.name"),
    ("train recipe.nam=mine", "'recipe.nam'"),
    ("train +recipe.size=3", "'recipe.name'"),
    ("train recipe=llama intervention=[z_los]", "'z_los'", "nearest: z_loss"),
    ("train intervention=[z_los]", "'z_los'", "nearest: z_loss"),
    ("train intervention=[qk_layernorm,qk_layernorm_model]", "qk_layernorm_model", "exclude"),
    ("train probes.names=[val_los]", "'val_los'", "nearest: val_loss"),
    ("train seed=0,1", "lab train -m"),
    ("train -m optimizer.lr=interval(0,1)", "optimizer.lr"),
    ("train seed=[1", "seed=[1"),
    ("train -m out=a,b", "out"),
    ("train out=", "out"),
    (f"train out={300 * 'a'} --dry-run", "out", "too long"),
    ("train device=mps", "device=mps"),
    (f"train seed={2**63}", "seed"),
    ("train fleet=3", "'fleet'"),
    ("train ~fleet", "'fleet'"),
    ("train ~nothing --cfg job", "'nothing'"),
    ("train ~optimizer.clip", "'optimizer.clip'"),
    ("train data.path=~/x", "data.path"),
    ("coordcheck ~optimizer.clip", "'optimizer.clip'"),
    ("coordcheck model.width=32,1048576", "model.width=1048576"),
    ("train hydra.sweeper.max_runs=abc", "hydra.sweeper.max_runs"),
    ("train hydra.sweeper.max_runs=0", "max_runs"),
    ("train hydra.launcher.timeout_minutes=-1", "hydra.launcher.timeout_minutes"),
    ("train hydra.launcher.devices=[none]", "hydra.launcher.devices"),
    ("train hydra/launcher=locl", "'locl'", "nearest: local"),
    ("sweep smoke shard=0/4", "shard", "'0/4'"),
    ("sweep smoke shard=1/2,2/2", "shard"),
    ("report", "folder"),
    ("report nowhere", "nowhere"),
    ("list sweps", "'sweps'", "nearest: sweeps"),
    # values of the wrong kind or out of bounds
    ("train steps=8.5", "steps", "8.5"),
    ("train steps=many", "steps", "'many'"),
    ("train steps=true", "steps", "True"),
    ("train steps=null", "steps", "None"),
    ("train steps=[8]", "steps"),
    ("train steps=0", "steps", "above 0"),
    ("train optimizer.lr=nan", "optimizer.lr"),
    ("train optimizer.lr=inf", "optimizer.lr"),
    ("train optimizer.lr=false", "optimizer.lr", "False"),
    ("train optimizer.lr=0", "optimizer.lr", "above 0"),
    ("train optimizer.lr=1e-310", "optimizer.lr", "2.23e-308"),
    ("train intervention.z_loss.coefficient=-1", "intervention.z_loss.coefficient", "at least 0"),
    ("train intervention.z_loss=3", "intervention.z_loss"),
    ("train precision=fp16", "precision", "nearest: bf16"),
    ("train optimizer.eps=-1e-9", "optimizer.eps", "at least 0"),
    ("train optimizer.beta2=1", "optimizer.beta2", "below 1"),
    ("train optimizer.clip=nan", "optimizer.clip"),
    ("train device=cdua", "device", "nearest: cuda"),
    ("train probes.names=abc", "probes.names"),
    ("train probes.names=null", "probes.names"),
    ("train ~seed", "seed"),
    ("train schedule.floor_share=1.5", "schedule.floor_share", "at most 1"),
    ("train schedule=wsd schedule.cooldown=1.5", "schedule.cooldown", "at most 1"),
    # shapes
    ("train model.width=20 model.head_width=8", "width 20", "head_width 8"),
    ("train model.width=9 model.head_width=3", "head_width"),
    ("train model.depth=-1", "model.depth", "at least 0"),
    ("train intervention=[learned_positions] intervention.learned_positions.positions=11", "learned_positions", "12"),
    # chains of an optimizer
    ("train optimizer.weight_dekay=1", "optimizer.weight_dekay", "nearest: optimizer.weight_decay"),
    ("train optimizer.chain=[adm,peak,schedule]", "'adm'", "nearest: adam"),
    ("train optimizer.chain=[clip,adam,decay,schedule]", "optimizer.chain"),
    ("train optimizer.eps=1e-6 optimizer.chain=[clip,sgd,peak,decay,schedule]", "'optimizer.eps'"),
    ("train optimizer.chain=[adam,clip,peak,schedule]", "optimizer.chain", "'clip'", "'adam'"),
    ("train +optimizer.adam.epz=1", "optimizer.adam.epz", "nearest: eps"),
    ("train +optimizer.adm.eps=1", "optimizer.adm", "nearest: adam"),
    ("train +optimizer.peak.lr=1", "optimizer.peak.lr", "optimizer.lr"),
    # settings that do nothing together, or cannot be had together
    ("train optimizer=adamw_qk_clip", "'qk_clip'", "qk_layernorm"),
    ("train optimizer=adamw_qk_clip intervention=[ngpt]", "'qk_clip'", "ngpt"),
    ("train optimizer=adamw_spectral_cap optimizer.capped=query_key", "'spectral_cap'"),
    ("train optimizer=adamc schedule=constant", "'decay_corrected'"),
    ("train optimizer=schedule_free", "'schedule_free'", "schedule=cosine"),
    (
        "train optimizer=adamh optimizer.chain=[clip,adam,to_weight_norm,peak,decay,schedule,keep_norm] "
        "+optimizer.weight_decay=0.1",
        "'keep_norm'",
        "optimizer.matrix.weight_decay",
    ),
    ("train optimizer=adamh parametrization=mup_full", "'keep_norm'", "query"),
    ("train optimizer=muonh intervention=[zero_init_projections]", "'keep_norm'", "output"),
    ("train intervention=[mu_centering,tied_head]", "mu_centering", "tied_head"),
    ("train optimizer=adamw_skip_sigma batch=constant batch.micro_batch=2", "'skip_sigma'"),
    ("train +optimizer.embedding.weight_dekay=0", "'optimizer.embedding.weight_dekay'", "nearest: weight_decay"),
    ("train +optimizer.embeding.weight_decay=0", "optimizer.embeding"),
    ("train optimizer=adamw_skip_sigma +optimizer.head.skip_sigmas=3", "'optimizer.head.skip_sigmas'"),
    ("train optimizer=muon optimizer.newton_schulz=exact", "'exact'", "original"),
    ("train mantissa_bits=7", "mantissa_bits=7", "precision=mantissa"),
    ("train precision=mantissa", "mantissa_bits", "2 to 23"),
    ("train precision=mantissa mantissa_bits=2.5", "2.5"),
    ("train precision=mantissa mantissa_bits=24", "at most 23"),
    ("train precision=bf16 attention_precision=same", "attention_precision=same", "precision=mxfp8"),
    ("train norm_gains=rounded", "norm_gains=rounded", "precision=mxfp8"),
    ("train precision=nvfp4 gradient_format=e4m3", "gradient_format"),
    ("train precision=mxfp8 master_weights=none", "master_weights=none"),
    ("train precision=fp8_delayed batch=constant batch.micro_batch=2", "precision=fp8_delayed"),
    ("train precision=mxfp8 stochastic_rounding=all batch=constant batch.micro_batch=2", "stochastic_rounding"),
    ("train response=branch response.change=eps optimizer=sgd", "response.change=eps"),
    ("train response=branch response.change=second_moment optimizer.beta1=0.5", "response.beta1=0.5"),
    ("train response=earlier_state", "response=earlier_state", "burst=rare_tokens"),
    (
        "train response=earlier_state burst=rare_tokens response.snapshot_every=2 response.snapshots=4 "
        "response.rewind_moments=4 response.rewind_weights=9 steps=16",
        "rewind_weights=9",
        "snapshots=6",
    ),
    ("train response=rewind_and_rescale", "response=rewind_and_rescale", "loss_scale="),
    ("train master_weights=none", "master_weights=none"),
    ("train loss_scale=metaseq batch=palm batch_size=16 batch.micro_batch=2", "loss_scale=metaseq"),
    ("train gradient_sum=fp16 loss_scale=torch precision=fp16_emulated", "gradient_sum=fp16"),
    ("train loss_scale=metaseq loss_scale.floor=0", "loss_scale.floor", "above 0"),
    # budgets and batches
    ("train steps=5 tokens=1000", "steps=5", "tokens=1000"),
    ("train steps=null tokens=47", "tokens=47", "48 tokens"),
    ("train steps=null tokens=many", "tokens", "'many'"),
    ("train steps=null tokens=0", "tokens", "above 0"),
    ("train batch_size=64 steps=null tokens=9000 batch=palm batch.full=1000", "32 of 64"),
    ("train batch_size=64 steps=40 batch=palm batch.half=2.5", "batch.half=2.5"),
    ("train batch_size=64 steps=40 batch=adaptive", "schedule.over=tokens"),
    ("train schedule.over=epochs", "schedule.over", "'epochs'"),
    ("train batch=constant batch.micro_batch=3", "batch.micro_batch=3"),
    ("train batch=increments batch.micro_batch=1 batch.start=1 batch.increment=2 batch.ramp=4", "increment=2"),
    ("train probes.names=[train_loss,noise_scale]", "noise_scale"),
    ("train probes.names=[grad_normm]", "'grad_normm'", "nearest: grad_norm"),
    ("train probes.every=0", "probes.every", "at least 1"),
    # bursts and responses
    ("train burst=rare_tokens burst.start=12", "burst.start=12", "batches 0 to 11"),
    ("train burst=rare_tokens burst.start=4 burst.length=9", "burst.length=9", "batches 0 to 11"),
    ("train burst=rare_tokens burst.start=4 burst.length=3 burst.repeats=3", "burst.repeats=2"),
    ("train burst=rare_tokens burst.start=4 burst.length=2 burst.repeats=1.5", "burst.repeats", "1.5"),
    ("train burst=rare_tokens burst.start=4 burst.length=2 burst.repeats=0", "burst.repeats", "at least 1"),
    ("train response=rewind_and_skip response.snapshot_every=2 response.rewind=9", "rewind=9", "snapshots=6"),
    # what is too large
    ("train data=stdlib seq_len=100000000", "seq_len=100000000"),
    ("train batch_size=10000000", "batch_size=10000000", "would fit"),
    ("train steps=1000000000000", "steps=1000000000000", "would fit"),
    ("train model.depth=1000000000", "model.depth=1000000000", "a smaller model"),
    # data
    ("train data=text", "data.path"),
    ("train data=jsonl", "data.path"),
    ("train data=text data.path=absent.txt", "absent.txt"),
    ("train data=text data.path=absent/*.txt", "absent/*.txt"),
    ("train data=mixture data.trigram=0 data.echo=0 data.script=0 data.runs=0 data.noise=0", "data"),
    ("train data=mixture data.without=rums", "data.without", "runs"),
    ("train data=echo data.rows=8", "data.rows=8", "batch_size=8"),
    ("train ledger=absent.yaml", "absent.yaml"),
    # logs
    ("watch absent.csv", "absent.csv"),
    ("watch absent.csv --follow", "--follow"),
    # tables
    ("import", "out="),
    ("import absent.csv out=c", "absent.csv"),
    ("import a.csv b.csv out=c", "TABLE"),
    ("import absent out=c", "absent"),
    # commands
    ("predict", "folder"),
    ("predict absent", "absent"),
    ("help stats", "'stats'", "nearest: status"),
    ("watch log.csv --on-alarm true", "--on-alarm", "--follow"),
    ("watch log.csv --follow --replay log.csv", "--replay", "--follow"),
    ("status --nonsense", "--nonsense"),
    ("leaderboard --transfer absent.csv", "absent.csv"),
]

LOG = "step,loss\n1,2\n"
STEPS = "".join(f"{step},2\n" for step in range(1000))
RESTART = "restarts: [{step: 6, %s}]"
# A file of the person's own, its content, the words that name it, and what the line must name.
FILES = [
    # logs
    ("log.csv", "step,accuracy\n1,2\n", "watch log.csv", "step, accuracy"),
    ("log.csv", "epoch,loss\n1,2\n", "watch log.csv", "'loss'"),
    ("log.csv", "", "watch log.csv", "log.csv"),
    ("log.csv", "step,loss\nx,y\n", "watch log.csv", "log.csv"),
    ("log.csv", LOG, "watch log.csv", "3 rows"),
    ("log.csv", LOG + "\0", "watch log.csv", "binary"),
    ("log.bin", "\0\1\2", "watch log.bin", "log.bin"),
    ("log.txt", "\n\n  \x1b[31mhello\n", "watch log.txt", "hello"),
    ("log.txt", '{"step": 1, "ce": 2}\n', "watch log.txt", "step, ce"),
    ("log.csv", "step,ce\n1,2\n", "watch log.csv --columns loss=cee", "'cee'", "nearest: ce"),
    ("log.csv", LOG, "watch log.csv --columns los=loss", "'los'", "nearest: loss"),
    ("log.csv", LOG, "watch log.csv --columns loss", "--columns", "'loss'"),
    ("log.csv", "step,loss\n" + 2**21 * "1", "watch log.csv", "1024 KiB"),
    ("log.csv", "step,loss,log_z\n" + STEPS.replace("\n", ",9\n"), "watch log.csv --mantissa-bits=1", "2 to 23"),
    ("log.csv", "step,loss,log_z\n" + STEPS.replace("\n", ",9\n"), "watch log.csv --mantissa-bits=7.5", "2 to 23"),
    # restarts
    ("my.yaml", RESTART % "loss_scale: fresh", "train ledger=my.yaml", "loss_scale="),
    ("my.yaml", RESTART % "loss_scale: 4", "train ledger=my.yaml precision=fp16_emulated loss_scale=torch", "fresh"),
    ("my.yaml", "restart: []", "train ledger=my.yaml", "'restart'", "nearest: restarts"),
    ("my.yaml", "restarts: []", "train ledger=my.yaml", "restarts"),
    ("my.yaml", RESTART % "optimizer.lrr: 1", "train ledger=my.yaml", "restarts[0]", "nearest: optimizer.lr"),
    ("my.yaml", RESTART % "optimizer.lr: -1", "train ledger=my.yaml", "optimizer.lr", "above 0"),
    ("my.yaml", RESTART % "", "train ledger=my.yaml", "restarts[0]"),
    ("my.yaml", RESTART % "optimizer: sgd", "train ledger=my.yaml", "'optimizer'", "optimizer.chain"),
    ("my.yaml", RESTART % "optimizer.chain: [sgd, peak]", "train ledger=my.yaml", "restarts[0]", "optimizer.chain"),
    (
        "my.yaml",
        RESTART % "optimizer.chain: [clip, momentum, peak, decay, schedule]",
        "train ledger=my.yaml",
        "optimizer.momentum",
    ),
    ("my.yaml", RESTART % "intervention.reluu: true", "train ledger=my.yaml", "nearest: intervention.relu"),
    ("my.yaml", RESTART % "intervention.relu: 1", "train ledger=my.yaml", "intervention.relu", "not 1"),
    ("my.yaml", RESTART % "intervention.relu: false", "train ledger=my.yaml", "intervention.relu"),
    ("my.yaml", RESTART % "intervention.tied_head: true", "train ledger=my.yaml", "tied_head"),
    ("my.yaml", RESTART % "model.width: 32", "train ledger=my.yaml", "'model.width'"),
    ("my.yaml", RESTART % "schedule.flor: 1", "train ledger=my.yaml", "nearest: schedule.floor"),
    ("my.yaml", "restarts: [{step: 12, optimizer.lr: 1}]", "train ledger=my.yaml", "1 to 11"),
    ("my.yaml", "restarts: [{optimizer.lr: 1}]", "train ledger=my.yaml", "1 to 11"),
    (
        "my.yaml",
        "restarts: [{step: 6, optimizer.lr: 1}, {step: 6, optimizer.lr: 2}]",
        "train ledger=my.yaml",
        "restarts[1].step",
    ),
    # sweep files
    ("my.yaml", "# a question, and nothing else\n", "sweep my.yaml", "my.yaml"),
    ("my.yaml", "5: 6", "sweep my.yaml", "my.yaml", "'5'"),
    ("my.yaml", "optimizer: {lr: {1: 2}}", "sweep my.yaml", "'optimizer.lr.1'"),
    ("my.yaml", "restarts: [{step: 3, 5: 6}]", "train ledger=my.yaml", "'restarts.0.5'"),
    ("my.yaml", "hydra: {sweeper: {params: {5: '0,1'}}}", "sweep my.yaml", "'hydra.sweeper.params.5'"),
    ("my.yaml", "hydra: {sweeper: {params: abc}}", "sweep my.yaml", "'abc'"),
    ("my.yaml", "hydra: abc", "sweep my.yaml", "hydra", "'abc'"),
    ("my.yaml", "optimizer: lion", "sweep my.yaml", "'override /optimizer: lion'"),
    ("my.yaml", "intervention: [5]", "sweep my.yaml", "intervention"),
    ("my.yaml", "intervention: null\ndefaults: [override /data: synthetic]", "sweep my.yaml", "intervention"),
    ("my.yaml", "defaults: abc", "sweep my.yaml", "defaults"),
    ("my.yaml", "steps: [1\n" + 999 * "x: [\n", "sweep my.yaml", "my.yaml"),
    ("my.yaml", "a: &a {b: *a}", "sweep my.yaml", "my.yaml", "10,000"),
    # in the place of a folder of results
    ("file", "in the way", "train out=file", "out=file"),
    ("file", "in the way", "coordcheck data=synthetic out=file/in/side", "out=file/in/side"),
    # documents
    ("a.txt", 9 * "text\0", "train data=text data.path=a.txt", "a.txt", "NUL"),
    ("a.jsonl", '{"text": "a"}\n{"text": ', "train data=jsonl data.path=a.jsonl", "a.jsonl, line 2"),
    ("a.jsonl", '{"text": "a"}\n["text"]', "train data=jsonl data.path=a.jsonl", "a.jsonl, line 2"),
    ("a.jsonl", '{"txt": "a", "id": 3}', "train data=jsonl data.path=a.jsonl", "line 1", "'text'", "nearest: txt"),
    ("a.jsonl", '{"text": null}', "train data=jsonl data.path=a.jsonl", "line 1", "'text'"),
    ("a.jsonl", "\n\n", "train data=jsonl data.path=a.jsonl", "data.path"),
    ("a.jsonl", '{"text": "abc"}', "train data=jsonl data.path=a.jsonl", "data.path"),
    ("a.parquet", "no parquet", "train data=parquet data.path=a.parquet", "a.parquet"),
    ("a.txt", "0123456789", "train data=text data.path=a.txt", "9 bytes"),
    ("a.txt", 640 * "x", "train data=text data.path=a.txt seq_len=64", "seq_len=64", "seq_len=63"),
    ("pictures/a.png", 999 * "x", "train data=text data.path=pictures", "pictures"),
    # baselines
    ("b.json", "{", "check --show b.json", "b.json"),
    ("b.json", '{"baseline_version": 99}', "check --show b.json", "version 99"),
    ("b.json", '{"baseline_version": 2, "curves": [3]}', "check --show b.json", "b.json"),
    # published orderings
    ("my.csv", "a,b\nrelu,\n", "leaderboard --transfer my.csv", "'outcome'"),
    ("my.csv", "a,b,outcome\nrelo,,a\n", "leaderboard --transfer my.csv", "'relo'", "nearest: relu"),
    ("my.csv", "a,b,outcome\nrelu,,A\n", "leaderboard --transfer my.csv", "'A'", "equal"),
    ("my.csv", "a,b,outcome,measure\nrelu,,a,abov\n", "leaderboard --transfer my.csv", "'abov'", "nearest: above"),
    ("my.csv", "a,b,outcome\npb_relax,,a\n", "leaderboard --transfer my.csv", "'pb_relax'"),
]


def refusal(capsys: pytest.CaptureFixture[str], words: str) -> str:
    """The line by which a command of these words is refused in an otherwise untouched folder."""
    command, *rest = shlex.split(words)
    asked = [command, *(RUN if command == "train" else []), *rest]
    before = sorted(Path().rglob("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lab", *asked])
        code = main(asked)
    out, error = capsys.readouterr()
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert sorted(Path().rglob("*")) == before
    return error


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("words", "named"), [(words, named) for words, *named in KEYS])
def test_keys_and_values(words: str, named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, words)
    assert [part for part in named if part not in line] == [], line


@pytest.mark.parametrize(("name", "content", "words", "named"), [(*row[:3], row[3:]) for row in FILES])
def test_files(name: str, content: str, words: str, named: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(content)
    line = refusal(capsys, words)
    assert len(line) < 500
    assert Path(name).read_text() == content
    assert [part for part in named if part not in line] == [], line


def table(**columns: Any) -> pd.DataFrame:
    """The runs of another trainer, a row each, with some of its columns changed."""
    rows = [
        {"lr": lr, "loss": 3.0 - size / 1e6, "n_params": size, "seed": seed, "clip": clip}
        for clip in ("off", "on")
        for size in (100_000, 400_000)
        for lr in (1e-3, 1e-2, 1e-1)
        for seed in range(2)
    ]
    return pd.DataFrame(rows).assign(**columns)


TABLES: list[tuple[pd.DataFrame, str, tuple[str, ...]]] = [
    (table(), "--lr learning_rat", ("--lr", "'learning_rat'")),
    (table(), "--arm clipp", ("--arm", "nearest: clip")),
    (table().drop(columns="n_params"), "", ("row 1", "row 7", "--keep")),
    (table().drop(columns="loss"), "", ("--loss",)),
    (table(lr=0.0), "", ("row 1", "learning rate")),
    (table(lr=math.inf), "", ("row 1", "learning rate")),
    (table(loss=["2.5", "low"] * 12), "", ("row 2", "'low'")),
    (table(loss=math.nan), "", ("row 1", "initial loss")),
    (table(loss=math.nan), "--initial-loss inf", ("--initial-loss", "'inf'")),
    (pd.concat([table(), table().tail(1)]), "", ("row 24", "row 25")),
    (table().head(0), "", ("rows",)),
    (table(seed=None), "", ("row 1", "seed")),
    (table(seed=0.5), "", ("row 1", "seed", "0.5")),
    (table(n_params=0.016), "", ("row 1", "size", "0.016")),
    (table(n_params=-1), "", ("row 1", "size", "-1")),
    (table(steps=-1), "", ("row 1", "steps", "-1")),
    (table(steps=[None, *[9] * 23]), "", ("row 1", "steps")),
]


@pytest.mark.parametrize(("frame", "options", "named"), TABLES)
def test_tables_of_runs(
    frame: pd.DataFrame, options: str, named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    frame.to_csv("runs.csv", index=False)
    line = refusal(capsys, f"import runs.csv out=out {options}")
    assert [part for part in named if part not in line] == [], line


# Of a folder that holds ``pilot``, runs of two seeds.
FOLDERS = [
    ("claims nowhere", "nowhere"),
    ("claims pilot --source GLM-130", "GLM-130B"),
    ("claims pilot --figure E.77", "E.7"),
    ("claims pilot --verdict reproduce", "reproduced"),
    ("claims --power qk_layernorm_lowers_sensitivity", "lab claims DIR --power CLAIM"),
    ("claims pilot --effect 1", "lab claims DIR --power CLAIM"),
    ("claims pilot --power qk_layernorm_lowers_sensitivit", "qk_layernorm_lowers_sensitivity"),
    ("claims pilot --power qk_layernorm_lowers_sensitivity", "2 whole seeds"),
    ("claims pilot --power qk_layernorm_lowers_sensitivity --effect nan", "--effect"),
    ("claims pilot --power large_kappa_costs", "lab sweep kappa"),
    ("report pilot --window 1e-4 1e-6", "LOW < HIGH"),
    ("report pilot --window nan 1", "LOW < HIGH"),
    ("report pilot --window low 1", "low"),
    ("report pilot --window 1e-3", "--window"),
    ("compare pilot pilot --window 2 3", "2 to 3"),
    ("check pilot --baseline pilot --window 1e-4 1e-4", "LOW < HIGH"),
    ("check pilot --save new.json --window 1e-4 inf", "LOW < HIGH"),
    ("report nowhere", "nowhere"),
    ("report pilot --format pfd", "pdf"),
    ("report pilot --format pdf --width wide", "--width"),
    ("report pilot --format png --width nan", "--width"),
    ("report pilot --format png --width 0.5", "--width"),
    ("report pilot --width 3", "--format"),
    ("report pilot --format", "--format"),
    ("report pilot --from pdf", "--from"),
    ("report pilot --window 1 0.1", "1 0.1"),
    ("export nowhere --to csv", "nowhere"),
    ("export pilot", "--to"),
    ("export pilot --to", "--to"),
    ("export pilot --too csv", "--to"),
    ("export pilot --to none", "csv"),
    ("export pilot --to tensorbord", "tensorboard"),
    ("export pilot --to trackio --out elsewhere", "TRACKIO_DIR"),
    ("leaderboard nowhere", "nowhere"),
    ("leaderboard pilot --window 10 20", "10 to 20"),
    ("leaderboard pilot --pairs --window 3e-3 3", "--window"),
    ("claims --jsno", "nearest: --json"),
    ("predict pilot", "noise_scale"),
    ("compare pilot", "lab compare A B"),
    ("compare", "lab compare A B"),
    ("compare pilot nowhere", "nowhere"),
    ("compare pilot pilot --within 0.1", "--within"),
    ("compare pilot pilot --html page.html", "--html"),
    ("compare pilot pilot --siblings", "--siblings"),
    ("compare none.csv --siblings --html page.html", "--html"),
    ("compare pilot/none pilot/none", "pilot has no run none"),
    ("compare nowhere.csv --within -1", "--within"),
    ("compare nowhere.csv --within none", "--within"),
    ("compare nowhere.csv --window 1 2", "--window"),
    ("status", "lab status DIR"),
    ("status nowhere", "nowhere"),
    ("check pilot", "--baseline"),
    ("check pilot pilot --baseline pilot", "--baseline"),
    ("check pilot --baselin pilot", "nearest: --baseline"),
    ("check pilot --baseline pilot --margin five", "--margin"),
    ("check pilot --baseline pilot --margin=-1%", "--margin"),
    ("check pilot --baseline pilot --margin nan", "--margin"),
    ("check pilot --baseline --json", "--baseline"),
    ("check pilot --baseline pilot --junit=", "--junit"),
    ("check pilot --baseline pilot --json=yes", "--json"),
    ("check pilot --save few.json", "2 whole seeds"),
    ("check --save few.json", "lab check DIR --save"),
    ("check pilot --show few.json", "lab check --show FILE"),
    ("check pilot --save few.json --margin 3%", "lab check DIR --save"),
    ("baseline save pilot few.json", "lab check DIR --save"),
    ("batch pilot", "lab predict"),
    ("transfer", "lab leaderboard --transfer"),
]


@pytest.fixture(scope="module")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("refusals")
    planted.write(home / "pilot", list(planted.cards(seeds=(0, 1))))
    return home


@pytest.mark.parametrize(("words", "named"), FOLDERS)
def test_requests_about_folders(
    words: str, named: str, pilot: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(pilot)
    line = refusal(capsys, words)
    assert named in line
