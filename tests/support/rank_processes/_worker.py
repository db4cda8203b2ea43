"""What runs in each process of `run_processes`.

Started by its path and limited to the standard library: importing it as a part of the package would make every
rank of every call pay for the import of Lightning (seconds), whether its function needs it or not.
"""

import faulthandler
import importlib
import importlib.util
import io
import json
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

# Set while the modules of the call are imported, so that `run_processes` can refuse to start from there.
IMPORTING = "LIGHTNING_DDP_EXT_TESTING_IMPORTING"


def main(call_file: Path, folder: Path, lifeline: int) -> None:
    """Make the call of `call_file` and leave what came of it in `folder`."""
    faulthandler.enable()
    # Everybody else's signals stay free: SIGUSR1 requeues SLURM jobs (also in Lightning), SIGUSR2 does so in submitit,
    # SIGTERM is handled by Lightning. SIGQUIT asks for stacks in Java and Go too. The handler is C code: it answers
    # when the main thread is stuck in C, with or without the interpreter lock.
    stack = (folder / "stack").open("w")
    faulthandler.register(signal.SIGQUIT, file=stack, all_threads=True)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    try:
        function, args, kwargs = _read_call(call_file)
        result = function(*args, **kwargs)
    except SystemExit:
        raise
    except BaseException as error:
        _report_exception(folder, error)
        sys.exit(1)
    try:
        pickled = pickle.dumps(result)
    except Exception as error:
        kind = type(result).__qualname__
        reason = f"returned a {kind} that cannot be pickled ({_summarize(error)})"
        _report_failure(folder, reason, "")
        sys.exit(1)
    _write(folder / "result", pickled)
    _leave_process_group()


def _leave_process_group() -> None:
    """Spare the caller an abort: threads of gloo may still let go of tensors while the interpreter ends."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _end_with_parent(lifeline: int) -> None:
    """Kill this rank and what it started as soon as the parent, alone at the other end of the pipe, is gone."""
    os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _read_call(call_file: Path) -> Any:
    handover = pickle.loads(call_file.read_bytes())
    sys.path[:] = handover["sys_path"]
    sys.argv[:] = handover["argv"]
    os.environ[IMPORTING] = "1"
    try:
        return _CallUnpickler(handover).load()
    finally:
        del os.environ[IMPORTING]


class _CallUnpickler(pickle.Unpickler):
    """Also finds what the parent did not import by name: its script, and modules of pytest's importlib mode."""

    def __init__(self, handover: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(handover["call"]))
        self._handover = handover

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "__main__":
            _load_script(self._handover["script"], self._handover["script_module"])
        elif module_name == self._handover["function_module"]:
            _load_module(module_name, self._handover["function_file"])
        return super().find_class(module_name, global_name)


def _load_script(script: str | None, script_module: str | None) -> None:
    """Stand in for the parent's `__main__`, without running what `if __name__ == "__main__"` guards."""
    if "__mp_main__" in sys.modules:
        return
    module = types.ModuleType("__mp_main__")
    if script is not None:
        module.__dict__.update(runpy.run_path(script, run_name="__mp_main__"))
    elif script_module is not None:
        module.__dict__.update(runpy.run_module(script_module, run_name="__mp_main__", alter_sys=True))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _load_module(name: str, file: str | None) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        itself_is_missing = error.name is not None and f"{name}.".startswith(f"{error.name}.")
        spec = importlib.util.spec_from_file_location(name, file) if file and itself_is_missing else None
        if spec is None or spec.loader is None:
            raise
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def _report_exception(folder: Path, error: BaseException) -> None:
    # The first frame is ours and says nothing about the failure.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    _report_failure(folder, f"raised {_summarize(error)}", text)


def _summarize(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _report_failure(folder: Path, summary: str, traceback_text: str) -> None:
    # The monotonic clock is one for the whole machine, so the parent can tell which rank failed first.
    failure = {"summary": summary, "time": time.monotonic(), "traceback": traceback_text}
    _write(folder / "failure", json.dumps(failure).encode())


def _write(path: Path, data: bytes) -> None:
    """Write a file that the parent sees either complete or not at all."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_bytes(data)
    draft.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
