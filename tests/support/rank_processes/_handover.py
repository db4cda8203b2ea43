"""Packing a call so that a fresh interpreter can make it."""

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def pack_call(function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> bytes:
    """Pickle a call together with what a fresh interpreter needs to import its parts.

    Args:
        function: The function to be called; importable by name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        A pickle of plain built-in types only, so that it can be read before `sys.path` is set.

    Raises:
        TypeError: If a part cannot be pickled, or lives in an interactive session.
    """
    try:
        call = pickle.dumps((function, args, dict(kwargs)))
    except Exception as error:
        raise _explain_pickling_error(function, args, kwargs) from error
    script, script_module = _find_script()
    # Pickle writes functions and classes as the names of their modules, so a mention is all there is to look for.
    if script is None and script_module is None and b"__main__" in call:
        raise TypeError(
            f"`function` or one of its arguments is defined in an interactive session, got {function!r}. "
            "Other processes cannot import it from there: move it to a file."
        )
    return pickle.dumps(
        {
            "call": call,
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "argv": list(sys.argv),
            "script": script,
            "script_module": script_module,
            "function_module": getattr(function, "__module__", None),
            "function_file": _find_file(function),
        }
    )


def _explain_pickling_error(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> TypeError:
    parts = {"function": function} | {f"args[{index}]": value for index, value in enumerate(args)} | dict(kwargs)
    for name, value in parts.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            remedy = "Define it at the top level of a module." if name == "function" else "Create it inside `function`."
            return TypeError(f"`{name}` cannot be sent to other processes, got {value!r} ({error}). {remedy}")
    return TypeError(f"the call of {function!r} cannot be sent to other processes. Pass plainer arguments.")


def _find_script() -> tuple[str | None, str | None]:
    """The file of the running script, or the name of the module that was run by `python -m`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return None, spec.name
    file = getattr(main, "__file__", None)
    return (os.path.abspath(file), None) if file and Path(file).is_file() else (None, None)


def _find_file(function: Callable[..., object]) -> str | None:
    name = getattr(function, "__module__", None)
    file = getattr(sys.modules.get(name), "__file__", None) if name else None
    return os.path.abspath(file) if file else None


def unpack_result(data: bytes) -> object:
    """Unpickle what a rank returned."""
    # A rank loads the script under this name, as multiprocessing does, so that its guarded part does not run there.
    sys.modules.setdefault("__mp_main__", importlib.import_module("__main__"))
    return pickle.loads(data)
