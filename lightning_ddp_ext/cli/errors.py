"""Turning what goes wrong before a run starts into one readable message."""

import difflib
import importlib.resources
from collections.abc import Iterable, Sequence

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

_SETTINGS, _SHOWN = 8, 100  # settings in a message, and letters of each


class LaunchError(Exception):
    """A run that cannot start; the message says why, and what would be valid."""


_SENTENCES = (
    HydraException, ImportError, LaunchError, MisconfigurationException, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def describe(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """Explain an error of composing or instantiating a configuration, or of starting a run.

    Args:
        error: What Hydra, OmegaConf, a constructor or Lightning raised.
        arguments: Those of the command, to name them if the error names none.

    Returns:
        One line that names the key and what would be valid.
    """
    message = " ".join([_describe(error), *getattr(error, "__notes__", ())])
    return _name_settings(" ".join(message.split()), arguments)


def _name_settings(message: str, arguments: Sequence[str]) -> str:
    """Put what was set in front of a message that names none of it."""
    given = [text for text in arguments if text[:1] != "-" and ("=" in text or text[:1] == "~")]
    given = [text for text in given if not text.lstrip("+~").startswith("hydra.")]
    # The choice of a group is named by most messages, and seldom what is wrong if there is a setting, too.
    for text in [text for text in given if "." in _key(text)] or given:
        key = _key(text)
        if f"`{key}" in message or f"`{key.rpartition('.')[2]}" in message or ("." in key and key in message):
            return message
    shown = ", ".join(f"`{text[:_SHOWN]}`" for text in given[-_SETTINGS:])
    return f"with {shown}: {message}" if given else message


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def _describe(error: BaseException) -> str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"`{group}={option}` does not exist.{_suggest(option, error.options)} Valid: {_listed(error.options)}."
    if isinstance(error, OverrideParseException):
        return f"`{error.override}` is not a valid override. Write `key=value`, with lists as `key=[1,2]`."
    if isinstance(error, InstantiationException):
        return _describe_instantiation(error)
    if isinstance(error, OmegaConfBaseException):
        return _describe_omegaconf(error)
    if isinstance(error, ConfigCompositionException) and isinstance(error.__cause__, OmegaConfBaseException):
        return _describe_omegaconf(error.__cause__)
    if isinstance(error, HydraException):
        return str(error)
    if "Config group override must be a string" in str(error):
        # Hydra does not say which.
        return (
            "a group is null or a number. Leave it out for its default; callbacks and loggers have the option `none`."
        )
    return _text(error)


def _text(error: BaseException) -> str:
    """Return what an error says; the words of some are only a key or a number."""
    text = str(error)
    if not text:
        return type(error).__name__
    return text if isinstance(error, _SENTENCES) else f"{type(error).__name__}: {text}"


def _describe_omegaconf(error: OmegaConfBaseException) -> str:
    if isinstance(error, MissingMandatoryValue):
        return f"`{error.full_key}` has no value. Set it with `{error.full_key}=...`."
    if isinstance(error, ConfigKeyError | AttributeError) and error.parent_node is not None:
        keys = [str(key) for key in error.parent_node if key not in ("_target_", "_convert_", "hydra")]
        if not keys:
            group = str(error.full_key).partition(".")[0]
            return (
                f"`{error.full_key}` is not a setting, because nothing is chosen for `{group}` that has any."
                f" Choose an option first, `{group}=...`{_options(group)}, or add a new key, `+{error.full_key}=...`."
            )
        return f"`{error.full_key}` is not a setting.{_suggest(str(error.key), keys)} Valid: {_listed(sorted(keys))}."
    return f"`{error.full_key}`: {_first_line(error)}." if error.full_key else f"{_first_line(error)}."


def _describe_instantiation(error: InstantiationException) -> str:
    lines = str(error).splitlines()
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reason = lines[0] if isinstance(cause, InstantiationException) else _text(cause)
    return f"in `{key}`: {reason}" if key else reason


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _suggest(wrong: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(wrong, list(valid), n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


def _options(group: str) -> str:
    """List the options of a packaged group, in brackets."""
    folder = importlib.resources.files("lightning_ddp_ext.conf").joinpath(group)
    options = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir()) if folder.is_dir() else []
    return f" ({_listed(options)})" if options else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
