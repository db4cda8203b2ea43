"""Checkpoints that are complete or not there."""

import contextlib
import errno
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import give_checkpoint_io, given_checkpoint_io, is_wrapping


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, and moves it there when it is complete and on the disk.

    A process that is killed, or a disk that is full, leaves the earlier checkpoint of that name as it was. Lightning's
    own class writes to the folder for temporary files and moves from there, which copies if that is another disk.

    Paths of remote file systems (`s3://...`) are left to the base class.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Lightning takes every file whose name holds that of a checkpoint for one.
        partial = target.with_name(f".{zlib.crc32(target.name.encode()):08x}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except BaseException as error:
            is_full = _is_full(target.parent, error)
            partial.unlink(missing_ok=True)
            if is_full:
                raise OSError(
                    errno.ENOSPC, "no space left for the checkpoint. Free some, or choose another disk", path
                ) from error
            raise
        _sync_folder(target.parent)


class AtomicSaveMixin(Strategy):
    """Saves with `AtomicCheckpointIO` where Lightning would with `TorchCheckpointIO`; before its class in the bases."""

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        given = given_checkpoint_io(self)
        if given is None:
            self.checkpoint_io = given = AtomicCheckpointIO()
        elif is_wrapping(given):
            given.checkpoint_io = AtomicCheckpointIO()  # unless it has one of its own
        return given

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        give_checkpoint_io(self, io)


def _is_full(folder: Path, error: BaseException) -> bool:
    """Tell whether a disk is full; torch's writer does not say so."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOSPC
    return isinstance(error, RuntimeError) and folder.is_dir() and shutil.disk_usage(folder).free < 2**20


def _sync_folder(folder: Path) -> None:
    """Let the new name reach the disk too, where folders may be opened and synchronised."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
