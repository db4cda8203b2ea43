"""Settings that Lightning refuses late, deep inside, or without saying which: checked before anything is built."""

import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from hydra.utils import instantiate
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from lightning_ddp_ext.arguments import check_choice, check_integer, check_number
from lightning_ddp_ext.cli.problems import LaunchError

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
