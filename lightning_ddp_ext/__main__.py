"""`python -m lightning_ddp_ext` is the command `lightning-ddp-ext`; `--version` prints what a bug report needs."""

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from lightning_ddp_ext import __version__
from lightning_ddp_ext._import_names import DISTRIBUTIONS

_DISTRIBUTIONS = ("torch", *DISTRIBUTIONS.values(), "torchmetrics", "hydra-core", "omegaconf", "numpy", "psutil")


def describe_installation() -> Iterator[str]:
    """Yield lines on this package, the interpreter, the installed packages and torch, whose import may fail."""
    yield f"lightning-ddp-ext {__version__}"
    yield f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}"
    for distribution in _DISTRIBUTIONS:
        try:
            yield f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{distribution} not installed"
    try:
        yield from _describe_torch()
    except Exception as error:  # whatever a broken installation raises
        yield f"torch cannot be used: {type(error).__name__}: {error}"


def _describe_torch() -> Iterator[str]:
    import torch

    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    yield f"torch {torch.__version__} is built for {_join(f'{name} {with_}' for name, with_ in built.items() if with_)}"
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    names = getattr(torch.get_device_module(kind), "get_device_name", str) if kind else str
    count = torch.accelerator.device_count() if kind else 0
    yield f"devices: {_join(f'{kind}:{index} {names(index)}' for index in range(count))}"
    from lightning_ddp_ext.distributed.backends import BUILT

    yield f"backends: {_join(name for name, is_available in BUILT.items() if is_available())}"


def _join(parts: Iterator[str]) -> str:
    return ", ".join(parts) or "the CPU only"


def main() -> None:
    """Run the command."""
    if sys.argv[1:2] == ["--version"]:
        for line in describe_installation():
            print(line, flush=True)  # before the next one, which may end the process
        return
    from lightning_ddp_ext.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
