"""Turning what goes wrong before a run starts into one readable message."""

import difflib
from collections.abc import Iterable

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException


class LaunchError(Exception):
    """A run that cannot start; the message says why, and what would be valid."""


def describe(error: BaseException) -> str:
    """Explain an error of composing or instantiating a configuration.

    Args:
        error: What Hydra, OmegaConf or a constructor raised.

    Returns:
        One message that names the key and what would be valid.
    """
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
        return "a group is null. Leave it out for its default; `callbacks=none` and `logger=none` leave those out."
    return str(error) or type(error).__name__


def _describe_omegaconf(error: OmegaConfBaseException) -> str:
    if isinstance(error, MissingMandatoryValue):
        return f"`{error.full_key}` has no value. Set it with `{error.full_key}=...`."
    if isinstance(error, ConfigKeyError | AttributeError) and error.parent_node is not None:
        keys = [str(key) for key in error.parent_node if key not in ("_target_", "hydra")]
        if not keys:
            group = str(error.full_key).partition(".")[0]
            return (
                f"`{error.full_key}` is not a setting, because nothing is chosen for `{group}` that has any."
                f" Choose an option first, `{group}=...`, or add a new key, `+{error.full_key}=...`."
            )
        return f"`{error.full_key}` is not a setting.{_suggest(str(error.key), keys)} Valid: {_listed(sorted(keys))}."
    return f"`{error.full_key}`: {_first_line(error)}." if error.full_key else f"{_first_line(error)}."


def _describe_instantiation(error: InstantiationException) -> str:
    lines = str(error).splitlines()
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reason = lines[0] if isinstance(cause, InstantiationException) else str(cause) or type(cause).__name__
    return f"in `{key}`: {reason}" if key else reason


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _suggest(wrong: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(wrong, list(valid), n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
