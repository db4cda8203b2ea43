"""Messages and tables on a terminal that may show a progress bar."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lightning_ddp_ext._import_names import NAMES
from lightning_ddp_ext._lightning import rank_zero_info as log_on_rank_zero

if TYPE_CHECKING:
    from rich.table import Table


@contextmanager
def above_progress_bar() -> Iterator[None]:
    """Write to stdout, stderr and the log above a progress bar, if one is shown."""
    # While Rich shows a bar, it has replaced `sys.stderr`, but handlers of loggers still write to the stream before.
    replaced = getattr(sys.stderr, "rich_proxied_file", None)
    handlers = [one for name in ("", *NAMES) for one in logging.getLogger(name).handlers]
    moved = [one for one in handlers if isinstance(one, logging.StreamHandler) and one.stream is replaced is not None]
    for handler in moved:
        handler.setStream(sys.stderr)
    try:
        with tqdm.external_write_mode(file=sys.stderr):
            yield
    finally:
        for handler in moved:
            handler.setStream(replaced)


def print_table(table: "Table") -> None:
    """Print a table through the console of Rich's bar, which would overwrite the lines of another console."""
    import rich

    with above_progress_bar():
        rich.get_console().print(table)


def logged_numbers(trainer: Any) -> dict[str, float]:
    """Return the logged values of a run that are single numbers."""
    return {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}


def rank_zero_info(message: str) -> None:
    """Log a message on rank 0, as Lightning's function does, above a progress bar."""
    with above_progress_bar():
        log_on_rank_zero(message)


_started: set[str] = set()  # lines that this session has logged


def log_start(division: str, meaning: str | None) -> None:
    """Log how a strategy divides batches and, if it fits, the `meaning` of the loss, once for all runs of a session."""
    line = division if meaning is None else f"{division} The loss is taken for {meaning}; `GradientCheck` verifies it."
    if line not in _started:
        _started.update((division, line))
        rank_zero_info(line)
