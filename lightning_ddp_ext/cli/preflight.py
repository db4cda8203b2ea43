"""What is checked of a run before it starts, on this host alone and in milliseconds."""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from hydra.types import RunMode
from hydra.utils import get_object
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_ddp_ext.cli.problems import LaunchError
from lightning_ddp_ext.integration.clusters.manual_cluster import ManualEnvironment
from lightning_ddp_ext.integration.clusters.slurm_cluster import (
    SET_BY_HAND,
    TERMINAL,
    CheckedSLURMEnvironment,
    meeting_ports,
)
from lightning_ddp_ext.network import slurm_arithmetic
from lightning_ddp_ext.network.init_method import MeetingPlace, parse_init_method
from lightning_ddp_ext.network.interfaces import check_gloos_variable
from lightning_ddp_ext.network.stores import check_meeting_place
from lightning_ddp_ext.strategies.single_process import SingleProcessStrategy
from lightning_ddp_ext.strategies.upstream import single_device_strategy

# What launchers say about the number of processes that they have started; `srun`, `torchrun`, and `mpirun` twice.
_NUMBERS_OF_PROCESSES = ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def has_process_group(config: DictConfig) -> bool:
    """Tell whether the chosen strategy has one process per device, while there is no Trainer that knows their number.

    Args:
        config: The composed configuration.

    Returns:
        Whether it has, or may have: what a function of somebody else makes is not known yet.
    """
    try:
        target = get_object(config.strategy.get("_target_"))
    except Exception:  # whatever importing it raises; constructing it will say so
        return True
    if isinstance(target, type):
        return issubclass(target, ParallelStrategy) and not issubclass(target, SingleProcessStrategy)
    return target is not single_device_strategy


def has_network_settings(config: DictConfig) -> bool:
    """Tell whether the chosen strategy takes the settings of `process_group` and `network`.

    Args:
        config: The composed configuration.
    """
    return "network_interface" in config.strategy


def find_slurm_problems(config: DictConfig) -> list[str]:
    """Compare what SLURM has started with what the configuration needs.

    Args:
        config: The composed configuration, with devices filled in.

    Returns:
        One text per problem; empty where somebody else starts the processes.
    """
    devices = _count(config.trainer.devices, config.trainer.accelerator)
    by_hand = str(config.cluster.get("_target_", "")).endswith(ManualEnvironment.__name__)
    by_hand = by_hand or any(name in os.environ for name in (*SET_BY_HAND, TERMINAL))
    if by_hand or config.trainer.plugins is not None or devices is None or not has_process_group(config):
        return []
    uses_gpus = config.trainer.accelerator != "cpu"
    return slurm_arithmetic.find_problems(os.environ, config.trainer.num_nodes, devices, uses_gpus=uses_gpus)


def check_slurm(config: DictConfig) -> None:
    """Refuse a job of SLURM that does not fit.

    Args:
        config: The composed configuration, with devices filled in.

    Raises:
        LaunchError: With all that does not.
    """
    problems = find_slurm_problems(config)
    if problems:
        raise LaunchError(" Also: ".join(problems))


def check_single_tasks(plugins: Sequence[object] | None, strategy: str, trainer: Trainer) -> None:
    """Refuse tasks of a SLURM job that would each train by themselves; other strategies compare tasks with devices.

    Args:
        plugins: The Trainer's.
        strategy: The name that was chosen.
        trainer: A Trainer that has not started anything.

    Raises:
        LaunchError: If there are several tasks for a run of one process.
    """
    for plugin in plugins or ():
        if isinstance(plugin, CheckedSLURMEnvironment) and plugin.world_size() != trainer.world_size:
            raise LaunchError(
                f"`strategy={strategy}` runs in {trainer.world_size} process, and the job has"
                f" `SLURM_NTASKS={plugin.world_size()}`. Start it with `srun --ntasks=1`."
            )


def check_launcher(strategy: str, trainer: Trainer) -> None:
    """Refuse a launcher that has started several processes, each of which would make a run of its own.

    Args:
        strategy: The name that was chosen.
        trainer: A Trainer that has not started anything.

    Raises:
        LaunchError: If there are several processes for a run of one.
    """
    started = None if trainer.world_size > 1 else find_launcher()
    if started is not None:
        raise LaunchError(
            f"`strategy={strategy}` runs in one process, and a launcher has started `{started}={os.environ[started]}`."
            " Start the command by itself, or choose `strategy=ddp_join` with the devices and nodes of all of them."
        )


def find_launcher() -> str | None:
    """Return the variable by which a launcher says that it has started several processes, this one among them."""
    return next((name for name, number in _started_processes().items() if number not in ("0", "1")), None)


def is_started_alone() -> bool:
    """Tell whether a launcher has started this process and no other one."""
    return bool(_started_processes()) and find_launcher() is None


def _started_processes() -> dict[str, str]:
    """Return what launchers say about the number of processes that they have started, by the variable."""
    by_hand = {"SLURM_STEP_NUM_TASKS"} if TERMINAL in os.environ else set()  # a shell for a person
    return {name: os.environ[name] for name in _NUMBERS_OF_PROCESSES if name in os.environ and name not in by_hand}


def check_folder(config: DictConfig, hydra: Any, trainer: Trainer) -> None:
    """Refuse a SLURM job whose tasks and starts would each have a run folder of their own.

    Args:
        config: The composed configuration.
        hydra: Hydra's part of it.
        trainer: A Trainer that has not started anything.

    Raises:
        LaunchError: If a job that is put into the queue again would not find what it has saved.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    folder: Any = OmegaConf.to_container(hydra.run, resolve=False)
    is_own = hydra.mode != RunMode.MULTIRUN and "${now:" in folder["dir"]
    if isinstance(environment, SLURMEnvironment) and "_target_" not in config.cluster and is_own:
        raise LaunchError(
            "this is a task of a SLURM job: without `cluster=slurm`, each task and each start of the job would have a"
            " run folder of its own, in which nothing is found again. Add `cluster=slurm`, or `hydra.run.dir=`."
        )


def check_meeting(trainer: Trainer, settings: DictConfig) -> None:
    """Refuse what would keep ranks from meeting, as far as this host knows.

    Args:
        trainer: A Trainer that has not started anything.
        settings: The configuration of its strategy.

    Raises:
        NetworkInterfaceError: If the environment sends gloo to an interface that this host lacks.
        RendezvousError: If this is rank 0, and another program has its port.
    """
    if dist.is_initialized():
        return  # a sweep: the ranks have met, and this process itself has the port
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    backend = settings.process_group_backend or dist.get_default_backend_for_device(trainer.strategy.root_device)
    check_gloos_variable(backend, settings.network_interface)
    place = _known_place(environment, settings.init_method)
    if place is not None and environment.node_rank() == 0 and environment.local_rank() == 0:
        check_meeting_place(place, trainer.num_nodes)


def _known_place(environment: ClusterEnvironment, init_method: str | None) -> MeetingPlace | None:
    """Return where ranks will meet; None if that is not chosen yet, or may still change."""
    if isinstance(environment, MPIEnvironment):  # to ask it is a collective operation
        return None
    place = parse_init_method(init_method)
    if place != MeetingPlace():
        return place
    if "MASTER_PORT" not in os.environ and not isinstance(environment, ManualEnvironment):
        return None
    port, *others = meeting_ports(environment)
    return None if others else MeetingPlace(environment.main_address, port)


def _count(devices: object, accelerator: object) -> int | None:
    """Count the devices of a node as the Trainer will; None if it has to be asked."""
    if isinstance(devices, ListConfig | list):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    try:
        count = int(str(devices))
    except ValueError:  # "auto"
        count = -1
    if count >= 0:
        return count
    return torch.cuda.device_count() if accelerator in ("cuda", "gpu") else None
