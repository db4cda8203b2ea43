"""Checks of arguments, shared by all constructors: a TypeError or ValueError names the argument and a remedy."""

import difflib
import inspect
import math
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from numbers import Integral, Real
from typing import Any

_LONGEST = timedelta(days=365)  # torch keeps time limits in 64-bit nanoseconds, at most 292 years
_LARGEST_BUCKET = 2**20  # MiB


def check_integer(name: str, value: object, *, least: int = 0, most: int | None = None, remedy: str) -> None:
    """Check an integer between `least` and `most`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be an integer, got {value!r}. {remedy}")
    _check_range(name, value, least, most, remedy)


def check_number(name: str, value: object, *, least: float = 0.0, most: float | None = None, remedy: str) -> None:
    """Check a finite number between `least` and `most`."""
    if not _is_number(value):
        raise TypeError(f"`{name}` must be a number, got {value!r}. {remedy}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"`{name}` must be a finite number, got {value!r}. {remedy}")
    _check_range(name, value, least, most, remedy)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_range(name: str, value: Any, least: float, most: float | None, remedy: str) -> None:
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value!r}. {remedy}")
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be at most {most}, got {value!r}. {remedy}")


def check_choice(name: str, value: object, choices: Sequence[str], remedy: str) -> None:
    """Check a string that has to be one of a few."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}. {remedy}")


def check_flag(name: str, value: object) -> None:
    """Check a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}. Leave it out for its default.")


def check_text(name: str, value: object) -> None:
    """Check an optional string."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, got {value!r}. Leave it out for its default.")


def check_path(name: str, value: object) -> None:
    """Check the optional path of a file to write."""
    if value is None:
        return
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"`{name}` must be a path, got {value!r}. Leave it out to write no file.")
    if not os.fspath(value) or os.path.isdir(value):
        raise ValueError(f"`{name}` must be the path of a file, got {str(value)!r}. Leave it out to write no file.")


def as_timeout(name: str, value: object) -> timedelta:
    """Return a time limit of up to a year, given as a timedelta or a number of seconds."""
    remedy = "Use for example `timedelta(minutes=30)`, or 1800 seconds."
    seconds: Any = value.total_seconds() if isinstance(value, timedelta) else value
    if not _is_number(seconds):
        raise TypeError(f"`{name}` must be a timedelta or a number of seconds, got {value!r}. {remedy}")
    if not 0 < seconds <= _LONGEST.total_seconds():
        raise ValueError(f"`{name}` must be above 0 seconds and at most {_LONGEST.days} days, got {value!r}. {remedy}")
    return value if isinstance(value, timedelta) else timedelta(seconds=float(seconds))


def check_host(name: str, value: object, remedy: str) -> None:
    """Check the name or address of a host, without resolving it."""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, got {value!r}. {remedy}")
    wrong = f"`{name}` must be the name or address of a host, got {value!r}"
    try:
        value.encode("idna")  # as the resolver will; an address passes as well
    except UnicodeError as error:
        raise ValueError(f"{wrong} ({error}). {remedy}") from error
    if not value or any(character.isspace() or not character.isprintable() for character in value):
        raise ValueError(f"{wrong}. {remedy}")


def check_bucket_cap(value: object) -> None:
    """Check a `bucket_cap_mb`, up to a tebibyte."""
    remedy = "Use 25, the default."
    if not _is_number(value):
        raise TypeError(f"`bucket_cap_mb` must be a number of MiB, got {value!r}. {remedy}")
    number: Any = value
    if not 0 < number <= _LARGEST_BUCKET:
        raise ValueError(f"`bucket_cap_mb` must be above 0 MiB and at most {_LARGEST_BUCKET}, got {value}. {remedy}")


_NOT_NEEDED = {
    "find_unused_parameters": "unused parameters are found in every step",
    "static_graph": "nothing is assumed about the graph",
    "gradient_as_bucket_view": "gradients are views of the buckets already",
    "broadcast_buffers": "buffers are equal after every step already",
}


def argument_names(kind: type) -> set[str]:
    """Return the names of the arguments that the constructors of a class and its bases have."""
    # Constructors pass `**options` on to the ones that they inherit.
    found = [one for base in kind.__mro__[:-1] for one in inspect.signature(base).parameters.values()]
    return {one.name for one in found if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}


def refuse_unknown(unknown: Iterable[str], strategy: type) -> None:
    """Refuse unknown arguments of a strategy, with the name that was probably meant."""
    for name in unknown:
        if name in _NOT_NEEDED:
            raise TypeError(f"`{name}` is not needed: {_NOT_NEEDED[name]}. Delete the argument.")
        remedy = suggest(name, sorted(argument_names(strategy) - {name})) or " See the documentation of its arguments."
        raise TypeError(f"`{name}` is not an argument of this strategy.{remedy}")


# Arguments that not all strategies have, and the strategies that have them.
_OWNERS = dict.fromkeys(("balance", "gpu0_batch_size", "split"), "strategies `balanced_dp` and `balanced_ddp`")
_OWNERS |= dict.fromkeys(("cost", "virtual_ranks"), "strategy `balanced_ddp`")
_OWNERS["uneven_inputs"] = "strategy `ddp_join`"


def suggest(wrong: str, valid: Iterable[str]) -> str:
    """Return a question for the name that was probably meant, or the strategies that have it, or nothing."""
    names = list(valid)
    if wrong in _OWNERS:
        return f" It is an argument of the {_OWNERS[wrong]}."
    close = [name for name in names if name.endswith(f"_{wrong}")] or difflib.get_close_matches(wrong, names, n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


def as_number(value: Any) -> float:
    """Return a number of any type as a float, and nan for anything else."""
    if isinstance(value, str | bytes):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last one for several numbers
        return math.nan
