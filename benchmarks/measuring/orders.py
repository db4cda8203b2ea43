"""The contender's end of the line: wait for an order, carry it out, reply."""

import faulthandler
import json
import logging
import os
import statistics
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

HARD_LIMIT = 120.0  # seconds; start-up takes about 5 and an order about 1, more on a machine that is busy
WARM_UP = 5  # steps after each rest that are not counted: caches were others' meanwhile


class Orders:
    """Orders are lines of JSON on the standard input, replies are lines of JSON on the standard output."""

    def __init__(self) -> None:
        # Whatever libraries print goes to the errors, so that it cannot end up between the replies.
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")

    def wait(self) -> dict[str, Any]:
        """Sleep until an order comes; without anybody left to give one, the process ends."""
        faulthandler.cancel_dump_traceback_later()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # in the midst of training: an orderly end would wait for other ranks
        # Carrying out an order may hang, as a rank does whose peer is gone; sleeping cannot.
        faulthandler.dump_traceback_later(HARD_LIMIT, exit=True)
        order: dict[str, Any] = json.loads(line)
        return order

    def reply(self, seconds: Sequence[float]) -> None:
        """Report the time of each step that counts."""
        reply = {
            "steps": len(seconds),
            "mean": statistics.fmean(seconds),
            "median": statistics.median(seconds),
            "longest": max(seconds),
        }
        print(json.dumps(reply), file=self._replies, flush=True)

    def serve(self, carry_out: Callable[..., None]) -> NoReturn:
        """Carry out each order as `carry_out(self, **order)`; an error ends the process."""
        while True:
            order = self.wait()
            try:
                carry_out(self, **order)
            except Exception:
                traceback.print_exc()
                os._exit(1)  # an orderly end may wait for collectives of other ranks
