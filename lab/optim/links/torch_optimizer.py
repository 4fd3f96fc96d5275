"""A link in which a ``torch.optim.Optimizer`` makes the update of every run, one run after the other."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, MutableSequence, Sequence, Set
from dataclasses import dataclass, field, make_dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lab.core import machine
from lab.core.errors import RequestError
from lab.core.own_failures import OwnCodeError, defined_at, own_failure
from lab.core.roles import MATRICES, Role
from lab.core.schema import PerRun
from lab.optim.links.link import Link, Now, Tensors, per_run

TRIAL_STEPS = 3  # after all but the last of which an optimizer has all the state that it keeps
LONGEST_TRIAL = 20  # steps, of an optimizer that moves nothing at first, such as some kinds of RAdam
TORCHS_ATTRIBUTES = ("state", "param_groups", "defaults")
OWN_KEYS = ("params", "lr")  # of a parameter group; the others may change from step to step, as in Prodigy
Path = tuple[Any, ...]


@dataclass
class _Run:
    """The optimizer of one run, and its own copies of the run's weights, by name.

    Attributes:
        kept: names of the numbers and tensors that it kept after its last step.
        is_used: whether it has made a step.
    """

    optimizer: torch.optim.Optimizer
    weights: Mapping[str, nn.Parameter]
    kept: Set[str] = frozenset()
    is_used: bool = False


@dataclass(frozen=True)
class TorchOptimizer(Link):
    """What ``link_of`` makes of an optimizer: the step of the optimizer, divided by the learning rate.

    The optimizer gets the scheduled learning rate, as it would from a scheduler, so that decay inside of it is what its
    author meant. Its state is kept in tensors ``[r ...]`` like that of other links, so checkpoints, responses to spikes
    and skipped updates hold for it, too.

    Attributes:
        is_of_user: as of ``OwnModule``.
        optimizer: the class.
        arguments: the argument of its constructor that each field gives: its name, and the place in a tuple if it is
            one of ``betas``.
        usual_lr: the learning rate with which it is built; every step sets another.
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "direction"
    needs_whole_weights: ClassVar = True
    is_of_user: ClassVar = True
    optimizer: ClassVar[Any]
    arguments: ClassVar[Mapping[str, tuple[str, int | None]]]
    defaults: ClassVar[Mapping[str, Any]]
    usual_lr: ClassVar[float]
    lr: PerRun
    source: str = ""

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        begun_r = per_run(weights)
        state, tried = {"begun": begun_r}, set[str]()
        for run in range(len(begun_r)):
            if (numbers := repr(self._numbers(run))) in tried:
                continue
            tried.add(numbers)  # runs of other numbers may keep other state, as with momentum and without
            for path, leaf in _leaves(_state_of(self._tried(_of_run(weights, run), run))):
                like = leaf if isinstance(leaf, Tensor) else begun_r.new_zeros((), dtype=torch.float64)
                state.setdefault(_name(path), like.new_zeros(len(begun_r), *like.shape))
        return state

    @cached_property
    def _runs(self) -> list[_Run]:
        """The optimizer of each run, from the first step on."""
        return []

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        lr_r = (self.lr * now.shape_r).tolist()
        directions = {name: torch.zeros_like(update) for name, update in updates.items()}
        for run, lr in enumerate(lr_r):
            before = _of_run({name: now.weights[name] for name in updates}, run)
            resumed = self._resumed(run, before, state)
            for name, weight in resumed.weights.items():
                weight.copy_(before[name])
                weight.grad = updates[name][run].clone()
            for group in resumed.optimizer.param_groups:
                group["lr"] = lr
            self._step(resumed)
            self._keep(resumed, run, state)
            if lr:
                for name, weight in resumed.weights.items():
                    directions[name][run] = (before[name] - weight) / lr
        return directions

    def _numbers(self, run: int) -> dict[str, Any]:
        """The arguments that the constructor gets for a run, besides weights and learning rate."""
        given = dict[str, Any]()
        for key, (argument, place) in self.arguments.items():
            number = getattr(self, key)
            value = number[run].item() if isinstance(number, Tensor) else number
            if type(self.defaults[key]) is int and value == int(value):
                value = int(value)
            given[argument] = value if place is None else (*given.get(argument, ()), value)
        return given

    def _build(self, weights: Mapping[str, Tensor], run: int) -> _Run:
        """A fresh optimizer with the numbers of a run, and copies of its weights.

        Raises:
            OwnCodeError: its constructor fails.
        """
        own = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
        try:
            optimizer = self.optimizer(list(own.values()), lr=self.usual_lr, **self._numbers(run))
            if hasattr(optimizer, "train"):  # schedule-free optimizers have two modes
                optimizer.train()
        except (Exception, SystemExit) as fault:
            if machine.is_out_of_memory(fault):
                raise
            failure = own_failure(fault, self.optimizer)
            raise OwnCodeError(f"the constructor of {type(self).__name__} fails{failure}") from None
        return _Run(optimizer, own)

    def _tried(self, weights: Mapping[str, Tensor], run: int) -> _Run:
        """An optimizer after a few steps of random weights of these shapes, so that it has all the state that it keeps.

        Raises:
            OwnCodeError: it needs a closure, fails, moves no weight, makes one that is not finite, or keeps its state
                where no checkpoint finds it.
        """
        devices = {weight.device for weight in weights.values() if weight.is_cuda}
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(0)
            tried = self._build({name: torch.randn_like(weight) for name, weight in weights.items()}, run)
            before, hidden = {name: weight.clone() for name, weight in tried.weights.items()}, _attributes(tried)
            kept, moves = dict[str, str](), False
            for step in range(LONGEST_TRIAL):
                if step >= TRIAL_STEPS and moves:
                    break
                kept = _kept(tried)
                self._random_step(tried)
                moves = any(not torch.equal(weight, before[name]) for name, weight in tried.weights.items())
        after = _attributes(tried)
        if changed := [key for key in after if not _equal(after[key], hidden.get(key, []))]:
            raise self._error(
                f"changes its attribute {changed[0]} in a step; what changes belongs into self.state or into the "
                "parameter group, where checkpoints find it"
            )
        for path, value in _others(_state_of(tried)):
            if path[0] != "group" and not _is_constant(value):
                kind = "a sparse tensor" if isinstance(value, Tensor) else type(value).__name__
                held = "it holds dense tensors and numbers, in lists and dicts"
                raise self._error(f"keeps {_name(path)} as {kind}, which no checkpoint can hold; {held}")
        if other := sorted({*_kept(tried).items()} ^ {*kept.items()}):
            raise self._error(f"keeps something else with every step, such as {' of '.join(other[-1][::-1])}")
        if not all(bool(weight.isfinite().all()) for weight in tried.weights.values()):
            raise self._error(f"makes weights that are not finite in its first {TRIAL_STEPS} steps")
        if not moves:
            raise self._error(f"moves no weight in its first {LONGEST_TRIAL} steps")
        return tried

    def _random_step(self, run: _Run) -> None:
        """Make a step with random gradients.

        Raises:
            OwnCodeError: the optimizer fails.
        """
        for weight in run.weights.values():
            weight.grad = torch.randn_like(weight)
        try:
            self._step(run)
        except (Exception, SystemExit) as fault:
            if isinstance(fault, OwnCodeError) or machine.is_out_of_memory(fault):
                raise
            if "closure" in str(fault):
                problem = "needs a closure that evaluates the loss again within a step, which no fleet can do"
                raise self._error(problem) from None
            failure = own_failure(fault, self.optimizer)
            raise OwnCodeError(f"{type(self).__name__} fails in its first steps{failure}") from None

    def _step(self, run: _Run) -> None:
        """Make a step of one run.

        Raises:
            OwnCodeError: a weight has another precision or shape afterwards.
            Exception: the optimizer fails.
        """
        kinds = {name: _kind_of(weight) for name, weight in run.weights.items()}
        run.optimizer.step()
        run.is_used = True
        for name, weight in run.weights.items():
            if _kind_of(weight) != kinds[name]:
                raise self._error(f"makes {_kind_of(weight)} of the weight {name}, which was {kinds[name]}")

    def _resumed(self, run: int, weights: Mapping[str, Tensor], state: Tensors) -> _Run:
        """The optimizer of a run with its state in the tensors, which a checkpoint or a response may have changed."""
        if run == len(self._runs):
            self._runs.append(self._build(weights, run))
        is_begun = bool(state["begun"][run])
        if self._runs[run].is_used != is_begun:
            self._runs[run] = self._tried(weights, run) if is_begun else self._build(weights, run)
        resumed = self._runs[run]
        for path, leaf in _leaves(_state_of(resumed)) if is_begun else ():
            part, first, *keys = path
            kept = state[_name(path)][run]
            place: Any = resumed.optimizer.param_groups if part == "group" else resumed.optimizer.state
            keys = [resumed.weights[first] if part == "weight" else first, *keys]
            for key in keys[:-1]:
                place = place[key]
            place[keys[-1]] = kept.clone() if isinstance(leaf, Tensor) else type(leaf)(kept.item())
        return resumed

    def _keep(self, resumed: _Run, run: int, state: Tensors) -> None:
        """Write the state of a run into the tensors.

        Raises:
            OwnCodeError: the optimizer keeps more than after its first steps, or less, or something else.
        """
        state["begun"][run] = 1
        leaves = {_name(path): leaf for path, leaf in _leaves(_state_of(resumed))}
        if lost := sorted({*resumed.kept} - {*leaves}):
            raise self._error(f"no longer keeps {lost[0]}")
        resumed.kept = {*leaves}
        for name, leaf in leaves.items():
            if name not in state:
                raise self._error(f"begins to keep {name} only after its first steps")
            if (kind := _kind_of(leaf)) != (usual := _kind_of(state[name][run])):
                raise self._error(f"makes {kind} of {name} in its state, which was {usual}")
            state[name][run] = leaf

    def _error(self, problem: str) -> OwnCodeError:
        return OwnCodeError(f"{type(self).__name__} {problem}{defined_at(self.optimizer)}")

    def objection(self, config: Any) -> str | None:
        return f"cannot be {config.engine}; say engine=eager" if config.is_traced else None


def _state_of(run: _Run) -> dict[str, Any]:
    """What an optimizer keeps: of each weight, by its name, of all together, and of each parameter group by number."""
    state, groups = run.optimizer.state, enumerate(run.optimizer.param_groups)
    return {
        "weight": {name: state.get(weight, {}) for name, weight in run.weights.items()},
        "all": {key: value for key, value in state.items() if not isinstance(key, Tensor)},
        "group": {number: {key: group[key] for key in group if key not in OWN_KEYS} for number, group in groups},
    }


def _held(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What nested mappings and lists hold, each with its path."""
    if isinstance(tree, Mapping | MutableSequence):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _held(value, (*path, key))
    else:
        yield path, tree


def _is_leaf(value: Any) -> bool:
    """Whether a tensor ``[r ...]`` can hold a value of each run."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.layout is torch.strided)


def _leaves(tree: Any) -> list[tuple[Path, Any]]:
    """The tensors and numbers of nested mappings and lists, each with its path."""
    return [(path, value) for path, value in _held(tree) if _is_leaf(value)]


def _others(tree: Any) -> list[tuple[Path, Any]]:
    """What nested mappings and lists hold besides tensors and numbers, each with its path."""
    return [(path, value) for path, value in _held(tree) if not _is_leaf(value)]


def _is_constant(value: Any) -> bool:
    """Whether a value cannot change by itself."""
    if isinstance(value, tuple | list):
        return all(map(_is_constant, value))
    return isinstance(value, str | int | float | torch.dtype | torch.device | None)


def _kept(run: _Run) -> dict[str, str]:
    """The kind of each tensor and number that an optimizer keeps, and whatever else it keeps, by name."""
    state = _state_of(run)
    others = {_name(path): repr(value) for path, value in _others(state)}
    return others | {_name(path): _kind_of(leaf) for path, leaf in _leaves(state)}


def _name(path: Path) -> str:
    return "/".join(map(str, path))


def _of_run(tensors: Mapping[str, Tensor], run: int) -> Tensors:
    return {name: tensor[run] for name, tensor in tensors.items()}


def _kind_of(value: Any) -> str:
    """The precision and the shape of a tensor, ``float32 [3, 4]``, or of that which holds a number."""
    kind, shape = (value.dtype, value.shape) if isinstance(value, Tensor) else (torch.float64, ())
    return f"{str(kind).removeprefix('torch.')} {[*shape]}"


def _attributes(run: _Run) -> dict[str, list[Any]]:
    """The tensors and numbers that an optimizer keeps in attributes of its own; its weights are none."""
    held = {name: [*value] if isinstance(value, tuple) else value for name, value in vars(run.optimizer).items()}
    mine = set(map(id, run.weights.values()))
    return {
        name: [leaf.clone() if isinstance(leaf, Tensor) else leaf for _, leaf in _leaves(value) if id(leaf) not in mine]
        for name, value in held.items()
        if name not in TORCHS_ATTRIBUTES
    }


def _equal(values: Sequence[Any], others: Sequence[Any]) -> bool:
    pairs = zip(values, others, strict=False)
    return len(values) == len(others) and all(bool(torch.equal(*map(torch.as_tensor, pair))) for pair in pairs)


def link_of(optimizer: type[torch.optim.Optimizer], name: str = "") -> type[TorchOptimizer]:
    """A link of a torch optimizer, whose fields are the numbers and switches that its constructor takes.

    ``betas`` become ``beta1`` and ``beta2``; the learning rate is the recipe's. Arguments whose default is neither a
    number, a bool nor text keep it.

    Args:
        optimizer: the class.
        name: what it is called; its own name unless given.

    Raises:
        RequestError: it is no optimizer, takes no ``lr`` or needs another argument, or its constructor fails.
    """
    name = name or getattr(optimizer, "__name__", repr(optimizer))
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise RequestError(f"{name} is no torch.optim.Optimizer; an optimizer is a class that inherits from it")
    parameters = dict(inspect.signature(optimizer).parameters)
    if "lr" not in parameters:
        raise RequestError(f"{name} takes no lr, which a crash test varies")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for key, parameter in list(parameters.items())[1:]:  # the first takes the weights
        if parameter.default is parameter.empty and parameter.kind not in variable and key != "lr":
            raise RequestError(f"{name} takes {key!r}, which has no default; it is given weights and lr")
    given = {key: parameter.default for key, parameter in parameters.items() if key != "lr"}
    places: dict[str, tuple[str, int | None]] = {key: (key, None) for key in given}
    if isinstance(betas := given.get("betas"), tuple):
        given |= {f"beta{place}": beta for place, beta in enumerate(betas, 1)}
        places |= {f"beta{place}": ("betas", place) for place in range(1, len(betas) + 1)}
    kinds = {key: kind for key, value in given.items() if (kind := _kind(value))}
    usual = parameters["lr"].default
    usual_lr = float(usual) if isinstance(usual, int | float) and usual > 0 else 1.0
    return make_dataclass(
        name,
        [(key, kind, field(default=given[key])) for key, kind in kinds.items()],
        bases=(TorchOptimizer,),
        namespace={
            "optimizer": optimizer,
            "arguments": {key: places[key] for key in kinds},
            "defaults": {key: given[key] for key in kinds},
            "usual_lr": usual_lr,
            "roles": _roles(optimizer, name, usual_lr),
            "__doc__": inspect.getdoc(optimizer),
        },
        frozen=True,
    )


def _roles(optimizer: Any, name: str, lr: float) -> tuple[Role, ...]:
    """The roles of the weights that an optimizer takes; some take matrices only.

    Raises:
        OwnCodeError: its constructor fails.
    """
    failure = ""
    for shape, roles in (((2,), tuple(Role)), ((2, 2), MATRICES)):
        try:
            optimizer([nn.Parameter(torch.zeros(shape))], lr=lr)
        except (Exception, SystemExit) as fault:
            failure = own_failure(fault, optimizer)
        else:
            return roles
    raise OwnCodeError(f"the constructor of {name} fails{failure}")


def _kind(default: Any) -> Any:
    """The type of a field with this default; None for an argument that keeps it."""
    if isinstance(default, bool | str):
        return type(default)
    return PerRun if isinstance(default, int | float) else None
