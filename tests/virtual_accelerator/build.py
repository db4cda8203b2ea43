"""Build the C++ part of the virtual accelerator, once for each version of torch, Python and the source."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

_NAME = "virtual_accelerator_ext"
_SOURCES = ["device.cpp", "process_group.cpp"]
_INCLUDE = ["include", "include/torch/csrc/api/include"]
_OPTIONS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={_NAME}"]


class NoCompilerError(RuntimeError):
    """This machine cannot build the virtual accelerator."""


def extension() -> ModuleType:
    """Return the compiled module."""
    spec = importlib.util.spec_from_file_location(_NAME, built_library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built_library() -> Path:
    """Return the file of the compiled module in the cache; one process builds it if there is none."""
    source = Path(__file__).parent
    options = [*_OPTIONS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    contents = [(source / name).read_text() for name in (*_SOURCES, "virtual.h")]
    parts = [*contents, *options, torch.__version__, sysconfig.get_config_var("SOABI")]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_ddp_ext" / _NAME
    library = cache / f"torch-{torch.__version__}-{key}" / f"{_NAME}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _build(source, library, options)
    return library


def _build(source: Path, library: Path, options: list[str]) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    headers = [Path(sysconfig.get_paths()["include"]), *(Path(torch.__file__).parent / folder for folder in _INCLUDE)]
    if compiler is None or not (headers[0] / "Python.h").exists():
        raise NoCompilerError("the virtual accelerator needs g++ and the headers of Python")
    include = [f"-isystem{folder}" for folder in headers]
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [str(Path(folder, name).with_suffix(".o")) for name in _SOURCES]
        commands = [
            [compiler, *options, *include, "-c", str(source / name), "-o", target]
            for name, target in zip(_SOURCES, objects, strict=True)
        ]
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
        errors = [process.communicate()[1] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError("the virtual accelerator does not compile:\n" + "\n".join(errors))
        draft = Path(folder, library.name)
        linked = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        subprocess.run([compiler, "-shared", *objects, f"-L{libraries}", *linked, "-o", str(draft)], check=True)
        draft.replace(library)
