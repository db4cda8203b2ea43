"""What comes before every run, and is the same for training and for `doctor`: settings filled in, mistakes refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from omegaconf import DictConfig, ListConfig

from lightning_ddp_ext.cli.checks import check_hosts, check_settings
from lightning_ddp_ext.cli.preflight import check_folder, check_launcher, check_single_tasks, has_process_group
from lightning_ddp_ext.cli.problems import LaunchError
from lightning_ddp_ext.data.fraction_sampler import check_fractions
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy

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
