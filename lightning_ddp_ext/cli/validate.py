"""Validation of devices, objects and the launch, before a run starts."""

import os
from typing import Any, TypeVar

import torch
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_ddp_ext._devices import find_accelerator
from lightning_ddp_ext._import_names import lightning_of
from lightning_ddp_ext._lightning import NAME, AcceleratorRegistry, ParallelStrategy, SLURMEnvironment, Trainer
from lightning_ddp_ext._validation import check_integer
from lightning_ddp_ext.cli.settings import LaunchError, instantiate
from lightning_ddp_ext.clusters.environments import check_tasks, local_environment
from lightning_ddp_ext.clusters.launchers import find_launcher
from lightning_ddp_ext.demo.digits import check_fractions
from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy
from lightning_ddp_ext.strategies.connected import single_device_strategy
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy

_Part = TypeVar("_Part")

_MOST_PROCESSES = 1024  # of one node, on the CPU
_SINGLE = "single"
QUIET = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)


def prepare_config(config: DictConfig, choices: Any) -> None:
    """Fill in accelerator and devices, and refuse impossible ones; `choices` are the chosen options by group."""
    trainer = config.trainer
    single = choices.strategy == _SINGLE
    kind = find_accelerator()
    if trainer.accelerator is None:
        # Lightning knows no other accelerators, and MPS with its one device for one process only.
        trainer.accelerator = kind if kind in AcceleratorRegistry and (single or kind != "mps") else "cpu"
    if trainer.devices is None:
        uses_all = kind != "cpu" and trainer.accelerator in (kind, "gpu", "auto")
        trainer.devices = 1 if single else torch.accelerator.device_count() if uses_all else 2
    for key, unit in (("devices", "device"), ("num_nodes", "node")):
        if single and trainer[key] not in (1, "1", None):
            raise LaunchError(f"`strategy=single` uses one {unit}, got `trainer.{key}={trainer[key]}`. Leave it out.")
    devices = trainer.devices
    if trainer.accelerator == "cpu" and devices != "auto":
        number = int(devices) if isinstance(devices, str) and devices.strip().isdecimal() else devices
        remedy = "Use a number of processes or replicas on the CPU, such as 2."
        check_integer("trainer.devices", number, least=1, most=_MOST_PROCESSES, remedy=remedy)


def make(node: Any, key: str, kind: type[_Part]) -> _Part:
    """Instantiate the part of the configuration under `key`, which has to be a `kind`."""
    part = instantiate(node)
    if isinstance(part, kind):
        return part
    other, problem = lightning_of(type(part)), f"`{key}` makes a {type(part).__name__}"
    if other in (None, NAME):
        raise LaunchError(f"{problem}, not a {kind.__name__}. Set `{key}._target_` to the path of a class that is one.")
    raise LaunchError(
        f"{problem}, a class of `{other}`, and this run imports `{NAME}`. Set `lightning={other}`, and"
        " import one of them in model, data and callbacks."
    )


def make_all(entries: Any, group: str, kind: type[Any]) -> list[Any]:
    """Instantiate every entry of a group that is not null."""
    if not isinstance(entries, DictConfig):
        raise LaunchError(f"`{group}` must have a name for each entry, got {entries!r}. Use `{group}=none` for none.")
    named = {str(name): node for name, node in entries.items()}
    return [make(node, f"{group}.{name}", kind) for name, node in named.items() if node is not None]


def _is_local(config: DictConfig) -> bool:
    """Return True if the Trainer finds the cluster environment by itself, as it does without a plugin."""
    return str(config.cluster.get("_target_", local_environment.__name__)).endswith(local_environment.__name__)


def _make_plugins(config: DictConfig) -> list[Any] | None:
    """Return the Trainer's plugins with the cluster environment, if `cluster` is one."""
    plugins = config.trainer.plugins
    if _is_local(config):
        return plugins  # type: ignore[no-any-return]
    given = [] if plugins is None else list(plugins) if isinstance(plugins, ListConfig) else [plugins]
    given = [instantiate(plugin) if isinstance(plugin, DictConfig) else plugin for plugin in given]
    return [*given, instantiate(config.cluster)]


def make_trainer(config: DictConfig, strategy: Any, **options: Any) -> Trainer:
    """Construct the Trainer of a configuration with the plugins of its cluster; `options` override its settings."""
    # Lightning takes dictionaries and lists, not the containers of OmegaConf.
    trainer: Trainer = instantiate(
        config.trainer, _convert_="all", plugins=_make_plugins(config), strategy=strategy, **options
    )
    return trainer


def check_run(config: DictConfig, hydra: Any, trainer: Trainer) -> None:
    """Refuse a launch, shares of the data or a run folder that do not suit the Trainer; `hydra` is Hydra's settings."""
    strategy = str(hydra.runtime.choices.strategy)
    environment = getattr(trainer.strategy, "cluster_environment", None)
    _check_fractions(config, strategy, trainer)
    variable = None if trainer.world_size > 1 else find_launcher()
    if variable is not None:
        raise LaunchError(
            f"`strategy={strategy}` runs in one process, and a launcher has started `{variable}={os.environ[variable]}`"
            " processes. Start the command without the launcher or with one task, or choose `strategy=ddp_join` with"
            " the devices and nodes of all processes."
        )
    if trainer.world_size > 1:  # strategies of this package have made the same check
        has_address = config.strategy.get("init_method") is not None
        check_tasks(environment, num_nodes=trainer.num_nodes, devices=trainer.num_devices, has_address=has_address)
    folder: Any = OmegaConf.to_container(hydra.run, resolve=False)
    is_named_by_time = hydra.mode != RunMode.MULTIRUN and "${now:" in folder["dir"]
    if isinstance(environment, SLURMEnvironment) and _is_local(config) and is_named_by_time:
        raise LaunchError(
            "this is a task of a SLURM job: without `cluster=slurm`, each task and each start of the job would have a"
            " separate run folder and not find its checkpoints again. Add `cluster=slurm`, or set `hydra.run.dir=`."
        )


def _check_fractions(config: DictConfig, strategy: str, trainer: Trainer) -> None:
    fractions = config.data.get("train_fractions")
    if fractions is None:
        return
    if isinstance(trainer.strategy, BalancedDDPStrategy):
        raise LaunchError(
            f"`data.train_fractions={list(fractions)}` gives each process different data, and `strategy={strategy}`"
            " shares the batches of all data. Use `strategy.split` for fixed shares, or `strategy=ddp_join`."
        )
    check_fractions(fractions, trainer.world_size)
    if len(set(fractions)) > 1 and not isinstance(trainer.strategy, DDPJoinStrategy):
        raise LaunchError(
            f"`data.train_fractions={list(fractions)}` gives processes different numbers of batches, and"
            f" `strategy={strategy}` needs equally many. Use `strategy=ddp_join`."
        )


def has_process_group(config: DictConfig) -> bool:
    """Return True if the chosen strategy has one process per device; a function of a user may."""
    try:
        target = get_object(config.strategy.get("_target_"))
    except Exception:  # any error of the import; constructing the strategy raises it again
        return True
    if isinstance(target, type):
        return issubclass(target, ParallelStrategy) and not issubclass(target, BalancedDataParallelStrategy)
    return target is not single_device_strategy
