"""Checks of settings that need neither torch nor Lightning, whose import would delay the message by seconds."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_ddp_ext._import_names import PACKAGE
from lightning_ddp_ext._validation import check_choice, check_integer, check_number
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule
from lightning_ddp_ext.cli.errors import LaunchError

_DEFAULT = "Leave it out for the default."
_LAST_SEED = 2**32 - 1  # of NumPy
# Smaller values pass the Trainer's own checks, and then train wrongly or divide by zero.
_LEAST = {"accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "gradient_clip_val": 0, "log_every_n_steps": 0}
_ONE_PROCESS = ("balanced_dp", "single")


def check_settings(config: DictConfig, choices: Any) -> None:
    """Refuse settings that no device makes right; `choices` are the chosen options by group."""
    _check_groups(config, choices)
    trainer = config.trainer
    check_integer("seed", config.seed, most=_LAST_SEED, remedy=_DEFAULT)
    for name, least in _LEAST.items():
        if trainer.get(name) is not None:
            check_number(f"trainer.{name}", trainer[name], least=least, remedy=_DEFAULT)
    if trainer.get("val_check_interval") == 0:
        raise ValueError(f"`trainer.val_check_interval` must be above 0, got 0. {_DEFAULT}")
    for group in ("strategy", "model", "data", "callbacks"):
        if isinstance(config[group], DictConfig):
            _check_arguments(config[group], group)


def _check_groups(config: DictConfig, choices: Any) -> None:
    path = config.ckpt_path
    if path not in (None, "last", "best", "hpc") and "://" not in path and not Path(path).exists():
        raise LaunchError(f"`ckpt_path={path}` does not exist. Give the path of a checkpoint, or `last`.")
    for key in {"strategy", "callbacks", "logger"} & set(config.trainer):
        raise LaunchError(f"`trainer.{key}` has no effect. Use the group `{key}` instead.")
    for group, key in {"network": "network_interface", "process_group": "process_group_backend"}.items():
        if config[group] is not None and key not in config.strategy:
            lacks = f"runs in one process and has no {group.replace('_', ' ')}"
            reason = lacks if choices.strategy in _ONE_PROCESS else f"takes no `{key}`"
            raise LaunchError(
                f"`{group}={choices[group]}` is set, but `strategy={choices.strategy}` {reason}. Leave it out, or"
                " choose `strategy=ddp` or `strategy=fsdp`."
            )


def _check_arguments(node: DictConfig, place: str) -> None:
    """Check the arguments of this package's classes that are one of a few strings, and the division of batches."""
    # Training has resolved all interpolations. `doctor` has no run folder, to which some of them refer.
    keys = [str(key) for key in node]
    values = {
        key: node[key] for key in keys if not (OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key))
    }
    schema = OmegaConf.get_type(node)
    if is_dataclass(schema) and str(values.get("_target_")).startswith(f"{PACKAGE}."):
        try:
            if place == "strategy":
                ChunkRule(values.get("gpu0_batch_size"), values.get("split"), values.get("balance"))
            for one in fields(schema):
                if values.get(one.name) is not None and (choices := one.metadata.get("choices")):
                    check_choice(one.name, values[one.name], choices, _DEFAULT)
        except (TypeError, ValueError) as error:
            raise type(error)(f"in `{place}`: {error}") from error
    for key, value in values.items():
        if isinstance(value, DictConfig):
            _check_arguments(value, f"{place}.{key}")
