"""A process that has imported modules, and forks ranks that find them imported.

Started by its path and limited to the standard library, like `_worker`, until it is told what to import.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import _worker  # type: ignore[import-not-found]  # beside this file

_MESSAGE = 1 << 16  # bytes
_POLL = 0.02  # seconds


def main(control: socket.socket) -> None:
    """Import what the first message names, then fork a rank for each message that asks for one."""
    with control:
        number, request = json.loads(control.recv(_MESSAGE))
        sys.path[:] = request["sys_path"]
        problem = _import(request["modules"])
        control.send(json.dumps([number, problem]).encode())
        if problem is not None:
            return
        gc.freeze()  # what there is now is shared with all ranks: looking through it would copy it
        running: dict[int, Path] = {}
        while True:
            readable, _, _ = select.select([control], [], [], _POLL if running else None)
            for pid, folder in list(running.items()):
                if _note_exit(pid, folder):
                    del running[pid]
            if not readable:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE, 2)
            if not message:
                return  # whoever has started this process is gone
            number, request = json.loads(message)
            if "reap" in request:
                running.pop(request["reap"], None)
                os.kill(request["reap"], signal.SIGKILL)  # it may not have been a session yet
                os.waitpid(request["reap"], 0)
                control.send(json.dumps([number, None]).encode())
                continue
            folder = Path(request["folder"])
            pid = os.fork()
            if not pid:
                control.close()
                _become_rank(folder, descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            running[pid] = folder
            control.send(json.dumps([number, pid]).encode())


def _import(modules: Sequence[str]) -> str | None:
    """Import modules; return what went wrong."""
    try:
        for module in modules:
            importlib.import_module(module)
    except BaseException:  # modules may even exit
        return traceback.format_exc()
    return None


def _note_exit(pid: int, folder: Path) -> bool:
    """Tell how a rank has ended, in a file of its folder. It stays a zombie, and its id its own, until it is reaped."""
    status: Any = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return False
    code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
    with suppress(FileNotFoundError):  # the call has been interrupted, and has taken its folder away
        draft = folder / "exit.draft"
        draft.write_text(str(code))
        draft.replace(folder / "exit")
    return True


def _become_rank(folder: Path, descriptors: Sequence[int]) -> None:
    """Do in this process what a fresh one would."""
    lifeline, output = descriptors
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    start = json.loads((folder / "start").read_text())
    os.environ.clear()
    os.environ.update(start["environment"])
    os.chdir(start["directory"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # or all ranks would draw the same; Python's own `random` knows
    _worker.main(Path(start["call_file"]), folder, lifeline)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
