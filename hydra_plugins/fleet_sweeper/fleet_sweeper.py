"""How a request is swept, as Hydra's own settings: ``lab.cli.launch`` does it."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore


@dataclass
class FleetSweeperConf:
    """``params`` are the swept keys of a sweep file; ``max_runs`` is the most in a fleet.

    Without ``max_runs`` a fleet holds as many runs as fit into memory, on a CPU at most eight, where more gain nothing,
    and fewer where cores or GPUs would otherwise be idle.
    """

    params: dict[str, Any] = field(default_factory=dict)
    max_runs: int | None = None


ConfigStore.instance().store(group="hydra/sweeper", name="fleet", node=FleetSweeperConf, provider="instability-lab")
