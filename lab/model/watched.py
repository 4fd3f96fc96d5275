"""What is probed of a custom model: scores of its attention and outputs of its blocks, found by shape or by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lab.core.errors import RequestError, nearest

SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)


class Watched(NamedTuple):
    """Patterns of module names, such as ``layers.*.self_attn``; empty ones leave modules to be found by shape.

    Attributes:
        attn: of the modules whose attention scores are probed.
        block: of the modules whose outputs ``[b t d]`` are the residual stream.
    """

    attn: str = ""
    block: str = ""


BY_SHAPE = Watched()


class Probed(NamedTuple):
    """What was probed in a forward pass: scores ``[b h t s]`` and outputs of blocks ``[b t d]``, by place."""

    scores: dict[str, Tensor]
    blocks: dict[str, Tensor]


class ModuleListener:
    """Probes the scores of attention and the outputs of blocks of a module.

    The scores are what a softmax over two axes of the length of the window takes, or the scaled products of queries and
    keys of ``scaled_dot_product_attention``; or the output of a watched module, if it has that shape.

    Args:
        module: of one run.
        watched: the modules in which it listens; by default the blocks, see ``block_modules``.

    Raises:
        RequestError: no module has a name that fits a pattern.
    """

    def __init__(self, module: nn.Module, watched: Watched) -> None:
        names = {id(part): name for name, part in module.named_modules()}
        blocks = _matching(module, watched.block) or {names[id(part)]: part for part in block_modules(module)}
        self.blocks = {f"block{number}": part for number, part in enumerate(blocks.values())}
        of_block = {name: f"block{number}" for number, name in enumerate(blocks)}
        attending = _matching(module, watched.attn) or blocks or {"": module}
        self.attending = {_place(name, of_block, attending): part for name, part in attending.items()}

    def listen(self, run: Callable[[], Any], shape: Sequence[int]) -> tuple[Any, Probed]:
        """Run a forward pass on tokens of the shape ``[b t]``, and probe what there is."""
        probed = Probed({}, {})
        mode = _Scores(probed.scores, tuple(shape))
        with ExitStack() as hooks:
            for place, part in self.blocks.items():
                handle = part.register_forward_hook(_keeping(probed.blocks, place, shape))
                hooks.callback(handle.remove)
            for place, part in self.attending.items():
                hooks.callback(part.register_forward_pre_hook(mode.entering(place)).remove)
                hooks.callback(part.register_forward_hook(mode.leaving(place), always_call=True).remove)
            hooks.enter_context(mode)
            return run(), probed


class _Scores(TorchFunctionMode):
    """Keeps the first scores that are computed inside of each of the modules that it is told of."""

    def __init__(self, scores: dict[str, Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scores, self.shape, self.inside = scores, shape, list[str]()

    def entering(self, place: str) -> Callable[..., None]:
        return lambda *_: self.inside.append(place)

    def leaving(self, place: str) -> Callable[..., None]:
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self.inside.pop()
            self._keep(place, _first(output))

        return leave

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if self.inside and func is F.scaled_dot_product_attention:
            query, key = (
                args[place] if len(args) > place else given[name] for place, name in enumerate(("query", "key"))
            )
            self._keep(self.inside[-1], _scores(query, key, given.get("scale")))
        elif self.inside and func in SOFTMAXES:
            self._keep(self.inside[-1], args[0] if args else given["input"])
        return func(*args, **given)

    def _keep(self, place: str, scores: Any) -> None:
        rows, length = self.shape
        if place in self.scores or not isinstance(scores, Tensor) or scores.shape[-2:] != (length, length):
            return
        if scores.ndim == 4 and scores.shape[0] == rows:
            self.scores[place] = scores
        elif scores.ndim == 3 and scores.shape[0] > rows and scores.shape[0] % rows == 0:
            self.scores[place] = scores.reshape(rows, -1, length, length)


def _scores(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Scaled products ``[... h t s]`` of queries with the keys of their group."""
    groups = query.shape[-3] // key.shape[-3] if query.ndim > 3 else 1
    key = key.repeat_interleave(groups, -3) if groups > 1 else key
    return query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)


def _keeping(kept: dict[str, Tensor], place: str, shape: Sequence[int]) -> Callable[[nn.Module, Any, Any], None]:
    """A hook that keeps the output of a module, or the first of several, if it is of the shape ``[b t d]``."""

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        first = _first(output)
        if isinstance(first, Tensor) and first.ndim == 3 and first.shape[:2] == shape:
            kept[place] = first

    return keep


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def block_modules(module: nn.Module) -> list[nn.Module]:
    """The blocks of a module: its longest list of modules of one class that consist of others; none without a list."""
    return max(block_lists(module), key=len, default=[])


def block_lists(module: nn.Module) -> list[list[nn.Module]]:
    """Lists of modules that consist of others, of one class or of two or more of each, as of an encoder and a decoder.

    Not those inside of one, as of the experts of a block.
    """
    lists = [list(inner) for inner in module.modules() if isinstance(inner, nn.ModuleList) and len(inner)]
    alike = [blocks for blocks in lists if _are_alike(blocks) and all(any(block.children()) for block in blocks)]
    inside = {
        id(part) for blocks in alike for block in blocks for child in block.children() for part in child.modules()
    }
    return [blocks for blocks in alike if id(blocks[0]) not in inside]


def _are_alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether there are no blocks of other classes, or two at least of each, as where a decoder follows an encoder."""
    counts = Counter(map(type, blocks)).values()
    return len(counts) == 1 or min(counts) > 1


def _matching(module: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The modules whose names fit a pattern, by name; none without one."""
    parts = {name: part for name, part in module.named_modules() if name}
    found = {name: part for name, part in parts.items() if fnmatchcase(name, pattern)}
    if pattern and not found:
        raise RequestError(f"has no module {pattern!r}; {nearest(pattern, parts)}")
    return found


def _place(name: str, of_block: Mapping[str, str], attending: Mapping[str, nn.Module]) -> str:
    """What the place of a watched module is called: its block, and the rest of its name if there are several in it."""
    inside = [block for block in of_block if name == block or name.startswith(f"{block}.")]
    if not inside:
        return name
    block = max(inside, key=len)
    others = [other for other in attending if other.startswith(f"{block}.")]
    return of_block[block] if len(others) < 2 else f"{of_block[block]}{name.removeprefix(block)}"
