"""Settings of the command: checks before torch is imported, which takes seconds, and one message per error."""

import difflib
import errno
import importlib.resources
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import utils
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from lightning_ddp_ext._import_names import LIBRARIES, PACKAGE
from lightning_ddp_ext._validation import check_choice, check_integer, check_number, suggest
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule

_SETTINGS, _LETTERS = 8, 100  # largest number of settings in a message, and of letters of each


class LaunchError(Exception):
    """A run that cannot start; the message gives the reason and a remedy."""


def instantiate(node: Any, **options: Any) -> Any:
    """Construct the object that a node of the configuration describes, with further arguments.

    Hydra 1.4 asks which targets are trusted: all, since users choose the configuration, which may name their classes.
    """
    trusted = getattr(utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", None)
    return utils.instantiate(node, **options, **({} if trusted is None else {"_execution_whitelist_": trusted}))


_SENTENCES = (HydraException, ImportError, LaunchError, OSError, RuntimeError, TypeError, ValueError)


def describe(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """Return one line about an error of the configuration or of the launch, for a command with these arguments."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"a disk is full: {error}. Free some space, or choose another run folder with `hydra.run.dir=...`."
    message = " ".join([_describe(error), *getattr(error, "__notes__", ())])
    return _name_settings(" ".join(message.split()), arguments)


def _name_settings(message: str, arguments: Sequence[str]) -> str:
    """Prepend the settings of the command to a message that names none of them."""
    given = [text for text in arguments if text[:1] != "-" and ("=" in text or text[:1] == "~")]
    given = [text for text in given if not text.lstrip("+~").startswith("hydra.")]
    # Most messages name the chosen option of a group, which is seldom wrong if there are settings, too.
    for text in [text for text in given if "." in _key(text)] or given:
        key = _key(text)
        if f"`{key}" in message or f"`{key.rpartition('.')[2]}" in message or ("." in key and key in message):
            return message
    shown = ", ".join(f"`{text[:_LETTERS]}`" for text in given[-_SETTINGS:])
    return f"with {shown}: {message}" if given else message


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def _describe(error: BaseException) -> str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"`{group}={option}` does not exist.{suggest(option, error.options)} Valid: {', '.join(error.options)}."
    if isinstance(error, OverrideParseException):
        meant = suggest(str(error.override), ["doctor"])
        return f"`{error.override}` is not a valid override.{meant} Write `key=value`, with lists as `key=[1,2]`."
    if isinstance(error, InstantiationException):
        return _describe_instantiation(error)
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) else error
    if isinstance(cause, OmegaConfBaseException):
        return _describe_omegaconf(cause)
    if "Config group override must be a string" in str(error):
        # Hydra does not name the group, so that `describe` prepends the settings.
        return "a group is null or a number. Leave it out for its default; callbacks and logger also take `none`."
    return _text(error)


def _text(error: BaseException) -> str:
    """Return the message of an error, with its type unless the message is a sentence."""
    text = str(error)
    if not text:
        return type(error).__name__
    is_lightnings = type(error).__module__.partition(".")[0] in LIBRARIES
    return text if is_lightnings or isinstance(error, _SENTENCES) else f"{type(error).__name__}: {text}"


def _describe_omegaconf(error: OmegaConfBaseException) -> str:
    if isinstance(error, MissingMandatoryValue):
        return f"`{error.full_key}` has no value. Set it with `{error.full_key}=...`."
    if isinstance(error, ConfigKeyError | AttributeError) and error.parent_node is not None:
        keys = [str(key) for key in error.parent_node if key not in ("_target_", "_convert_", "hydra")]
        if not keys:
            group = str(error.full_key).partition(".")[0]
            return (
                f"`{error.full_key}` is not a setting, because no option with settings is chosen for `{group}`."
                f" Choose an option first, `{group}=...`{_options(group)}, or add a new key, `+{error.full_key}=...`."
            )
        meant = _suggest_setting(str(error.key), keys, error.parent_node)
        return f"`{error.full_key}` is not a setting.{meant} Valid: {', '.join(sorted(keys))}."
    return f"`{error.full_key}`: {_first_line(error)}." if error.full_key else f"{_first_line(error)}."


def _describe_instantiation(error: InstantiationException) -> str:
    lines = str(error).splitlines()
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reason = lines[0] if isinstance(cause, InstantiationException) else _text(cause)
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        module, _, name = cause.name.rpartition(".")
        known = dir(sys.modules.get(module)) if module else [one.name for one in pkgutil.iter_modules(["."])]
        reason = f"{f'`{module}` has no `{name}`' if module else reason}.{suggest(name, known)}"
    return f"in `{key}`: {reason}" if key else reason


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")


# Names that other programs have for settings of this command.
_SYNONYMS = {"checkpoint": "ckpt_path", "epochs": "max_epochs", "gpus": "devices", "lr": "learning_rate"}
_SYNONYMS |= {"resume": "ckpt_path", "steps": "max_steps"}


def _suggest_setting(wrong: str, keys: Sequence[str], config: Any) -> str:
    """Suggest one of the keys of a node of the configuration, or the full name of a setting in a group below it."""
    names = {path.rpartition(".")[2]: path for path in _list_settings(OmegaConf.to_container(config))}
    meant = _SYNONYMS.get(wrong, wrong)
    close = [meant] if meant in names else difflib.get_close_matches(meant, names, n=1)
    below = f" Did you mean `{names[close[0]]}`?" if close else ""
    return below if meant in names else suggest(wrong, keys) or below


def _list_settings(config: Any, prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict) and key != "hydra":
            yield from _list_settings(value, f"{prefix}{key}.")
        elif key[:1] != "_":
            yield f"{prefix}{key}"


def _options(group: str) -> str:
    """List the options of a packaged group, in parentheses."""
    folder = importlib.resources.files("lightning_ddp_ext.conf").joinpath(group)
    options = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir()) if folder.is_dir() else []
    return f" ({', '.join(options)})" if options else ""


_DEFAULT = "Leave it out for the default."
_LAST_SEED = 2**32 - 1  # of NumPy
# Smaller values pass the Trainer's own checks, and then train wrongly or divide by zero.
_LEAST = {"accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "gradient_clip_val": 0, "log_every_n_steps": 0}
_ONE_PROCESS = ("balanced_dp", "single")
_DEMO = f"{PACKAGE}.demo."


def check_settings(config: DictConfig, hydra: Any) -> None:
    """Refuse settings that no device makes right; `hydra` is Hydra's settings."""
    _check_groups(config, hydra.runtime.choices, hydra.overrides.task)
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


def _check_groups(config: DictConfig, choices: Any, overrides: Sequence[str]) -> None:
    path = config.ckpt_path
    if path not in (None, "last", "best", "hpc") and "://" not in path and not Path(path).exists():
        raise LaunchError(f"`ckpt_path={path}` does not exist. Give the path of a checkpoint, or `last`.")
    # The models of the package and their data are in the same module.
    model, data = (str(OmegaConf.select(config, f"{group}._target_")).rpartition(".")[0] for group in ("model", "data"))
    is_packaged, is_chosen = model.startswith(_DEMO), choices.get("experiment") or "data" in map(_key, overrides)
    if model != data and data.startswith(_DEMO) and (is_packaged or not is_chosen):
        suitable = "digits" if model.endswith("digits") else "stdlib_text"
        raise LaunchError(
            f"`model={choices.model}` cannot train on `data={choices.data}`. Add `data={suitable}`, or choose another"
            " model."
            if is_packaged
            else f"`model._target_={config.model._target_}` would train on `data={choices.data}`, the default. Add"
            f" `data=custom data._target_=...` with the path of your class, or `data={choices.data}` to train on it."
        )
    for key in {"strategy", "callbacks", "logger"} & set(config.trainer):
        raise LaunchError(f"`trainer.{key}` has no effect. Use the group `{key}` instead.")
    for group, key in {"network": "network_interface", "process_group": "process_group_backend"}.items():
        if config[group] is not None and key not in config.strategy:
            lacks = f"runs in one process and has no {group.replace('_', ' ')}"
            reason = lacks if choices.strategy in _ONE_PROCESS else f"takes no `{key}`"
            raise LaunchError(
                f"`{group}={choices[group]}` is set, but `strategy={choices.strategy}` {reason}. Leave it out, or"
                " choose `balanced_ddp`, `ddp_checkpoint` or `ddp_join`, which have a process for each device."
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
