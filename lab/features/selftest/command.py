"""`lab selftest`: does this machine compute what it should, and the same each time, on every core, device and rank?"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.analysis.text import to_json
from lab.core import machine, shipped
from lab.core.errors import RequestError
from lab.core.printing import say
from lab.core.usage import OptionParser

if TYPE_CHECKING:
    import torch


SIZE = 384  # of the matrices that are multiplied
ROUNDS = 3  # in which everything is computed again
SECONDS = 10.0  # of multiplications without a pause, shared among the cores or devices
# Largest error of an entry over the sum of the magnitudes of its terms, in units of the format's epsilon.
UNITS = 8.0
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Check(NamedTuple):
    """What was checked.

    Attributes:
        name: what was computed.
        place: the core or device, and the rank if there are several.
        value: an error, a number of differing rounds, or a loss's distance from the known one.
        bound: the largest value that passes.
        digest: of the bits that were computed; empty where places may differ.
    """

    name: str
    place: str
    value: float
    bound: float
    digest: str = ""

    @property
    def passes(self) -> bool:
        """Whether the value is within the bound; NaN is not."""
        return self.value <= self.bound


def check_machine(as_json: bool) -> int:
    """Check this machine, and say which core, device or rank differs; returns 1 if a check fails, 0 if all pass."""
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    started = time.monotonic()
    with _alone():
        checks = list(_checks(f"rank {rank} " if world > 1 else ""))
    if world > 1:
        checks = _of_all_ranks(checks)
    checks += list(_differing(checks))
    failed = [check for check in checks if not check.passes]
    if rank == 0:
        _tell(checks, failed, time.monotonic() - started, as_json)
    return int(bool(failed))


@contextmanager
def _alone() -> Iterator[None]:
    """Within the block this process is no rank among others: each computes for itself."""
    kept = {name: os.environ.pop(name) for name in RANK if name in os.environ}
    try:
        yield
    finally:
        os.environ |= kept


def _of_all_ranks(checks: list[Check]) -> list[Check]:
    from torch import distributed

    distributed.init_process_group("gloo")
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, checks)
    distributed.destroy_process_group()
    return [check for of_rank in gathered for check in of_rank]


def _checks(rank: str) -> Iterator[Check]:
    import torch

    machine.configure_torch()
    local = int(os.environ.get("LOCAL_RANK", 0))
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if rank and devices:
        devices = [devices[local % len(devices)]]
    places: list[tuple[str, torch.device, int | None]] = [(f"{rank}{device}", device, None) for device in devices] or [
        (f"{rank}core {core}", torch.device("cpu"), core) for core in _cores()
    ]
    for place, device, core in places:
        with _on_core(core):
            yield from _arithmetic(place, device)
            yield from _stress(place, device, SECONDS / len(places))
    yield from _known_runs(f"{rank}{devices[0] if devices else 'cpu'}", "cuda" if devices else "cpu")


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


@contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """Within the block this process runs on one core alone, where a system can be asked for that."""
    if core is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _matrices(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    return first.to(device, dtype), second.to(device, dtype)


def _arithmetic(place: str, device: torch.device) -> Iterator[Check]:
    """Products, sums and softmax in each format against float64, and their bits in each round."""
    import torch

    operations: dict[str, Callable[[Any, Any], Any]] = {
        "matmul": lambda a, b: a @ b,
        "sum": lambda a, b: (a * b).sum(-1),
        "softmax": lambda a, b: (a * b.abs()).softmax(-1),
    }
    for name, epsilon in EPSILON.items():
        first, second = _matrices(device, getattr(torch, name))
        exact = [x.cpu().double() for x in (first, second)]
        for operation, compute in operations.items():
            rounds = [compute(first, second).cpu() for _ in range(ROUNDS)]
            size = {"matmul": exact[0].abs() @ exact[1].abs(), "sum": (exact[0] * exact[1]).abs().sum(-1)}
            error = (rounds[0].double() - compute(*exact)).abs() / size.get(operation, 1.0)
            yield Check(f"{operation} in {name} against float64", place, float(error.max()), UNITS * epsilon)
            differing = sum(not torch.equal(rounds[0], other) for other in rounds[1:])
            yield Check(f"{operation} in {name}, bits of {ROUNDS} rounds", place, differing, 0, _digest(rounds[0]))


def _stress(place: str, device: torch.device, seconds: float) -> Iterator[Check]:
    """Products without a pause, whose bits must not change."""
    import torch

    first, second = _matrices(device, torch.float32)
    truth, differing, done, end = (first @ second).cpu(), 0, 0, time.monotonic() + seconds
    while done < ROUNDS or time.monotonic() < end:
        differing += not torch.equal((first @ second).cpu(), truth)
        done += 1
    yield Check("products under load, rounds that differ", place, differing, 0, _digest(truth))


def _known_runs(place: str, device: str) -> Iterator[Check]:
    """Runs with known losses, each trained twice."""
    table = shipped.load(Path(__file__).with_suffix(".yaml"))
    for name, known in table["runs"].items():
        losses = [_losses([*table["shared"], *known["words"], f"device={device}"]) for _ in range(2)]
        yield Check(f"training in {name}, repeats that differ", place, losses[0] != losses[1], 0)
        for step, loss in known["losses"].items():
            yield Check(f"training in {name}, loss at step {step}", place, abs(losses[0][step] - loss), known["band"])


def _losses(words: list[str]) -> dict[int, float]:
    """Training losses by step, of a run with these words."""
    from lab.sweeping.compose import Composer, parse
    from lab.training.config import run_config
    from lab.training.fleet import Fleet
    from lab.training.loop import train

    config = run_config(Composer().tree(parse(words)))
    return {
        result.step: float(result.probe_values["train_loss", ""][0])
        for result in train(Fleet([config]))
        if result.probe_values
    }


def _digest(tensor: torch.Tensor) -> str:
    import torch

    return sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def _differing(checks: list[Check]) -> Iterator[Check]:
    """The places whose bits are not those of most."""
    for name in dict.fromkeys(check.name for check in checks if check.digest):
        of_name = [check for check in checks if check.name == name]
        usual, _ = Counter(check.digest for check in of_name).most_common(1)[0]
        for check in of_name:
            if check.digest != usual:
                yield Check(f"{name}, not the bits of most places", check.place, 1, 0)


def _tell(checks: list[Check], failed: list[Check], seconds: float, as_json: bool) -> None:
    import torch

    if as_json:
        names = ("name", "place", "value", "bound", "passes")
        content = {
            "passes": not failed,
            "differing": sorted({check.place for check in failed}),
            "seconds": round(seconds, 1),
            "machine": f"{platform.machine()}, torch {torch.__version__}, fp32 products by {machine.matmul_library()}",
            "checks": [
                {name: getattr(check, name) for name in names} | {"value": float(check.value)} for check in checks
            ],
        }
        say(to_json(content))
        return
    for check in failed:
        say(f"{check.place}: {check.name}: {check.value:.3g}, at most {check.bound:.3g} passes")
    places = len({check.place for check in checks})
    say(f"{len(checks) - len(failed)} of {len(checks)} checks pass in {places} places, {seconds:.0f} s")


def run(arguments: Sequence[str]) -> None:
    """Check the machine.

    Raises:
        SystemExit: with status 1 if a check fails, else 0.
    """
    given = OptionParser("selftest").read(arguments)
    if given.folders:
        raise RequestError(f"lab selftest takes no {str(given.folders[0])!r}")
    raise SystemExit(check_machine(given.json))
