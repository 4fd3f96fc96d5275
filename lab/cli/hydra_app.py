"""The Hydra task, which trains one fleet, and the folders of configs that Hydra reads."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lab.core import machine
from lab.core.shipped import data_folder as data_folder

# Numbers of a config that follow from others: ``${divide:${scale.steps},2}``, an integer if the quotient is one, and
# ``${whole_quotient:${steps},40}``, the quotient rounded down, but at least 1.
OmegaConf.register_new_resolver("divide", lambda a, b: int(a / b) if (a / b).is_integer() else a / b, replace=True)
OmegaConf.register_new_resolver("whole_quotient", lambda a, b: max(1, a // b), replace=True)


def hydra_task(config: DictConfig) -> None:
    """One job trains one fleet of a frozen plan."""
    from lab.sweeping.pipeline import train_planned_fleet  # here, since tab completion needs none of it

    machine.configure_process()
    if HydraConfig.initialized():  # true under a launcher of Hydra
        with suppress(FileNotFoundError):
            os.chdir(HydraConfig.get().runtime.cwd)  # cluster workers start anywhere; paths are relative to it
    plan, index, request = str(config.fleet).split("/")
    train_planned_fleet(Path(config.out), plan, int(index), request=request)


# Not a decorator: a launcher sends the task to other processes by its name.
hydra_main = hydra.main(version_base="1.3", config_path=str(data_folder("conf")), config_name="config")(hydra_task)
