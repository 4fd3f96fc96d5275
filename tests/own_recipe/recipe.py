"""A loss term in a script of its own; nothing is installed."""

from dataclasses import dataclass
from typing import ClassVar

import lab
from lab import PerRun, bounded, over


@lab.register("intervention", "z_hinge")
@dataclass(frozen=True)
class ZHinge(lab.LossTerm):
    """Punish log Z only where it is further than ``margin`` from zero."""

    uses: ClassVar = ("log_z_rbt",)
    coefficient: PerRun = bounded(at_least=0)
    margin: PerRun = bounded(0.0, at_least=0)

    def __call__(self, predictions):
        log_z_rbt = predictions.log_z_rbt
        beyond_rbt = (log_z_rbt.abs() - over(self.margin, log_z_rbt)).relu()
        return over(self.coefficient, log_z_rbt) * beyond_rbt.square()


if __name__ == "__main__":
    raise SystemExit(lab.main())
