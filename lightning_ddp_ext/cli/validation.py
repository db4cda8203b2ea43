"""Validation of settings before a run starts."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_ddp_ext._validation import check_choice, check_integer, check_number
from lightning_ddp_ext.cli.errors import LaunchError
from lightning_ddp_ext.clusters.manual import ManualEnvironment
from lightning_ddp_ext.clusters.slurm import (
    SET_BY_HAND,
    TERMINAL,
    CheckedSLURMEnvironment,
    find_problems,
    rendezvous_ports,
)
from lightning_ddp_ext.distributed.init_method import RendezvousEndpoint, parse_init_method
from lightning_ddp_ext.distributed.interfaces import check_gloo_variable
from lightning_ddp_ext.distributed.stores import check_endpoint
from lightning_ddp_ext.join.samplers import check_fractions
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy
from lightning_ddp_ext.strategies.builtin import single_device_strategy
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy

_DEFAULT = "Leave it out for the default."
_Part = TypeVar("_Part")

_DURATION = re.compile(r"\d+:\d\d:\d\d:\d\d")
_MOST_NODES = 2**16
_MOST_PROCESSES = 1024  # of one host, on the CPU
_LAST_SEED = 2**32 - 1  # of NumPy
_PROFILERS = ("simple", "advanced", "pytorch", "xla")


def check_settings(config: DictConfig) -> None:
    """Check the seed and the arguments of the Trainer.

    Args:
        config: The composed configuration, resolved.

    Raises:
        TypeError: If one is of the wrong type.
        ValueError: If one is out of range.
    """
    check_integer("seed", config.seed, most=_LAST_SEED, remedy=_DEFAULT)
    for name, check in _OF_TRAINER.items():
        value = config.trainer.get(name)
        if value is not None:
            check(f"trainer.{name}", value)
    devices = config.trainer.devices
    if config.trainer.accelerator == "cpu" and devices != "auto":
        number = int(devices) if isinstance(devices, str) and devices.strip().isdecimal() else devices
        remedy = "Use a number of processes or replicas on the CPU, such as 2."
        check_integer("trainer.devices", number, least=1, most=_MOST_PROCESSES, remedy=remedy)


def make(node: Any, key: str, kind: type[_Part]) -> _Part:
    """Make what a part of the configuration describes.

    Args:
        node: The part.
        key: Its key.
        kind: What it has to be.

    Raises:
        LaunchError: If it is something else.
    """
    part = instantiate(node)
    if not isinstance(part, kind):
        raise LaunchError(
            f"`{key}` makes a {type(part).__name__}, not a {kind.__name__}. Set `{key}._target_` to the path of a class"
            " that is one."
        )
    return part


def make_all(entries: Any, group: str, kind: type[Any]) -> list[Any]:
    """Make every entry of a group, see `make`; those that are null are left out."""
    if not isinstance(entries, DictConfig):
        raise LaunchError(f"`{group}` must have a name for each entry, got {entries!r}. Use `{group}=none` for none.")
    named = {str(name): node for name, node in entries.items()}
    return [make(node, f"{group}.{name}", kind) for name, node in named.items() if node is not None]


def check_hosts(trainer: Trainer) -> None:
    """Refuse several hosts of which nobody says where they are: the first would wait for the others in vain.

    Args:
        trainer: The Trainer, which has not started anything.

    Raises:
        LaunchError: If there is no launcher, no `cluster=manual` and no main address.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 and type(environment) is LightningEnvironment and "MASTER_ADDR" not in os.environ:
        raise LaunchError(
            f"`cluster.num_nodes={trainer.num_nodes}` (`trainer.num_nodes`), but neither a launcher nor `cluster` says"
            " which host this is and where the first one is. Use `cluster=manual` without a launcher."
        )


def _check_share(name: str, value: Any) -> None:
    check_number(name, value, remedy=_DEFAULT)
    if value > 1 and value % 1:
        raise ValueError(f"`{name}` must be a share from 0 to 1 or a number of batches, got {value!r}. {_DEFAULT}")


def _check_flag_or_count(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        check_integer(name, value, remedy="Use true for a single batch.")


def _check_duration(name: str, value: Any) -> None:
    remedy = 'Write "DD:HH:MM:SS".'
    if isinstance(value, Mapping | DictConfig):
        try:
            length = timedelta(**OmegaConf.to_container(value))  # type: ignore[arg-type]
        except (OverflowError, TypeError) as error:
            raise ValueError(f"`{name}` must be a duration, got {value} ({error}). {remedy}") from error
        if length <= timedelta(0):
            raise ValueError(f"`{name}` must be a duration above zero, got {value}. {remedy}")
    elif not isinstance(value, str) or not _DURATION.fullmatch(value.strip()) or not re.search("[1-9]", value):
        raise ValueError(f"`{name}` must be a duration above zero, got {value!r}. {remedy}")


def _check_interval(name: str, value: Any) -> None:
    if isinstance(value, str | Mapping | DictConfig):
        _check_duration(name, value)
        return
    _check_share(name, value)
    if not value > 0:
        raise ValueError(f"`{name}` must be above 0, got {value!r}. {_DEFAULT}")


def _check_deterministic(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        check_choice(name, value, ("warn",), "Use true or false otherwise.")


def _check_profiler(name: str, value: Any) -> None:
    if not (isinstance(value, DictConfig) and "_target_" in value):
        check_choice(name, value, _PROFILERS, _DEFAULT)


def _at_least(least: int) -> Callable[[str, object], None]:
    return partial(check_integer, least=least, remedy=_DEFAULT)


_OF_TRAINER: dict[str, Callable[[str, Any], None]] = {
    "accumulate_grad_batches": _at_least(1),
    "check_val_every_n_epoch": _at_least(1),
    "deterministic": _check_deterministic,
    "fast_dev_run": _check_flag_or_count,
    "gradient_clip_val": partial(check_number, least=0, remedy=_DEFAULT),
    "limit_predict_batches": _check_share,
    "limit_test_batches": _check_share,
    "limit_train_batches": _check_share,
    "limit_val_batches": _check_share,
    "log_every_n_steps": _at_least(0),
    "max_epochs": _at_least(-1),
    "max_steps": _at_least(-1),
    "max_time": _check_duration,
    "min_epochs": _at_least(0),
    "min_steps": _at_least(0),
    "num_nodes": partial(check_integer, least=1, most=_MOST_NODES, remedy="Set `cluster.num_nodes`."),
    "num_sanity_val_steps": _at_least(-1),
    "overfit_batches": _check_share,
    "profiler": _check_profiler,
    "reload_dataloaders_every_n_epochs": _at_least(0),
    "val_check_interval": _check_interval,
}


_SINGLE = "single"


def prepare_config(config: DictConfig, choices: Any) -> None:
    """Fill in accelerator and devices, and refuse settings that cannot be meant; before anything is built.

    Args:
        config: The composed configuration, which is changed.
        choices: The options that were chosen, by group.

    Raises:
        LaunchError: If a setting would be ignored, or does not suit the strategy.
        TypeError: If one is of the wrong type.
        ValueError: If one is out of range.
    """
    _check_groups(config, choices)
    _set_devices(config, choices)
    check_settings(config)


def make_plugins(config: DictConfig) -> list[Any] | None:
    """Add the cluster to the Trainer's plugins, if it is one that has to be told.

    Args:
        config: The composed configuration.

    Returns:
        The plugins; None for none.
    """
    plugins = config.trainer.plugins
    if "_target_" not in config.cluster:
        return plugins  # type: ignore[no-any-return]
    own = [] if plugins is None else list(plugins) if isinstance(plugins, ListConfig) else [plugins]
    own = [instantiate(plugin) if isinstance(plugin, DictConfig) else plugin for plugin in own]
    return [*own, instantiate(config.cluster)]


def check_run(config: DictConfig, hydra: Any, trainer: Trainer, plugins: Sequence[object] | None) -> None:
    """Refuse what would not become the run that is described, as far as this host knows.

    Args:
        config: The composed configuration, prepared.
        hydra: Hydra's part of it.
        trainer: The Trainer, which has not started anything.
        plugins: The Trainer's.

    Raises:
        LaunchError: If hosts, tasks, processes, shares of the data or the folder do not fit.
        ValueError: If the shares are no fractions for these ranks.
    """
    strategy = str(hydra.runtime.choices.strategy)
    check_hosts(trainer)
    _check_fractions(config, strategy, trainer)
    check_single_tasks(plugins, strategy, trainer)
    check_launcher(strategy, trainer)
    check_folder(config, hydra, trainer)


def _check_groups(config: DictConfig, choices: Any) -> None:
    """Refuse settings that would be ignored."""
    path = config.ckpt_path
    if path not in (None, "last", "best", "hpc") and "://" not in path and not Path(path).exists():
        raise LaunchError(f"`ckpt_path={path}` does not exist. Give the path of a checkpoint, or `last`.")
    for key in {"strategy", "callbacks", "logger"} & set(config.trainer):
        raise LaunchError(f"`trainer.{key}` has no effect. Use the group `{key}` instead.")
    for group, key in {"network": "network_interface", "process_group": "process_group_backend"}.items():
        if config[group] is not None and key not in config.strategy:
            lacks = f"runs in one process and has no {group.replace('_', ' ')}"
            reason = f"takes no `{key}`" if has_process_group(config) else lacks
            raise LaunchError(
                f"`{group}={choices[group]}` is set, but `strategy={choices.strategy}` {reason}. Leave it out, or"
                " choose `strategy=ddp` or `strategy=fsdp`."
            )


def _set_devices(config: DictConfig, choices: Any) -> None:
    """Fill in accelerator and devices where they are left open; refuse several for the strategy of one."""
    trainer = config.trainer
    single = choices.strategy == _SINGLE
    if trainer.accelerator is None:
        trainer.accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if trainer.devices is None:
        uses_gpus = trainer.accelerator in ("cuda", "gpu") or (
            trainer.accelerator == "auto" and torch.cuda.is_available()
        )
        several = torch.cuda.device_count() if uses_gpus else 2
        trainer.devices = 1 if single else several
    if single and trainer.num_nodes not in (1, "1", None):
        raise LaunchError(
            f"`strategy=single` runs on one node, got `trainer.num_nodes={trainer.num_nodes}`. Leave it out, or choose"
            " `strategy=ddp`."
        )
    if single and trainer.devices not in (1, "1"):
        raise LaunchError(f"`strategy=single` uses one device, got `trainer.devices={trainer.devices}`. Leave it out.")


def _check_fractions(config: DictConfig, strategy: str, trainer: Trainer) -> None:
    fractions = config.data.get("train_fractions")
    if fractions is None:
        return
    check_fractions(fractions, trainer.world_size)
    if len(set(fractions)) > 1 and not isinstance(trainer.strategy, DDPJoinStrategy):
        raise LaunchError(
            f"`data.train_fractions={list(fractions)}` gives processes different numbers of batches, and"
            f" `strategy={strategy}` needs equally many. Use `strategy=ddp_join`."
        )


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
        return issubclass(target, ParallelStrategy) and not issubclass(target, BalancedDataParallelStrategy)
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
    return find_problems(os.environ, config.trainer.num_nodes, devices)


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
    check_gloo_variable(backend, settings.network_interface)
    place = _known_place(environment, settings.init_method)
    if place is not None and environment.node_rank() == 0 and environment.local_rank() == 0:
        check_endpoint(place, trainer.num_nodes)


def _known_place(environment: ClusterEnvironment, init_method: str | None) -> RendezvousEndpoint | None:
    """Return where ranks will meet; None if that is not chosen yet, or may still change."""
    if isinstance(environment, MPIEnvironment):  # to ask it is a collective operation
        return None
    place = parse_init_method(init_method)
    if place != RendezvousEndpoint():
        return place
    if "MASTER_PORT" not in os.environ and not isinstance(environment, ManualEnvironment):
        return None
    port, *others = rendezvous_ports(environment)
    return None if others else RendezvousEndpoint(environment.main_address, port)


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
