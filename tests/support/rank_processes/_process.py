"""The process of a rank: started from nothing, or forked from one that has imported what it needs."""

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

_WORKER = Path(__file__).with_name("_worker.py")
_TEMPLATE = Path(__file__).with_name("_template.py")
_MESSAGE = 1 << 16  # bytes
_LIMIT = 60.0  # seconds to fork a process or to let go of it


class Process(Protocol):
    """A process that leads a session of its own."""

    @property
    def pid(self) -> int:
        """Its id, which is also that of its group and session; nobody else's until `reap`."""

    def poll(self) -> int | None:
        """Its `returncode`, or `None` while it runs."""

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""

    def reap(self, timeout: float) -> None:
        """Let go of it when it has been killed, which may take so many seconds."""


# Called with the file of the call, the folder of the rank, its environment, and the file descriptors of a pipe that
# tells the end of the caller and of what the rank prints.
Start = Callable[[Path, Path, Mapping[str, str], int, int], Process]


class Started:
    """A fresh interpreter."""

    def __init__(
        self, call_file: Path, folder: Path, environment: Mapping[str, str], lifeline: int, output: int
    ) -> None:
        # Unbuffered: a killed process cannot flush its last lines.
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(_WORKER), str(call_file), str(folder), str(lifeline)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lifeline,),
        )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """See `Process`."""
        try:
            # WNOWAIT leaves it a zombie until its group has been killed: its id, which is also that of the group,
            # cannot be given to a stranger before that.
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except (AttributeError, ChildProcessError):  # no waitid (macOS before Python 3.13), or somebody reaped it
            return self._process.poll()
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def is_stopped(self) -> bool:
        """See `Process`."""
        with suppress(AttributeError, ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def reap(self, timeout: float) -> None:
        """See `Process`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


class Forked:
    """A process that a template has forked, and waits for."""

    def __init__(self, template: "Template", folder: Path, pid: int) -> None:
        self._template = template
        self._folder = folder
        self.pid = pid

    def poll(self) -> int | None:
        """See `Process`."""
        noted = self._folder / "exit"
        return int(noted.read_text()) if noted.exists() else None

    def is_stopped(self) -> bool:
        """See `Process`."""
        return Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"

    def reap(self, timeout: float) -> None:
        """See `Process`."""
        self._template.reap(self.pid)


class Template:
    """A process that has imported modules and forks others. It ends with this one.

    Args:
        modules: What it imports, by the `sys.path` of this one.
        timeout: Seconds that this may take.

    Raises:
        ImportError: If it cannot, or not in time.
    """

    def __init__(self, modules: tuple[str, ...], timeout: float) -> None:
        self._lock = threading.Lock()
        self._asked = 0
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(timeout)
        with control:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(_TEMPLATE), str(control.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # read when a library is loaded
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(control.fileno(),),
            )
        try:
            problem = self._ask({"modules": modules, "sys_path": [os.path.abspath(entry) for entry in sys.path]})
        except TimeoutError:
            problem = f"not done within `timeout`={timeout:g} seconds"
        except BaseException:
            self.close()
            raise
        if problem is not None:
            self.close()
            raise ImportError(f"`preload` cannot be imported: {modules}. Correct it, or leave it out.\n{problem}")
        self._control.settimeout(_LIMIT)

    def fork(self, call_file: Path, folder: Path, environment: Mapping[str, str], lifeline: int, output: int) -> Forked:
        """Fork a rank."""
        start = {"call_file": str(call_file), "environment": dict(environment), "directory": os.getcwd()}
        (folder / "start").write_text(json.dumps(start))
        return Forked(self, folder, self._ask({"folder": str(folder)}, [lifeline, output]))

    def reap(self, pid: int) -> None:
        """Wait for a rank that has been killed."""
        self._ask({"reap": pid})

    @property
    def is_alive(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it; ranks end by themselves."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, request: object, descriptors: Sequence[int] = ()) -> Any:
        with self._lock:
            self._asked += 1
            socket.send_fds(self._control, [json.dumps([self._asked, request]).encode()], descriptors)
            while message := self._control.recv(_MESSAGE):
                number, answer = json.loads(message)
                if number == self._asked:  # not the answer to a call that an interrupt has ended
                    return answer
        raise RuntimeError("the process that has imported the modules of `preload` is gone. Leave `preload` out.")


# By what they have imported, and by the process that has started them: one that it has forked itself has none.
_templates: dict[tuple[tuple[str, ...], int], Template] = {}


def template_for(modules: tuple[str, ...], timeout: float) -> Template:
    """Return this process's template that has imported some modules, or start it; see `Template`."""
    key = modules, os.getpid()
    if key not in _templates or not _templates[key].is_alive:
        _templates[key] = Template(modules, timeout)
        atexit.register(_templates[key].close)
    return _templates[key]
