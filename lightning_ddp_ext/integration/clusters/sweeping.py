"""Sweeps of Hydra, `--multirun`, whose jobs start processes."""

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

from lightning_ddp_ext._compat.lightning import repeats_the_command
from lightning_ddp_ext.errors import UnsupportedFeatureError


def in_sweep() -> bool:
    """Tell whether this process runs a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def check_sweep(strategy: DDPStrategy | FSDPStrategy) -> None:
    """Refuse a job of a sweep that would start its processes by repeating the command.

    Each of them would begin the whole sweep again, and go through it in step with the others on the process group of
    the first job, whatever number of processes, back-end and network the next ones ask for.

    Args:
        strategy: A strategy whose Trainer is about to configure the launcher.

    Raises:
        UnsupportedFeatureError: If it is one.
    """
    environment = strategy.cluster_environment
    starts_processes = environment is not None and not environment.creates_processes_externally
    if starts_processes and strategy.num_processes > 1 and repeats_the_command(strategy) and in_sweep():
        raise UnsupportedFeatureError(
            f'`--multirun` with `devices={strategy.num_processes}` and `start_method="popen"`: every process that is'
            ' started would begin the whole sweep again. Use `start_method="spawn"`.'
        )
