"""The trees of many points are those that Hydra composes one by one, to the type of a value and the order of keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import hydra
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from composing import points_of, remember
from lab.core import shipped
from lab.core.errors import RequestError
from lab.sweeping.compose import Composer, Word, check_keys, expand, parse
from lab.sweeping.launch import hydra_configs
from sampling import few

SWEEPS = shipped.sweeps()


@pytest.fixture(scope="module", autouse=True)
def remembered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        remember(patch)
        with hydra_configs():
            yield


def by_hydra(point: Sequence[Word], *settings: str) -> str:
    """The tree of one point as Hydra composes it, as text; else ``refused``."""
    try:
        composed = hydra.compose("config", [*settings, *(word.text for word in point)])
        given: Any = OmegaConf.to_container(composed)
        tree: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        check_keys(tree)
        del tree["fleet"]
        if tree.get("tokens") is not None and given["steps"] == "${scale.steps}":
            tree["steps"] = None
        return json.dumps(tree)
    except Exception:
        return "refused"


def by_lab(composer: Composer, point: Sequence[Word]) -> str:
    try:
        return json.dumps(composer.tree(point))
    except RequestError:
        return "refused"


@pytest.mark.parametrize("name", few(SWEEPS, 2))
def test_points_of_a_sweep_are_those_of_hydra(name: str) -> None:
    composer, points = points_of(name, "cpu")
    picked = [points[0], points[len(points) // 2], points[-1]]
    assert [by_lab(composer, point) for point in picked] == [by_hydra(point) for point in picked]
    assert len({by_lab(composer, point) for point in points[-3:]}) == 3


# Words that sweep a key, or set it for all points; expressions, lists, deletions and additions among them.
WORDS = str.split("""
seed=0,1,2 seed=7,8 steps=10,20 optimizer.lr=1e-3,1,'0.1' schedule.warmup=0,0.5 model.width=16,32 batch_size=4,8.0
precision=fp32,bf16 data.seed=5,${seed} data.seed=${steps} optimizer.weight_decay=0,'${divide:1,${steps}}'
seq_len=${seed} seq_len='${divide:${seed},0.5}' optimizer.eps=${optimizer.lr} optimizer.beta1=${.beta2}
optimizer.beta2=${optimizer.beta1},0.5 checkpoint.steps=1,2 checkpoint={steps:1} checkpoint={keep:3},{steps:1}
checkpoint.keep=null,2 probes.names=[val_loss],[] probes.every=5,true +intervention.z_loss.coefficient=1,2
++model.depth=1,3 ~optimizer.clip optimizer.clip=inf,nan out=a,??? scale.steps=8,9 scale.batch_size=2,4
optimizer=adamw,adamw_coupled model=d32,d64 intervention=[],[z_loss] arm=coupled_decay scale=toy,cpu
tracker.name=none,a\\\\b +extra=${oc.select:seed},2 +other='${${which}}' +which=seed,steps no.such.key=1,2
engine=${out},eager +which=width,depth batch_size='${model.${which}}' seed='${whole_quotient:${steps},2}'
""")


@example(["out=a,???"], 0)  # a text that Hydra refuses, after one of the same kind that it takes
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=5), st.integers(0, 1000))
def test_points_are_those_of_hydra_whatever_is_swept(words: list[str], skip: int) -> None:
    composer, points = Composer(), expand(parse(words))
    for point in (points[skip % len(points) :] + points)[:3]:
        assert by_lab(composer, point) == by_hydra(point)


@pytest.mark.parametrize(
    "words",
    [
        ["seed=1,2", "seq_len='${divide:${seed},0.5}'"],
        ["steps=10,20", "optimizer.weight_decay='${divide:1,${steps}}'", "optimizer.eps=${optimizer.weight_decay}"],
        ["optimizer.lr=1,2", "+copy=${optimizer}"],
        ["+which=two,ten", "+of={two:2,ten:10}", "steps='${of.${which}}'"],
    ],
)
def test_a_value_that_others_are_made_of_reaches_them(words: list[str]) -> None:
    composer, points = Composer(), expand(parse(words))
    expected = [by_hydra(point) for point in points]
    assert "refused" not in expected
    assert [by_lab(composer, point) for point in points] == expected


def test_values_alone_cost_no_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["seed=range(50)", "optimizer.lr=1,2", "steps=10,20", "batch_size='${model.${which}}'", "+which=depth"]
    composer, copies = Composer(), []
    monkeypatch.setattr("lab.sweeping.compose.deepcopy", lambda config: (copies.append(1), deepcopy(config))[1])
    trees = [composer.tree(point) for point in expand(parse(words))]
    assert len(copies) == 1
    assert {(tree["seed"], tree["data"]["seed"], tree["optimizer"]["lr"], tree["steps"]) for tree in trees} == {
        (seed, seed, lr, steps) for seed in range(50) for lr in (1, 2) for steps in (10, 20)
    }


FILES = {
    "optimizer/mine": "defaults: [adamw]\nlr: 0.5\nown: {a: 1}",
    "optimizer/under": "defaults: [_self_, mine]\nlr: 0.7\nchain: [sgd]\nown: ???",
    "model/deep/tall": "name: tall\ndepth: 9",
    "own/twice": "# @package _global_\nbatch_size: 32\nown: {b: 2}",
    "own/plain": "defaults: [{/model: d32}]\nc: 3",
    "data/placed": "# @package data.inner\nx: ${seed}",
    "arm/mine": "# @package _global_\ndefaults: [{/own: twice}, {override /optimizer: mine}, "
    "{override /intervention: [relu]}]\noptimizer: {lr: 2, clip: null}",
    "arm/late": "# @package _global_\ndefaults: [{override /scale: toy}]",
    "response/itself": "defaults: [itself]",
    "burst/empty": "",
    "probes/few": "# Few.\n\n# @package _global_\nevery: 7",
    "schedule/nothing": "defaults: [{/own: null}, cosine]\nwarmup: 1",
}
CHOICES = str.split("""
optimizer=mine optimizer=under optimizer=sgd optimizer=[mine] optimizer=[sgd,mine] optimizer=absent ~optimizer
~optimizer=adamw ~optimizer=sgd ~own model=deep/tall model=d32 +model=d32 own=twice +own=twice +own=plain +own=[twice]
data=placed arm=mine arm=late arm=lower_lr arm=with_z_loss arm=opt_1 response=itself bad_batches=empty probes=few
schedule=nothing schedule=wsd intervention=relu intervention=[] intervention=[relu,z_loss] intervention=[absent]
+intervention=[relu] +intervention=relu +restarts=sgd
scale=toy restarts=sgd ~restarts recipe=none batch=palm ++batch=palm model@x=d32 tracker=none
optimizer.lr=1 +own.d=4 seed=5 +intervention.z_loss={}
""")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of configs whose files choose others."""
    made = tmp_path_factory.mktemp("configs")
    for name, text in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / f"{name}.yaml").write_text(text)
    return made


@pytest.mark.parametrize("word", few(CHOICES, 6))
def test_a_choice_of_files_is_that_of_hydra(word: str, folder: Path) -> None:
    point = parse([word], folder)
    assert by_lab(Composer(folder), point) == by_hydra(point, f"hydra.searchpath=[file://{folder}]")


@given(
    st.lists(st.sampled_from(CHOICES), min_size=2, max_size=5, unique_by=lambda word: word.split("=")[0].strip("+~"))
)
def test_choices_of_files_are_those_of_hydra(folder: Path, words: list[str]) -> None:
    point = parse(words, folder)
    assert by_lab(Composer(folder), point) == by_hydra(point, f"hydra.searchpath=[file://{folder}]")


def test_a_key_that_is_swept_over_nothing_is_refused() -> None:
    """``glob(*)`` of a key without files matches nothing, and so asks for no point."""
    with pytest.raises(RequestError, match=r"^schedule\.over is swept over nothing$"):
        expand(parse(["seed=1,2", "+schedule.over=glob(*)"]))


def test_a_word_may_set_a_key_that_an_earlier_one_adds() -> None:
    (point,) = expand(parse(["+intervention.mine.strength=1", "intervention.mine.strength=2", "seed=1", "seed=3"]))
    tree = Composer().tree(point)
    assert tree["intervention"]["mine"] == {"strength": 2}
    assert tree["seed"] == 3
