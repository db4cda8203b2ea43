"""Checkpoints that are complete or not there."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override


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
        partial = target.with_name(f".{target.name}.partial")
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


def _is_full(folder: Path, error: BaseException) -> bool:
    """Tell whether a disk is full; torch's writer does not say so."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOSPC
    return isinstance(error, RuntimeError) and shutil.disk_usage(folder).free < 2**20


def _sync_folder(folder: Path) -> None:
    """Let the new name reach the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
