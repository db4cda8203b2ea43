"""What the ranks of test_run_processes.py run.

A module of its own, because every rank imports the module of its function: nothing here may import Lightning, and
torch only where it is used.
"""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def rank() -> int:
    return int(os.environ["RANK"])


def collect_call(*args: object, **kwargs: object) -> tuple[int, tuple[object, ...], dict[str, object]]:
    return rank(), args, kwargs


def collect_environment() -> dict[str, str]:
    return dict(os.environ)


def collect_modules() -> list[str]:
    return list(sys.modules)


def collect_origin() -> tuple[int, list[str]]:
    return os.getppid(), list(sys.modules)


def draw() -> tuple[float, float]:
    import numpy as np

    return random.random(), np.random.random()


def print_lines(count: int) -> None:
    for line in range(count):
        print(f"line {line} of rank {rank()}")


def all_reduce_ranks() -> float:
    dist, value = _init_gloo()
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def raise_while_rank_0_waits() -> None:
    dist, value = _init_gloo()
    if rank() == 0:
        dist.all_reduce(value)
    print("about to fail")
    raise LookupError("no such batch")


def hang_in_all_reduce() -> None:
    dist, value = _init_gloo()
    if rank() == 0:
        print("entering the collective")
        dist.all_reduce(value)
    sleep_forever()


def _init_gloo() -> tuple[ModuleType, "Tensor"]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist, torch.tensor(float(rank() + 1))


def sleep_forever() -> None:
    while True:
        time.sleep(60)


def sleep_in_c() -> None:
    ctypes.PyDLL(None).sleep(60)  # PyDLL, other than CDLL, keeps the interpreter lock


def raise_in_order(delays: dict[int, float]) -> None:
    time.sleep(delays[rank()])
    raise KeyError(f"key of rank {rank()}")


def raise_but_stay() -> None:
    if rank() == 1:
        threading.Thread(target=sleep_forever).start()
        raise LookupError("no such batch")
    sleep_forever()


def exit_with(code: int) -> None:
    if rank() == 1:
        sys.exit(code)


def leave_before_returning() -> None:
    os._exit(0)


def kill_rank_1(signal_number: int) -> None:
    if rank() == 1:
        print("last words")
        os.kill(os.getpid(), signal_number)
    sleep_forever()


def stop_rank_0() -> None:
    if rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


def return_but_stay() -> str:
    threading.Thread(target=sleep_forever).start()
    return "done"


def return_lambda() -> Callable[[], None]:
    return lambda: None


def record_pids(folder: Path, new_group: bool = False) -> None:
    """Start a grandchild, leave both process ids in a file, and return."""
    grandchild = subprocess.Popen(["sleep", "1000"], preexec_fn=os.setpgrp if new_group else None)
    draft = folder / f"{rank()}.draft"
    draft.write_text(f"{os.getpid()} {grandchild.pid}")
    draft.rename(folder / f"{rank()}.pids")
    grandchild.returncode = 0  # or Python would warn, rightly, that it still runs


def record_pids_and_hang(folder: Path) -> None:
    record_pids(folder)
    sleep_forever()


class Unloadable:
    """Can be pickled, but not back."""

    def __reduce__(self) -> tuple[object, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("refused")


def return_unloadable() -> Unloadable:
    return Unloadable()


def print_lines_and_fail(count: int) -> None:
    print_lines(count)
    sys.exit(1)


def print_and_hang() -> None:
    print(f"waiting on rank {rank()}")
    sleep_forever()
