"""Custom models: a user's own module, written for one run and trained as a fleet."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.core import machine
from lab.core.errors import RequestError
from lab.core.hooks import HookIntervention, HookPoint, announce, attach, is_listening
from lab.core.own_failures import OwnCodeError, defined_at, own_failure
from lab.model.config import ModelConfig
from lab.model.parametrization import Factors
from lab.model.watched import BY_SHAPE, ModuleListener, Probed, Watched

Build = Callable[[], nn.Module]
CHECKED_ROWS = 2  # rows of the batch on which a module is checked
VARIES = "makes other logits of the same tokens the next time, as with dropout or a state it keeps"


def build_from_seed(make: Build, seed: int) -> nn.Module:
    """Build the module of one run, with torch's generator seeded by the run's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


@cache
def _takes_targets(forward: Callable[..., Any]) -> bool:
    return "targets" in inspect.signature(forward).parameters


def logits_of(module: nn.Module, weights: dict[str, Tensor], tokens_bt: Tensor) -> Any:
    """What a module with these weights makes of tokens ``[b t]``: logits ``[b t v]``, or what it returns otherwise.

    The logits may be the ``logits`` of an output, as in Hugging Face's models, or the first of several outputs. A
    module whose forward pass takes ``targets`` gets some, since nanoGPT's makes all logits only then.
    """
    targets = {"targets": tokens_bt} if _takes_targets(type(module).forward) else {}
    output = functional_call(module, weights, (tokens_bt,), targets)
    return getattr(output, "logits", output[0] if isinstance(output, tuple) else output)


class CustomModel(nn.Module):
    """Tokens ``[r b t]`` to logits ``[r b t v]``: a user's modules side by side, each from ``[b t]`` to ``[b t v]``.

    A module that ``torch.func.vmap`` cannot batch is called for one run after the other. The scores of its attention
    and the outputs of its blocks are announced, see ``ModuleListener``.

    Args:
        make: builds the module of one run.
        runs: size of the run axis.
        interventions: hook interventions by name; only the hook point ``logits`` exists.
        config: the shape of the model, for the interventions.
        operands: the precision of ``torch.autocast`` in the forward pass; the logits keep the precision of the weights.
        watched: the names of the modules that are probed; by default they are found by shape.

    Raises:
        RequestError: an intervention has weights, or no module has a name to be watched.
        OwnCodeError: in the forward pass: it makes no logits ``[b t v]``.
    """

    ends = ()  # which weights embed is unknown, so all are counted
    blocks = ()

    def __init__(
        self,
        make: Build,
        runs: int,
        interventions: Mapping[str, HookIntervention],
        config: ModelConfig,
        operands: torch.dtype | None = None,
        watched: Watched = BY_SHAPE,
    ) -> None:
        super().__init__()
        # an operation that vmap calls for one run after the other warns once a process, which the user cannot change
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        self.make, self.operands, self.one_by_one = make, operands, False
        self.inner = build_from_seed(make, 0)
        self.listener = ModuleListener(self.inner, watched)
        single = list(self.inner.parameters())  # kept alive, so that ids stay unique
        stacked = {id(weight): nn.Parameter(weight.new_empty(runs, *weight.shape)) for weight in single}
        for module in self.inner.modules():
            for name, weight in module._parameters.items():
                if weight is not None:  # tied weights stay tied
                    module._parameters[name] = stacked[id(weight)]
        self.at_logits = HookPoint("logits", "")
        attach(self, interventions, runs, config)
        if next(self.at_logits.parameters(), None) is not None:
            raise RequestError("an intervention on a custom model may not bring weights of its own")

    def forward(self, tokens_rbt: Tensor) -> tuple[Tensor, None]:
        """Return logits ``[r b t v]``, and None because a module does not return its hidden states."""
        weights, enabled = self.weights(), self.operands is not None
        # attention without fused kernels, which vmap would call once per run
        rounded = torch.autocast(tokens_rbt.device.type, self.operands, enabled, cache_enabled=False)
        with rounded, sdpa_kernel(SDPBackend.MATH):
            logits_rbtv, probed = self._of_all_runs(weights, tokens_rbt)
        for place, scores_rbhts in probed.scores.items():
            announce("scores", place, scores_rbhts)
        for place, block_rbtd in probed.blocks.items():
            announce("block_output", place, block_rbtd)
        changed_rbtv: Tensor = self.at_logits(logits_rbtv.to(next(iter(weights.values())).dtype))
        return changed_rbtv, None

    def _of_all_runs(self, weights: dict[str, Tensor], tokens_rbt: Tensor) -> tuple[Tensor, Probed]:
        if not self.one_by_one:
            try:
                outputs: tuple[Tensor, Probed] = vmap(self._of_one_run, randomness="error")(weights, tokens_rbt)
            except Exception as fault:
                if "random" in str(fault) or machine.is_out_of_memory(fault):
                    raise
                self.one_by_one = True
            else:
                return outputs
        of_runs = [
            self._of_one_run({name: weight[run] for name, weight in weights.items()}, tokens_bt)
            for run, tokens_bt in enumerate(tokens_rbt)
        ]
        logits_rbtv = torch.stack([logits_btv for logits_btv, _ in of_runs])
        scores, blocks = (
            {place: torch.stack([probed[part][place] for _, probed in of_runs]) for place in of_runs[0][1][part]}
            for part in range(2)
        )
        return logits_rbtv, Probed(scores, blocks)

    def _of_one_run(self, weights: dict[str, Tensor], tokens_bt: Tensor) -> tuple[Tensor, Probed]:
        """Logits ``[b t v]``, and what was probed on the way if anybody listens."""

        def run() -> Tensor:
            logits_btv = logits_of(self.inner, weights, tokens_bt)
            if _shape(logits_btv)[:-1] != tuple(tokens_bt.shape):
                inner, shape = type(self.inner), tuple(tokens_bt.shape)
                raise OwnCodeError(f"{inner.__name__} makes {_shape(logits_btv)} of tokens {shape}{defined_at(inner)}")
            made: Tensor = logits_btv
            return made

        return self.listener.listen(run, tokens_bt.shape) if is_listening() else (run(), Probed({}, {}))

    def weights(self) -> dict[str, Tensor]:
        """Return every weight ``[r ...]`` by its name in the user's module."""
        return dict(self.inner.named_parameters())

    def roles(self) -> dict[str, str]:
        """Return no roles, which are unknown."""
        return {}

    def factors(self, parametrization: Any, width: int, role_lr: Any = None) -> dict[str, Factors]:
        """Return factors with LR multiplier 1 and no initial scale: the module draws its own initial values."""
        return dict.fromkeys(self.weights(), Factors(init_std=math.nan))

    @torch.no_grad()
    def initialize(self, seeds: Sequence[int], factors: Mapping[str, Factors]) -> None:
        """Give run i the weights of a module built from seed i alone."""
        weights = self.weights()
        for run, seed in enumerate(seeds):
            for name, value in build_from_seed(self.make, seed).named_parameters():
                weights[name][run].copy_(value)


def check_custom_model(
    name: str, make: Build, vocabulary: int, seq_len: int, watched: Watched = BY_SHAPE, own: Any = None
) -> None:
    """Refuse a module that is not a causal language model, or cannot be trained in a fleet.

    Args:
        name: name of the custom model, for the message.
        make: builds the module of one run.
        vocabulary: number of tokens.
        seq_len: tokens per window.
        watched: as for ``CustomModel``.
        own: the user's class or function, by default ``make``; the message names the line of its file that failed.

    Raises:
        RequestError: the module fails a check or raised an exception; the message names it.
    """
    with torch.random.fork_rng(devices=[]):
        tokens_bt = torch.randint(vocabulary, (CHECKED_ROWS, seq_len), generator=torch.Generator().manual_seed(0))
        try:
            if problem := _check_single_run(make, tokens_bt, vocabulary) or _check_fleet(make, tokens_bt, watched):
                problem += defined_at(own or make)
        except RequestError as refusal:
            problem = str(refusal)
        except (Exception, SystemExit) as fault:
            problem = VARIES if "random operation" in str(fault) else f"fails{own_failure(fault, own or make)}"
    if problem:
        raise OwnCodeError(f"custom model {name} {problem}")


def _check_single_run(make: Build, tokens_bt: Tensor, vocabulary: int) -> str | None:
    """Return why a single model cannot be trained, as the rest of a sentence; None if it can."""
    model = build_from_seed(make, 0)
    if not isinstance(model, nn.Module):
        return f"builds {type(model).__name__}, not a torch.nn.Module"
    weights = dict(model.named_parameters())
    if not weights:
        return "has no parameters"
    if frozen := [name for name, weight in weights.items() if not weight.requires_grad]:
        return f"has a parameter that is not trained: make {frozen[0]} a buffer"
    if half := [name for name, weight in weights.items() if weight.dtype in (torch.float16, torch.bfloat16)]:
        return f"has {half[0]} in {weights[half[0]].dtype}: keep weights in float32, since precision= rounds products"
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if name := _first_difference(before, dict(build_from_seed(make, 1).named_buffers())):
        return f"has a buffer that depends on the seed: make {name} a parameter"
    logits_btv = logits_of(model, {}, tokens_bt)
    expected = (*tokens_bt.shape, vocabulary)
    if _shape(logits_btv) != expected:
        return f"makes {_shape(logits_btv)} of tokens [b t]; logits [b t v] would be {expected}"
    if logits_btv.isnan().any():
        return "makes logits that are NaN"
    if changed := _first_difference(before, dict(model.named_buffers())):
        return f"changes a buffer in its forward pass, as batch normalization does: {changed}"
    gradients = torch.autograd.grad(logits_btv.sum(), list(weights.values()), allow_unused=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is None:
            return f"makes its logits without the parameter {weight}"
    if not torch.equal(logits_of(model, {}, tokens_bt), logits_btv):
        return VARIES
    other_bt = tokens_bt.clone()
    other_bt[:, -1] = (other_bt[:, -1] + 1) % vocabulary
    if not torch.allclose(
        logits_of(model, {}, other_bt)[:, :-1], logits_btv[:, :-1], rtol=1e-4, atol=1e-4, equal_nan=True
    ):
        return "looks at tokens that come later"
    return None


def _check_fleet(make: Build, tokens_bt: Tensor, watched: Watched) -> str | None:
    """Return why two models cannot be trained side by side, as the rest of a sentence; None if they can."""
    pair = CustomModel(make, 2, {}, ModelConfig("", 2, 0, 2), watched=watched)
    pair.initialize((0, 1), {})
    logits_rbtv, _ = pair(tokens_bt.expand(2, -1, -1))
    torch.autograd.grad(logits_rbtv.sum(), list(pair.weights().values()))
    for logits_btv, seed in zip(logits_rbtv, (0, 1), strict=True):
        alone_btv = logits_of(build_from_seed(make, seed), {}, tokens_bt)
        if not torch.allclose(logits_btv, alone_btv, rtol=1e-4, atol=1e-4, equal_nan=True):
            return "computes something else side by side than alone, or is not decided by torch's seed"
    return None


def _shape(logits: Any) -> Any:
    """The shape of a tensor; of anything else the name of its type."""
    return tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__


def _first_difference(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str | None:
    """Return the first name under which two dicts of tensors differ, or None."""
    return next((name for name in first if not torch.equal(first[name], other[name])), None)


@torch.no_grad()
def probed_modules_of(make: Build, vocabulary: int, seq_len: int, watched: Watched) -> Watched:
    """The names of the modules in which scores of attention and outputs of blocks are probed; empty without any."""
    module = build_from_seed(make, 0)
    listener, tokens_bt = ModuleListener(module, watched), torch.zeros(CHECKED_ROWS, seq_len, dtype=torch.long)
    _, probed = listener.listen(lambda: logits_of(module, {}, tokens_bt), tokens_bt.shape)
    names = {id(part): name for name, part in module.named_modules()}
    return Watched(
        ", ".join(names[id(listener.attending[place])] or "the whole model" for place in probed.scores),
        ", ".join(names[id(listener.blocks[place])] for place in probed.blocks),
    )
