"""A user's own module trains as a fleet: as it would alone, in any company, and refused in one line where it cannot."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from cap import Cap, HiddenQuartic
from lab import Fleet, PerRun, RunConfig, run_config
from lab.analysis.curves import name_arms
from lab.core.errors import RequestError
from lab.core.registry import INTERVENTIONS, MODELS
from lab.model.custom import check_custom_model
from lab.training.building import check_own_code
from lab.training.identity import columns, run_id, static_key
from sampling import few
from small import configs, trained, tree
from test_checkpoint import go_on
from test_engine import compiles

LENGTH = 64


class Mlp(nn.Module):
    """The last two tokens through linear layers."""

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.first = nn.Linear(2 * width, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.first(torch.cat([F.pad(x, (0, 0, 1, 0))[:, :-1], x], dim=-1)).relu()
        for layer in self.hidden:
            x = x + layer(x).relu()
        return self.head(x)


class Plain(nn.Module):
    """A Transformer of torch's own layers, its mask a buffer, its head tied to its embedding."""

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.triu(torch.full((LENGTH, LENGTH), -math.inf), 1))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.position[:length]
        for layer in self.layers:
            x = layer(x, src_mask=self.mask[:length, :length].to(x.dtype))
        return self.head(x)


class Convolved(nn.Module):
    """The last three tokens by a convolution."""

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.convolution = nn.Conv1d(width, width, 3)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.pad(self.embedding(tokens).transpose(1, 2), (2, 0))
        return self.head(F.gelu(self.convolution(x)).transpose(1, 2))


@dataclass(frozen=True)
class Own:
    """A module of the test's choice."""

    kind: str
    module: ClassVar = {"mlp": Mlp, "plain": Plain, "convolved": Convolved}

    def build(self, shape: Any, vocabulary: int) -> nn.Module:
        return self.module[self.kind](shape.width, shape.depth, vocabulary)


@dataclass(frozen=True)
class LogitCap(Cap):
    """Squash logits."""

    hook_points: ClassVar = ("logits",)


@pytest.fixture(autouse=True)
def _entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS._entries, "own", Own)
    monkeypatch.setitem(INTERVENTIONS._entries, "logit_cap", LogitCap)


MLP = ("+custom_model.own.kind=mlp", "intervention=[z_loss]")
PLAIN = ("+custom_model.own.kind=plain", "intervention=[z_loss]")
PER_RUN = [
    f"optimizer.lr={lr} seed={seed} schedule.warmup={warmup} optimizer.eps={eps}"
    for lr, seed, warmup, eps in ((1e-3, 0, 0.1, 1e-8), (1e-1, 0, 2, 1e-8), (3e-2, 1, 0, 1e-6), (1e4, 2, 0.1, 1e-8))
]
ODD = ("model.width=18", "model.head_width=6", "seq_len=21", "batch_size=3")


@pytest.mark.parametrize("shared", few([(*MLP, *ODD), (*PLAIN, "model.width=32")], 1), ids=" ".join)
def test_a_custom_model_has_the_same_bits_in_any_company(shared: tuple[str, ...]) -> None:
    wanted = configs(*PER_RUN, shared=(*shared, "steps=6"))
    together = trained(wanted)
    alone = [trained([config])[0] for config in wanted]
    backwards = trained(wanted[::-1])[::-1]
    assert repr(together) == repr(alone) == repr(backwards)
    assert len({repr(rows) for _, rows in together}) == len(wanted)  # the twin that must differ


def test_a_convolution_agrees_to_rounding_in_company() -> None:
    """A convolution of several runs is one of groups; a few steps, since training makes more of a difference."""
    wanted = configs(*PER_RUN[:3], shared=("+custom_model.own.kind=convolved", "intervention=[]", "steps=3"))
    for (outcome, rows), config in zip(trained(wanted), wanted, strict=True):
        [(alone, alone_rows)] = trained([config])
        assert outcome["final_val_loss"] == pytest.approx(alone["final_val_loss"], rel=1e-5)
        assert [row[3] for row in rows] == pytest.approx([row[3] for row in alone_rows], rel=1e-3)


@pytest.mark.slow
def test_a_broken_run_leaves_its_neighbours_alone() -> None:
    calm, wild = "optimizer.lr=1e-2", "optimizer.lr=1e30 optimizer.clip=inf schedule.warmup=0 seed=1"
    together = trained(configs(calm, wild, f"{calm} seed=3", shared=PLAIN))
    assert together[1][0]["status"] == "diverged"
    assert together[1][0]["diverged_at"] is not None
    assert repr([together[0], together[2]]) == repr(trained(configs(calm, f"{calm} seed=3", shared=PLAIN)))


def plainly(config: RunConfig, steps: int, fleet: Fleet) -> dict[str, Tensor]:
    """What an ordinary loop makes of one model, with torch's own optimizer."""
    torch.manual_seed(config.seed)
    (entry,) = config.custom_model.values()
    model = entry.build(config.model, 256).double()
    numbers = {key: getattr(link, key) for link in config.optimizer.links.values() for key in vars(link)}
    betas, decay = (numbers["beta1"], numbers["beta2"]), numbers["weight_decay"]
    optimizer = torch.optim.AdamW(model.parameters(), config.optimizer.lr, betas, numbers["eps"], decay)
    for step in range(steps):
        tokens = torch.from_numpy(fleet.corpus.batch(config.data.entry.seed, step, config.batch_size, config.seq_len))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("kind", ["mlp", "plain"])
def test_a_fleet_makes_of_a_model_what_a_plain_loop_makes(kind: str) -> None:
    shared = (
        *(f"+custom_model.own.kind={kind}", "intervention=[]", "optimizer=adamw_coupled", "optimizer.clip=inf"),
        *("schedule=constant", "schedule.warmup=0", "model.depth=1", "probes=none", "steps=10"),
    )
    rates = ("optimizer.lr=1e-3 seed=0", "optimizer.lr=1e-2 seed=1 optimizer.weight_decay=0.3")
    wanted = configs(*rates, shared=shared)
    fleet = Fleet(wanted, torch.float64)
    before = {name: weight.clone() for name, weight in fleet.state.weights.items()}
    for step in range(10):
        fleet.step(step)
    for run, config in enumerate(wanted):
        plain = plainly(config, 10, fleet)
        assert list(plain) == list(fleet.state.weights)
        for name, weight in plain.items():
            torch.testing.assert_close(fleet.state.weights[name][run], weight, rtol=0, atol=1e-10)
            assert not torch.equal(before[name][run], weight)


def test_runs_start_where_their_seed_alone_says() -> None:
    fleet = Fleet(configs("seed=1", "seed=2", "seed=1 optimizer.lr=1", shared=MLP))
    state = torch.get_rng_state()
    again = Fleet(configs("seed=2", shared=MLP))
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in fleet.state.weights.items():
        assert torch.equal(weight[0], weight[2])
        assert torch.equal(weight[1], again.state.weights[name][0])
        assert not torch.equal(weight[0], weight[1])


@pytest.mark.slow
def test_a_custom_model_cut_off_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    wanted = configs(*PER_RUN[1:], shared=(*PLAIN, "probes.every=3"))
    whole, *_ = go_on(tmp_path / "alone", wanted)
    go_on(tmp_path, wanted, cut_after=10)
    resumed, steps, notes = go_on(tmp_path, wanted)
    assert (steps, notes) == ([8, 9, 10, 11], [])
    assert repr(resumed) == repr(whole)


def test_probes_meet_a_custom_model_by_its_own_names() -> None:
    shared = (*MLP, "probes.every=1", "model.depth=1")
    wanted = configs("+intervention.logit_cap.cap=0.01", "+intervention.logit_cap.cap=50", shared=shared)
    together = trained(wanted)
    assert repr(together) == repr([trained([config])[0] for config in wanted])
    assert together[0][0]["loss_at_init"] == pytest.approx(math.log(256), abs=0.01) != together[1][0]["loss_at_init"]
    heard = {(probe, where) for _, probe, where, _ in together[0][1]}
    names = {"embedding.weight", "first.weight", "first.bias", "hidden.0.weight", "hidden.0.bias", "head.weight"}
    for probe in ("grad_rms", "update_rms", "param_rms", "eps_ratio"):
        assert {where for of, where in heard if of == probe} == names
    assert {("output_logit_rms", ""), ("log_z", ""), ("grad_norm", "")} <= heard
    assert not {"attention_logit_max", "block_rms"} & {probe for probe, _ in heard}


def test_listening_changes_no_bits_and_all_parameters_count() -> None:
    heard, deaf = (trained(configs(*PER_RUN[:2], shared=(*MLP, f"probes={name}"))) for name in ("all", "none"))
    assert repr([result for result, _ in heard]) == repr([result for result, _ in deaf])
    counts = {result[key] for result, _ in heard for key in ("parameters", "parameters_without_embeddings")}
    assert counts == {sum(weight.numel() for weight in Mlp(16, 2, 256).parameters())}


@pytest.mark.slow
def test_bf16_is_autocast_of_the_forward_pass() -> None:
    full, half = (Fleet(configs("", shared=(*MLP, f"precision={name}"))) for name in ("fp32", "bf16"))
    tokens_rbt = full.feed.loader.batch(0)[..., :-1]
    logits, rounded = full.model(tokens_rbt)[0], half.model(tokens_rbt)[0]
    assert rounded.dtype == torch.float32
    assert {weight.dtype for weight in half.state.weights.values()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        alone = functional_call(half.model.inner, {name: w[0] for name, w in half.state.weights.items()}, tokens_rbt[0])
    assert alone.dtype == torch.bfloat16
    torch.testing.assert_close(rounded[0], alone.float(), rtol=0, atol=2e-2)
    assert not torch.allclose(rounded, logits, rtol=1e-4)
    torch.testing.assert_close(rounded, logits, rtol=0, atol=0.2)
    wanted = configs(*PER_RUN[:2], shared=(*PLAIN, "precision=bf16"))
    assert repr(trained(wanted)) == repr([trained([config])[0] for config in wanted])


@pytest.mark.slow
@compiles
@pytest.mark.parametrize(("shared", "traced"), [(PLAIN, True), (MLP, False)])
def test_a_compiled_custom_model_is_an_eager_one(
    shared: tuple[str, ...], traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is traced whole; what is made of the graph afterwards is the compiler's, and takes it long."""
    if traced:
        monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    probed = ("probes.every=1", "probes.names=[train_loss,output_logit_rms]")
    wanted = configs(*PER_RUN[:2], shared=(*shared, "model.depth=1", "optimizer.beta2=0.99", *probed))
    eager, compiled = (trained([replace(config, engine=name) for config in wanted]) for name in ("eager", "compiled"))
    for (_, rows), (_, fast) in zip(eager, compiled, strict=True):
        assert [row[:3] for row in rows] == [row[:3] for row in fast]
        assert [row[3] for row in fast] == pytest.approx([row[3] for row in rows], rel=1e-4)


def test_without_a_custom_model_a_run_is_the_run_it_was() -> None:
    plain, other = configs("", "intervention=[] optimizer=adamw_coupled seed=3", shared=("validation=whole",))
    assert [run_id(config, "0" * 16) for config in (plain, other)] == ["88e7f7c7f6e2d1c0", "e67f1874ef80e0be"]
    assert [static_key(config) for config in (plain, other)] == ["750c312ac2c0b772", "3b7238320e756929"]
    assert not [key for key in columns(plain) if "custom_model" in key]


def test_a_custom_model_is_part_of_id_columns_and_shape() -> None:
    without, mlp, plain = configs("intervention=[z_loss]", " ".join(MLP), " ".join(PLAIN))
    assert columns(mlp) == columns(without) | {"custom_model": "own", "custom_model.own.kind": "mlp"}
    assert len({run_id(config, "") for config in (without, mlp, plain)}) == 3
    assert len({static_key(config) for config in (without, mlp, plain)}) == 3


def test_an_arm_is_called_by_its_custom_model() -> None:
    none = {"intervention": "none", "custom_model": None, "custom_model.own.kind": None}
    one = {"custom_model": "own", "custom_model.own.kind": "mlp"}
    assert [arm.label for arm in name_arms([none, none | one], [1, 1])] == ["no custom model", "custom model own"]
    two = none | one | {"custom_model.own.kind": "plain"}
    assert [arm.label for arm in name_arms([none | one, two], [1, 1])] == ["kind mlp", "kind plain"]


@dataclass(frozen=True)
class Free(Own):
    """A number per run in a custom model."""

    rate: PerRun = 1.0


# What is asked of a custom model besides its kind, and what the refusal names.
REFUSED = [
    (("intervention=[qk_layernorm,z_loss]",), "qk_layernorm"),
    (("parametrization=mup_simple",), "parametrization=mup_simple"),
    (("+custom_model.free={kind: mlp}", "~custom_model.own"), "custom_model.free.rate"),
    (("+intervention.hidden.coefficient=1",), "hidden_rbtd"),
    (("optimizer=muon",), "'muon'"),
    (("optimizer=adamw_head_lr",), "optimizer.head"),
]


@pytest.mark.parametrize(("overrides", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_custom_model_cannot_have_is_refused(
    overrides: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS._entries, "free", Free)
    monkeypatch.setitem(INTERVENTIONS._entries, "hidden", HiddenQuartic)
    with pytest.raises(RequestError, match=re.escape(named)):
        run_config(tree(*MLP, *overrides))


class Odd(nn.Module):
    """A module with one thing amiss."""

    def __init__(self, amiss: str) -> None:
        super().__init__()
        self.amiss, self.state = amiss, 0.0
        self.embedding, self.head = nn.Embedding(7, 8, sparse=amiss == "sparse"), nn.Linear(8, 7)
        if amiss == "unused":
            self.idle = nn.Linear(8, 8)
        if amiss == "frozen":
            self.head.bias.requires_grad_(False)
        if amiss == "seeded buffer":
            self.register_buffer("noise", torch.randn(8))
        if amiss == "batch norm":
            self.norm = nn.BatchNorm1d(8)
        if amiss == "numpy":
            self.head.bias.data.fill_(next(COUNT))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.amiss == "dropout":
            x = F.dropout(x, 0.5)
        if self.amiss == "state":
            self.state = self.state + 1
            x = x + self.state
        if self.amiss == "batch norm":
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.amiss == "future":
            x = x + x.mean(1, keepdim=True)
        if self.amiss == "branch" and x[:, 0].sum() > 0:
            x = x + 1
        if self.amiss == "breaks":
            raise KeyError("no such\nthing")
        if self.amiss == "nan":
            x = x * math.nan
        logits = self.head(x)
        return {"tuple": (logits, x), "text": "logits", "last": logits[:, -1]}.get(self.amiss, logits)  # type: ignore[return-value]


COUNT: Iterator[int] = iter(range(1000))
AMISS = {
    "unused": "idle.weight",
    "frozen": "head.bias",
    "seeded buffer": "noise",
    "batch norm": "norm.running_mean",
    "dropout": "dropout",
    "state": "the next time",
    "future": "later",
    "breaks": "KeyError",
    "sparse": "sparse",
    "nan": "logits that are NaN",
    "text": "str",
    "last": "(2, 7)",
    "numpy": "seed",
}


@pytest.mark.parametrize("amiss", AMISS)
def test_a_module_that_cannot_be_trained_so_is_refused_in_one_line(amiss: str) -> None:
    with pytest.raises(RequestError) as refusal:
        check_custom_model("odd", partial(Odd, amiss), 7, 5)
    assert "odd" in str(refusal.value)
    assert AMISS[amiss] in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "make", [*(partial(Odd, kind) for kind in ("", "branch", "tuple")), partial(Mlp, 8, 1, 7), partial(Plain, 8, 1, 7)]
)
def test_a_module_with_nothing_amiss_passes(make: Callable[[], nn.Module]) -> None:
    state = torch.get_rng_state()
    check_custom_model("fine", make, 7, 5)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_request_is_rehearsed_at_its_own_length() -> None:
    check_own_code(configs("", shared=(*PLAIN, f"seq_len={LENGTH}"))[0])
    with pytest.raises(
        RequestError, match=r"custom model own fails at .*test_custom_models.py:\d+: RuntimeError: The size"
    ):
        check_own_code(configs("", shared=(*PLAIN, f"seq_len={LENGTH + 1}"))[0])
