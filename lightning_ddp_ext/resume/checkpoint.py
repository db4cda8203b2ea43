"""The checkpoint of a run that resumes exactly: its contents beside Lightning's, and the writing of its file."""

import contextlib
import errno
import os
import shutil
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import give_checkpoint_io, given_checkpoint_io
from lightning_ddp_ext._compat.lightning_loaders import training_loader
from lightning_ddp_ext._compat.lightning_loops import (
    Progress,
    advance,
    before_each_batch,
    complete_batch,
    end_epoch,
    find_progress,
    restore_callback_metrics,
    resume_training_data,
)
from lightning_ddp_ext._lightning import CheckpointIO, Strategy, TorchCheckpointIO, Trainer, rank_zero_warn
from lightning_ddp_ext.distributed.exchange import broadcast_object
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from lightning_ddp_ext.resume.preemption import PreemptionHandler
from lightning_ddp_ext.resume.rng_state import FetchRecord, ResumableRng, gather_states, load_state

RANKS = "lightning_ddp_ext.ranks"  # in a checkpoint


class ResumableRun:
    """Saves and restores the state that differs between ranks, of which Lightning saves nothing or rank 0's only.

    This is the RNG state, now and at each batch fetched ahead; the state of the reducer, which determines how sums are
    rounded; the last logged values of rank 0; and the state of the steps, such as learnt shares. The position in the
    data is part of Lightning's state of loops, to which combined loaders add it. `seed` is for random numbers that all
    ranks share.
    """

    def __init__(
        self, cleanup: contextlib.ExitStack, trainer: Trainer, reducer: GradientReducer, resumed: dict[str, Any] | None
    ) -> None:
        self._stop_requests = reducer.control.add()
        self.preemption = PreemptionHandler(cleanup, trainer, self._stop_requests)
        self.rng = ResumableRng(trainer.strategy.root_device)
        self._trainer = trainer
        self._reducer = reducer
        self._group = reducer.process_group
        self._resumed = resumed
        # A new run takes the seed of rank 0; a resumed one has the same checkpoint on every rank.
        self.seed: int = broadcast_object(torch.initial_seed(), self._group, 0) if resumed is None else resumed["seed"]
        self.resumed_steps: dict[str, Any] = {} if resumed is None else resumed["steps"]
        self._progress = Progress(None, is_last_batch=False)  # at the interruption
        if resumed is not None:
            of_ranks = resumed["of_ranks"]
            own = load_state(of_ranks[trainer.global_rank if len(of_ranks) == trainer.world_size else 0])
            self._progress = Progress(**resumed["progress"])
            self._load(FetchRecord(**own["rng"]), len(of_ranks))
            reducer.load_state_dict({**resumed["reducer"], "of_rank": own["reducer"]})
        resume_training_data(cleanup, trainer, lambda: self._ends_epoch, self._begin)
        before_each_batch(cleanup, trainer, self._between_batches)

    def save(self, checkpoint: dict[str, Any], steps: dict[str, Any]) -> None:
        """Add the state of all ranks to the checkpoint of rank 0, which writes it. Two collectives."""
        if "optimizer_states" not in checkpoint:
            return  # weights only
        progress = find_progress(self._trainer)
        used = None if progress.ends_epoch else getattr(training_loader(self._trainer), "used", None)
        reloads: int = self._trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        record = self.rng.record(used, keeps_loaders=not reloads)
        reducer = self._reducer.state_dict()
        of_rank = {"reducer": reducer.pop("of_rank"), "rng": asdict(record)}
        # On all ranks, because it reduces values that have been logged since the last reduction.
        metrics = self._trainer.callback_metrics
        of_ranks = gather_states(of_rank, self._group)
        if not of_ranks:
            return
        checkpoint[RANKS] = {
            "seed": self.seed,
            "metrics": {name: metrics[name].cpu() for name in metrics},
            "reducer": reducer,
            "of_ranks": of_ranks,
            "progress": asdict(progress),
            "steps": steps,
        }

    def _load(self, record: FetchRecord, ranks: int) -> None:
        if ranks == self._trainer.world_size and record.now.keys() == self.rng.capture().keys():
            self.rng.resume(record)
            return
        rank_zero_warn(
            f"The checkpoint was saved by {ranks} ranks, and {self._trainer.world_size} resume it, or devices"
            " are of another kind. Random numbers will be others than without interruption. Resume on as many ranks and"
            " the same kind of devices to get the same."
        )

    def _begin(self) -> None:
        if self._resumed is None:
            return
        restore_callback_metrics(self._trainer, self._resumed["metrics"])  # a sanity check forgets them
        combined, progress = training_loader(self._trainer), self._progress
        self.rng.loaders = [] if combined is None else combined.flattened
        if progress.ends_epoch and not self._ends_epoch:
            self._progress = Progress(None, is_last_batch=False)  # as Lightning resumes
        elif progress.done == "epoch":
            end_epoch(self._trainer, progress.is_last_batch)
        elif progress.is_after_batch:
            complete_batch(self._trainer, progress.is_last_batch)

    @property
    def _ends_epoch(self) -> bool:
        """Whether the run resumes at the end of an epoch, which loaders that resume by themselves handle."""
        return self._progress.ends_epoch and not self.rng.is_bypassed

    def _between_batches(self) -> bool:
        if self._resumed is None:
            self.rng.advance()
            if request := max(self._stop_requests.of_ranks, default=0):
                self.preemption.stop(int(request))
            return True
        self._resumed = None
        advance(self._trainer, self._progress)
        if self._progress.is_after_batch and self._progress.ends_epoch:
            self.rng.advance_between_epochs()
        else:
            self.rng.advance()
        return not self._progress.is_after_batch


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a partial file in the same folder, and renames it when it is complete and on the disk.

    A killed process or a full disk leaves the previous checkpoint unchanged. Remote files are left to the base class.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Lightning would take any file with the name of a checkpoint in its own name for that checkpoint.
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
                raise OSError(errno.ENOSPC, "no space left for the checkpoint", path) from error
            raise
        _sync_folder(target.parent)


class AtomicSaveMixin(Strategy):
    """Replaces Lightning's `TorchCheckpointIO` by `AtomicCheckpointIO`; stands before the strategy in the bases."""

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        given = given_checkpoint_io(self)
        if given is None:
            self.checkpoint_io = given = AtomicCheckpointIO()
        elif hasattr(given, "checkpoint_io"):  # it wraps another one, as `AsyncCheckpointIO` does
            given.checkpoint_io = AtomicCheckpointIO()  # ignored if it has one
        return given

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        give_checkpoint_io(self, io)


def _is_full(folder: Path, error: BaseException) -> bool:
    """Return True if the disk is full, which torch's writer does not report."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOSPC
    return isinstance(error, RuntimeError) and folder.is_dir() and shutil.disk_usage(folder).free < 2**20


def _sync_folder(folder: Path) -> None:
    """Write the new name to the disk too, if the file system can synchronise folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
