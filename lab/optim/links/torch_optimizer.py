"""A link in which a ``torch.optim.Optimizer`` makes the update of every run, one run after the other."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lab.core.errors import RequestError
from lab.core.roles import MATRICES, Role
from lab.core.schema import PerRun
from lab.optim.links.link import Link, Now, Tensors, per_run

TRIAL_STEPS = 2  # on copies of the weights, after which an optimizer has all the state that it keeps
OWN_KEYS = ("params", "lr")  # of a parameter group; the others may change from step to step, as in Prodigy
Path = tuple[Any, ...]


class _Run(NamedTuple):
    """The optimizer of one run, and its own copies of the run's weights, by name."""

    optimizer: torch.optim.Optimizer
    weights: Mapping[str, nn.Parameter]


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
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "direction"
    needs_whole_weights: ClassVar = True
    is_of_user: ClassVar = True
    optimizer: ClassVar[type[torch.optim.Optimizer]]
    arguments: ClassVar[Mapping[str, tuple[str, int | None]]]
    defaults: ClassVar[Mapping[str, Any]]
    lr: PerRun
    source: str = ""

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        run = self._build({name: weight[0] for name, weight in weights.items()}, 0)
        self._try(run)
        begun_r = per_run(weights)
        state = {"begun": begun_r}
        for path, leaf in _leaves(_state_of(run)):
            like = leaf if isinstance(leaf, Tensor) else begun_r.new_zeros((), dtype=torch.float64)
            state[_name(path)] = like.new_zeros(len(begun_r), *like.shape)
        return state

    @cached_property
    def _runs(self) -> list[_Run]:
        """The optimizer of each run, from the first step on."""
        return []

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        lr_r = (self.lr * now.shape_r).tolist()
        directions = {name: torch.zeros_like(update) for name, update in updates.items()}
        for run, lr in enumerate(lr_r):
            before = {name: now.weights[name][run] for name in updates}
            optimizer, weights = self._resumed(run, before, state)
            for name, weight in weights.items():
                weight.copy_(before[name])
                weight.grad = updates[name][run].clone()
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            self._keep(run, state)
            if lr:
                for name, weight in weights.items():
                    directions[name][run] = (before[name] - weight) / lr
        return directions

    def _build(self, weights: Mapping[str, Tensor], run: int) -> _Run:
        """A fresh optimizer with the numbers of a run, and copies of its weights.

        Raises:
            RequestError: its constructor fails.
        """
        given: dict[str, Any] = {"lr": 1.0}
        for key, (argument, place) in self.arguments.items():
            number = getattr(self, key)
            value = number[run].item() if isinstance(number, Tensor) else number
            if type(self.defaults[key]) is int and value == int(value):
                value = int(value)
            given[argument] = value if place is None else (*given.get(argument, ()), value)
        own = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
        try:
            optimizer = self.optimizer(list(own.values()), **given)
        except Exception as fault:
            raise RequestError(f"{self.optimizer.__name__} cannot be built: {type(fault).__name__}: {fault}") from None
        if hasattr(optimizer, "train"):  # schedule-free optimizers have two modes
            optimizer.train()
        return _Run(optimizer, own)

    def _try(self, run: _Run) -> None:
        """Make a few steps, so that the optimizer has all the state that it keeps.

        Raises:
            RequestError: the optimizer needs a closure, fails, or keeps its state where no checkpoint finds it.
        """
        name, attributes = self.optimizer.__name__, _numbers(run.optimizer)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            for _ in range(TRIAL_STEPS):
                for weight in run.weights.values():
                    weight.grad = torch.randn_like(weight)
                try:
                    run.optimizer.step()
                except Exception as fault:
                    problem = f"fails in its first steps: {type(fault).__name__}: {fault}"
                    if "closure" in str(fault):
                        problem = "needs a closure that evaluates the loss again within a step, which no fleet can do"
                    raise RequestError(f"{name} {problem}") from None
        if changed := [key for key, value in _numbers(run.optimizer).items() if attributes.get(key) != value]:
            raise RequestError(
                f"{name} changes its attribute {changed[0]} in a step; a number that changes belongs into self.state "
                "or into the parameter group, where checkpoints find it"
            )

    def _resumed(self, run: int, weights: Mapping[str, Tensor], state: Tensors) -> _Run:
        """The optimizer of a run with its state in the tensors, which a checkpoint or a response may have changed."""
        if run == len(self._runs):
            self._runs.append(self._build(weights, run))
        is_begun, is_used = bool(state["begun"][run]), bool(self._runs[run].optimizer.state)
        if is_used and not is_begun:
            self._runs[run] = self._build(weights, run)
        if is_begun and not is_used:
            self._try(self._runs[run])
        optimizer, own = self._runs[run]
        for path, leaf in _leaves(_state_of(self._runs[run])) if is_begun else ():
            part, name, *keys = path
            kept = state[_name(path)][run]
            place: Any = optimizer.state[own[name]] if part == "weight" else optimizer.param_groups[name]
            for key in keys[:-1]:
                place = place[key]
            place[keys[-1]] = kept.clone() if isinstance(leaf, Tensor) else type(leaf)(kept.item())
        return self._runs[run]

    def _keep(self, run: int, state: Tensors) -> None:
        """Write the state of a run into the tensors.

        Raises:
            RequestError: the optimizer keeps more than after its first steps.
        """
        state["begun"][run] = 1
        for path, leaf in _leaves(_state_of(self._runs[run])):
            kept = state.get(_name(path))
            if kept is None:
                raise RequestError(f"{self.optimizer.__name__} begins to keep {_name(path)} only after its first steps")
            kept[run] = leaf

    def objection(self, config: Any) -> str | None:
        return f"cannot be {config.engine}; say engine=eager" if config.is_traced else None


def _state_of(run: _Run) -> dict[str, Any]:
    """What an optimizer keeps: of each weight, by its name, and of each parameter group, by its number."""
    groups = enumerate(run.optimizer.param_groups)
    return {
        "weight": {name: run.optimizer.state.get(weight, {}) for name, weight in run.weights.items()},
        "group": {number: {key: group[key] for key in group if key not in OWN_KEYS} for number, group in groups},
    }


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The tensors and numbers of nested mappings and lists, each with its path."""
    children = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in children:
        yield from _leaves(value, (*path, key))
    if isinstance(tree, Tensor | int | float) and not isinstance(tree, bool):
        yield path, tree


def _name(path: Path) -> str:
    return "/".join(map(str, path))


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that are numbers."""
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)}


def link_of(optimizer: type[torch.optim.Optimizer]) -> type[TorchOptimizer]:
    """A link of a torch optimizer, whose fields are the numbers and switches that its constructor takes.

    ``betas`` become ``beta1`` and ``beta2``; the learning rate is the recipe's. Arguments whose default is neither a
    number, a bool nor text keep it.

    Raises:
        RequestError: it is no optimizer, or takes no ``lr``.
    """
    name = getattr(optimizer, "__name__", repr(optimizer))
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise RequestError(f"{name} is no torch.optim.Optimizer; an optimizer is a class that inherits from it")
    parameters = dict(inspect.signature(optimizer).parameters)
    if "lr" not in parameters:
        raise RequestError(f"{name} takes no lr, which a crash test varies")
    given = {key: parameter.default for key, parameter in parameters.items() if key != "lr"}
    places: dict[str, tuple[str, int | None]] = {key: (key, None) for key in given}
    for key, betas in list(given.items()):
        if key == "betas" and isinstance(betas, tuple):
            given |= {f"beta{place}": beta for place, beta in enumerate(betas, 1)}
            places |= {f"beta{place}": (key, place) for place in range(1, len(betas) + 1)}
    kinds = {key: kind for key, value in given.items() if (kind := _kind(value))}
    return make_dataclass(
        name,
        [(key, kind, field(default=given[key])) for key, kind in kinds.items()],
        bases=(TorchOptimizer,),
        namespace={
            "optimizer": optimizer,
            "arguments": {key: places[key] for key in kinds},
            "defaults": {key: given[key] for key in kinds},
            "roles": tuple(Role) if _takes(optimizer, torch.zeros(2)) else MATRICES,
            "__doc__": inspect.getdoc(optimizer),
        },
        frozen=True,
    )


def _takes(optimizer: Any, weight: Tensor) -> bool:
    """Whether an optimizer takes a weight of this shape; some take matrices only."""
    try:
        optimizer([nn.Parameter(weight)], lr=1.0)
    except Exception:
        return False
    return True


def _kind(default: Any) -> Any:
    """The type of a field with this default; None for an argument that keeps it."""
    if isinstance(default, bool | str):
        return type(default)
    return PerRun if isinstance(default, int | float) else None
