"""The contender's end of the line: wait for an order, carry it out, reply."""

import faulthandler
import importlib
import logging
import os
import statistics
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

HARD_LIMIT = 120.0  # seconds; start-up takes about 5 and an order about 1, more on a machine that is busy
WARM_UP = 5  # steps after each rest that are not counted: caches were others' meanwhile
_LOOK = 5.0  # seconds after which a resting process looks whether anybody is left to give orders


class Orders:
    """Orders and replies are dictionaries that travel over a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._parent = pipe, os.getppid()

    def wait(self) -> dict[str, Any]:
        """Sleep until an order comes; without anybody left to give one, the process ends."""
        faulthandler.cancel_dump_traceback_later()
        while not self._pipe.poll(_LOOK):
            if os.getppid() != self._parent:
                os._exit(0)  # in the midst of training: an orderly end would wait for other ranks
        # Carrying out an order may hang, as a rank does whose peer is gone; sleeping cannot.
        faulthandler.dump_traceback_later(HARD_LIMIT, exit=True)
        order: dict[str, Any] = self._pipe.recv()
        return order

    def reply(self, seconds: Sequence[float]) -> None:
        """Report the time of each step that counts."""
        times = {"mean": statistics.fmean(seconds), "median": statistics.median(seconds), "longest": max(seconds)}
        self._pipe.send({"steps": len(seconds), **times})


def serve(
    carry_out: Callable[..., None], pipe: Connection, errors: int, environment: Mapping[str, str], tree: Path | None
) -> NoReturn:
    """Carry out each order as `carry_out(orders, **order)` in a process of its own; an error ends the process.

    The file descriptor `errors` takes all output; `tree` holds the package to be used, if it has not been imported.
    """
    os.setsid()  # Ctrl-C ends the parent, and the parent this
    for stream in (1, 2):
        os.dup2(errors, stream)
    sys.stdout = sys.stderr = os.fdopen(errors, "w", buffering=1)
    os.environ.update(environment)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        if tree is not None:
            sys.path.insert(0, str(tree))
            package = importlib.import_module("lightning_ddp_ext")
            if Path(str(package.__file__)).parents[1] != tree:
                raise RuntimeError(f"the package was imported from {package.__file__}, not from {tree}")
        orders = Orders(pipe)
        while True:
            carry_out(orders, **orders.wait())
    except Exception:
        traceback.print_exc()
    os._exit(1)  # an orderly end may wait for collectives of other ranks
