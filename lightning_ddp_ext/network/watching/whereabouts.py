"""Where the main thread of this process is, seen from another thread."""

import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_OURS = "lightning_ddp_ext"
_PARALLEL = f"{_OURS}.parallel."
_WAITING = (_PARALLEL, f"{_OURS}.data.")  # code of ours that waits for ranks without a function of torch
_COLLECTIVES = "torch.distributed.distributed_c10d"
_LIBRARIES = {"torch", "lightning", "torchmetrics", _OURS}
_ENTRY = ("lightning.pytorch.trainer.call", "_call_and_handle_interrupt")  # what is outside says nothing

_Line = tuple[FrameType, int]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread is.

    Attributes:
        collective: The function of `torch.distributed` that it is in, or what of ours waits there; empty elsewhere.
        code: Functions around it with files and lines, the innermost first.
        waits: Whether it can only be waiting for other ranks, or be about to.
    """

    collective: str
    code: str
    waits: bool = False

    def __str__(self) -> str:
        is_said = self.code.startswith(f"{self.collective} (")
        return " <- ".join(part for part in ("" if is_said else self.collective, self.code) if part)


def find_main_thread() -> Place:
    """Return where the main thread is. It is not stopped for that, and may be elsewhere by now."""
    return find_place(_main_frame())


def describe_main_stack() -> str:
    """Return the Python stack of the main thread below the Trainer's entry, the innermost call last."""
    lines = list(_walk(_main_frame()))
    return "".join(traceback.StackSummary.extract(iter(lines[::-1])).format())


def find_place(frame: FrameType | None) -> Place:
    """Return where a thread is.

    Args:
        frame: Its innermost frame.
    """
    return _make_place(list(_walk(frame)))


def find_error(error: BaseException) -> Place:
    """Return where an error was raised."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return _make_place(frames[::-1])


def _make_place(frames: list[_Line]) -> Place:
    collective = ""
    waits = bool(frames) and (_module(frames[0]) == _COLLECTIVES or _module(frames[0]).startswith(_PARALLEL))
    while frames and _module(frames[0]).split(".")[0] == "torch":
        inner = frames.pop(0)
        # The outermost function is the one that was called: an `all_gather_object` is made of several collectives.
        if _module(inner).startswith("torch.distributed") and _function(inner) != "wrapper":
            collective = _function(inner)
    if not frames:
        return Place(collective, "", waits)
    if not collective and _module(frames[0]).startswith(_WAITING):
        collective = _function(frames[0])
    shown = frames[:2]
    user = next((outer for outer in frames if _is_users(outer)), None)
    if user is not None and user not in shown:
        shown = [frames[0], user]
    return Place(collective, " <- ".join(map(_describe, shown)), waits)


def _walk(frame: FrameType | None) -> Iterator[_Line]:
    while frame is not None and (_module((frame, 0)), frame.f_code.co_name) != _ENTRY:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _main_frame() -> FrameType | None:
    identity = threading.main_thread().ident
    return None if identity is None else sys._current_frames().get(identity)


def _module(line: _Line) -> str:
    return str(line[0].f_globals.get("__name__", ""))


def _function(line: _Line) -> str:
    return line[0].f_code.co_name


def _is_users(line: _Line) -> bool:
    root = _module(line).split(".")[0]
    return root not in _LIBRARIES and root not in sys.stdlib_module_names


def _describe(line: _Line) -> str:
    return f"{_function(line)} ({Path(line[0].f_code.co_filename).name}:{line[1]})"
