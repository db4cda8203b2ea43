"""One readable message for every error before a run starts."""

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
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from lightning_ddp_ext._import_names import LIBRARIES

_SETTINGS, _LETTERS = 8, 100  # largest number of settings in a message, and of letters of each


class LaunchError(Exception):
    """A run that cannot start; the message gives the reason and a remedy."""


_SENTENCES = (HydraException, ImportError, LaunchError, OSError, RuntimeError, TypeError, ValueError)


def describe(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """Return one line about an error of the configuration or of the launch, for a command with these arguments."""
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
        return f"`{group}={option}` does not exist.{_suggest(option, error.options)} Valid: {', '.join(error.options)}."
    if isinstance(error, OverrideParseException):
        return f"`{error.override}` is not a valid override. Write `key=value`, with lists as `key=[1,2]`."
    if isinstance(error, InstantiationException):
        return _describe_instantiation(error)
    if isinstance(error, OmegaConfBaseException):
        return _describe_omegaconf(error)
    if isinstance(error, ConfigCompositionException) and isinstance(error.__cause__, OmegaConfBaseException):
        return _describe_omegaconf(error.__cause__)
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
        return f"`{error.full_key}` is not a setting.{_suggest(str(error.key), keys)} Valid: {', '.join(sorted(keys))}."
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
    """List the options of a packaged group, in parentheses."""
    folder = importlib.resources.files("lightning_ddp_ext.conf").joinpath(group)
    options = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir()) if folder.is_dir() else []
    return f" ({', '.join(options)})" if options else ""
