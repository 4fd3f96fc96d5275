"""Whatever is typed, the answer is a run or one line."""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

from lab.__main__ import main
from lab.cli import compose, launch
from lab.sweeping.planner import points

GROUPS = {
    "model": ["d32", "d64", "d65"],
    "data": ["stdlib", "synthetic", "text", "jsonl", "huggingface"],
    "optimizer": ["adamw", "adamw_coupled", "adamw_rms_scaled", "sgd", "palm", "adamw_clip_relative"],
    "schedule": ["cosine", "constant", "wsd", "rsqrt", "linear"],
    "parametrization": ["mup_simple", "mup_full", "standard"],
    "probes": ["none", "all"],
    "intervention": ["[]", "[z_loss]", "[qk_layernorm,z_loss]", "[z_loss,z_loss]", "none", "kappa_transplant"],
    "tracker": ["none", "wandb"],
    "scale": ["cpu", "toy", "paper", "null"],
    "arm": ["coupled_decay", "null"],
    "sweeps": ["null", "smoke", "requested", "[a,b]"],
    "hydra/launcher": ["basic", "local", "joblib", "null", "[]", "???"],
    "hydra/sweeper": ["basic", "fleet"],
    "hydra/job_logging": ["default"],
}


def split(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


# Of Hydra's own, keys that are nowhere, and no keys at all.
KEYS = split("""
hydra hydra.mode hydra.job.chdir hydra.searchpath hydra.callbacks.x._target_
hydra.sweeper hydra.sweeper.max_runs hydra.sweeper.params hydra.sweeper.params.seed hydra.sweeper._target_
hydra.launcher hydra.launcher._target_ hydra.launcher.processes hydra.launcher.devices
hydra.launcher.timeout_minutes hydra.launcher.x fleet shard _target_
data._target_ model._target_ foo a.b model. .x é optimizer.links defaults model@model model@hydra.callbacks
data@_global_ optimizer.lr@x seed: intervention.z_loss.coefficient data.path data.tokenizer data.vocabulary
data.tokens schedule.cooldown parametrization.base_width tracker.project
""")
NUMBERS = split("""
0 1 -1 2 3 16 2.5 1e-3 -0.0 1e400 1e-320 nan inf -inf 9223372036854775807 9223372036854775808 1_000 0x10 1e30
100000000000000000000
""")
WORDS = ["", "''", '"x"', *split("d32 adamw z_loss auto cpu fp32 none true false null ??? a,b 0,1 1,2,3 [z_loss]")]
ODD = split(r"""
[] {} [1,2] [[1]] {a:1} {a:{b:[1]}} {_target_:os.system} {_target_:builtins.print} ${seed} ${nothing} ${.} ${steps
${oc.env:HOME} ${oc.env:NOT_THERE} ${oc.decode:'[1'} ${oc.create:{a:1}} ${divide:1,0} ${divide:a} ${divide:1}
${hydra:job.name} range(1,3) range(1,1000000000000) range(0,1,0) choice(1,2) choice() interval(0,1) glob(*)
shuffle(1,2) sort(2,1) tag(a,1) int(a) float(x) str([1]) extend_list(1) [ ] { ( \ \' ü é=1 = == , ; ../.. /etc/passwd
../../tests <script> $(ls) `ls` %s {0} 'a,b' "it's" -- --x @ : ! # & *
""")
ODD += ["'\ud800'", "'\x1b[2J'", "'\u202e'", "a\tb", "'\n'", " "]
FLAGS = split("""
--help --cfg --cfg=job --cfg=x --info --package=model --resolve --multirun -m -c --config-dir --config-dir=nowhere
--config-dir=. -cd --config-path=/ --dry-run --dry-run=1 -x -- -
""")


@cache
def keys() -> list[str]:
    return compose.known_keys()


def override(chance: random.Random) -> str:
    """A likely or unlikely thing to type."""
    kind = chance.random()
    if kind < 0.15:
        group = chance.choice(list(GROUPS))
        return f"{chance.choice(['', '', '', '+', '~'])}{group}={chance.choice([*GROUPS[group], chance.choice(ODD)])}"
    if kind < 0.19:
        return chance.choice(FLAGS)
    key = chance.choice(KEYS if kind < 0.45 else keys())
    if chance.random() < 0.1:
        place = chance.randrange(len(key) + 1)
        key = key[:place] + chance.choice("abz_.@/ é") + key[place:]
    before, between = chance.choice([""] * 6 + ["+", "++", "~"]), chance.choice(["="] * 8 + ["", "=="])
    return f"{before}{key}{between}{chance.choice(chance.choice([NUMBERS, NUMBERS, NUMBERS, WORDS, ODD]))}"


@pytest.mark.parametrize("count", [40, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_random_request_is_carried_out_or_refused_in_one_line(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def understood(composed: launch.Composed, _: object) -> NoReturn:
        raise SystemExit(0 if points(composed.trees) else 1)

    monkeypatch.setattr(launch, "plan", understood)
    chance, codes = random.Random(count), []
    for _ in range(count):
        start = chance.choice([["train", "-m"]] * 36 + [["train"]] * 3 + [["sweep", "smoke"], ["sweep"]])
        words = [*start, "data=synthetic", *(override(chance) for _ in range(chance.choice([1, 1, 1, 2])))]
        monkeypatch.setattr(sys, "argv", ["lab", *words])
        codes.append(main(words))
        said = capsys.readouterr().err
        assert codes[-1] in (0, 2), f"{words}\n{said}"
        assert said.count("\n") == (codes[-1] == 2), f"{words}\n{said}"
        assert said.replace("\n", "").isprintable(), f"{words}\n{said!r}"
    assert {0, 2} == set(codes)
    assert codes.count(0) > count / 10, "most was refused before it was understood"
    assert list(tmp_path.iterdir()) == []
