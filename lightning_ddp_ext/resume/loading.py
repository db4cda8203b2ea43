"""Safe loading of checkpoints: whole files only, and no code from them unless the user trusts their author."""

import contextlib
import inspect
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_ddp_ext._lightning import CheckpointIO, FSDPStrategy, Strategy, TorchCheckpointIO, get_filesystem
from lightning_ddp_ext.errors import CheckpointRefusedError

_NAMED = 3  # in a message

# Before Lightning 2.6, neither `trainer.fit` nor a strategy takes `weights_only`.
TAKES_WEIGHTS_ONLY = "weights_only" in inspect.signature(Strategy.load_checkpoint).parameters
_VERSION = "pytorch-lightning_version"  # key in each checkpoint of a Trainer
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_REMEDY = (
    "Pass `weights_only=False` to `trainer.fit` if you trust its author."
    if TAKES_WEIGHTS_ONLY
    else "Allow its classes with `torch.serialization.add_safe_globals` if you trust its author."
)


class WeightsOnlyLoadMixin(Strategy):
    """Mixin before Lightning's class that loads whole checkpoints only, with `weights_only=True` unless it is False.

    Lightning leaves the choice to torch, which runs code from files that come from a URL.
    """

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if not (isinstance(self, FSDPStrategy) and os.path.isdir(checkpoint_path)):  # of shards
            check_checkpoint(checkpoint_path, self.checkpoint_io, allows_code=weights_only is False)
        if weights_only is False or TAKES_WEIGHTS_ONLY:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only is not False)
        else:
            with _weights_only_forced():
                checkpoint = super().load_checkpoint(checkpoint_path)
        if not isinstance(checkpoint, dict) or _VERSION not in checkpoint:
            raise unreadable(checkpoint_path, f"no `{_VERSION}`, which a Trainer writes")
        return checkpoint


@contextlib.contextmanager
def _weights_only_forced() -> Iterator[None]:
    """Have `torch.load` read tensors and plain values only, whatever its caller asks for."""
    given = os.environ.get(_FORCE, "0")
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        os.environ[_FORCE] = given


def check_checkpoint(
    path: str | Path, checkpoint_io: CheckpointIO, allows_code: bool, argument: str = "ckpt_path"
) -> None:
    """Raise `CheckpointRefusedError` unless a file is as `torch.save` wrote it, and loading it runs no code.

    Files that another plugin reads or that torch downloads are not checked.
    """
    reader = getattr(checkpoint_io, "checkpoint_io", checkpoint_io)  # of a plugin that wraps another one
    if str(path).startswith("http") or type(reader).load_checkpoint is not TorchCheckpointIO.load_checkpoint:
        return
    try:
        with get_filesystem(path).open(str(path), "rb") as file, zipfile.ZipFile(file) as archive:
            # torch ignores the checksums, so that a run would continue from a flipped bit.
            if any(part.CRC for part in archive.infolist()) and (damaged := archive.testzip()):
                raise zipfile.BadZipFile(f"the checksum of its part `{damaged}` is wrong")
            file.seek(0)
            names = [] if allows_code else sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except FileNotFoundError:
        return  # Lightning names it
    except Exception as error:  # zipfile and torch raise errors of many kinds
        raise unreadable(path, error, argument) from error
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        listed = ", ".join(f"`{name}`" for name in names[:_NAMED])
        raise CheckpointRefusedError(
            f"`ckpt_path={path}` holds {listed}{more}: loading that would run code from the file, and"
            " `weights_only=True` allows tensors and plain values only.",
            _REMEDY,
            names,
        )


def unreadable(path: str | Path, reason: object, argument: str = "ckpt_path") -> CheckpointRefusedError:
    """Return an error about a file that is damaged or that another program wrote."""
    return CheckpointRefusedError(
        f"`{argument}={path}` cannot be read as a checkpoint: it is cut, overwritten or of another program"
        f" ({' '.join(str(reason).split())}).",
        "Give another file that `trainer.save_checkpoint` or `fabric.save` wrote.",
    )
