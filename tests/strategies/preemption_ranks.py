"""Runs that are told to end, and resumed; kept apart because every rank imports it."""

import os
import random
import subprocess
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy
from tests.strategies.ddp_ranks import quiet_trainer
from tests.strategies.join_ranks import digest_of, samples
from tests.strategies.preemption_cases import CASES, SAVED, SAVED_WITHIN, Case
from tests.strategies.preemption_data import RANK, WORLD_SIZE, RandomAdversaries, stateful

STRATEGIES = {"ddp_checkpoint": DDPCheckpointStrategy, "ddp_join": DDPJoinStrategy}


@dataclass
class Trail:
    """What a run has left on a rank.

    Attributes:
        digests: Of the replica, after each batch.
        steps: Epoch and numbers of steps, after each batch.
        validated: Global step and loss of each validation.
        saved: How many batches and validations there had been, when a checkpoint was saved first.
    """

    digests: list[str] = field(default_factory=list)
    steps: list[tuple[int, ...]] = field(default_factory=list)
    validated: list[tuple[int, float]] = field(default_factory=list)
    saved: tuple[int, int] | None = None


class Tracing(Callback):
    """Follows a run, and sends a signal after some batches."""

    def __init__(self, trail: Trail, case: Case | None) -> None:
        self._trail = trail
        self._case = case
        self._batches = 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self._trail.digests.append("".join(digest_of(module, optimizer) for optimizer in trainer.optimizers))
        loop = trainer.fit_loop.epoch_loop
        # The last one is what loggers count.
        counts = trainer.global_step, loop.total_batch_idx, loop._batches_that_stepped
        self._trail.steps.append((trainer.current_epoch, *counts))
        self._send("on_train_batch_end")
        self._batches += 1

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._trail.validated.append((trainer.global_step, float(trainer.callback_metrics.get("val_loss", 0.0))))

    def on_save_checkpoint(self, *_: Any) -> None:
        trail = self._trail
        trail.saved = trail.saved or (len(trail.digests), len(trail.validated))

    def on_train_batch_start(self, *_: Any) -> None:
        self._send("on_train_batch_start")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._send("on_before_optimizer_step")

    def on_validation_batch_start(self, *_: Any) -> None:
        self._send("on_validation_batch_start")

    def _send(self, hook: str) -> None:
        case = self._case
        if case is not None and (hook, RANK) == (case.hook, case.rank) and self._batches >= case.after:
            self._case = None
            if case.is_to_group:
                # By another process: a worker tells a signal of its parent from one of a stranger.
                subprocess.run(["kill", f"-{case.signum.value}", "--", f"-{os.getpgid(0)}"], check=False)
            else:
                os.kill(os.getpid(), case.signum)


@dataclass
class Found:
    """What a rank has after the whole run, after the interrupted one, and after the resumed one."""

    whole: Trail
    interrupted: Trail
    resumed: Trail
    code: Any
    files: list[str]
    keys: int


def run_all(folder: str) -> dict[str, Found]:
    """Run every case on this rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {name: _run(case, Path(folder, name)) for name, case in CASES.items()}


def _run(case: Case, folder: Path) -> Found:
    whole, interrupted, resumed = Trail(), Trail(), Trail()
    _fit(case, folder, Tracing(whole, None))
    code = None
    try:
        _fit(case, folder, Tracing(interrupted, case))
    except SystemExit as end:
        code = end.code
    files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    keys = len(torch.load(folder / files[0], weights_only=True)) if files else 0
    if files:
        _fit(case, folder, Tracing(resumed, None), ckpt_path="hpc")
    return Found(whole, interrupted, resumed, code, files, keys)


def run_saved(folder: str) -> dict[str, tuple[Trail, Trail]]:
    """Run every case that a callback saves: what the whole run has left, and the resumed one."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {
        f"{place}: {name}": _resume_saved(options, case, Path(folder, place, name))
        for place, cases in (("end", SAVED), ("within", SAVED_WITHIN))
        for name, (options, case) in cases.items()
    }


def _resume_saved(options: dict[str, Any], case: Case, folder: Path) -> tuple[Trail, Trail]:
    whole, resumed = Trail(), Trail()
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, **options)
    _fit(case, folder, Tracing(whole, None), saving)
    first = min(folder.iterdir(), key=lambda path: int(path.stem.partition("=")[2].partition("-")[0]))
    _fit(case, folder, Tracing(resumed, None), ckpt_path=str(first))
    return whole, resumed


def _fit(case: Case, folder: Path, *callbacks: Callback, ckpt_path: str | None = None) -> None:
    # It deals the samples out; loaders that resume by themselves need the same.
    seed_everything(0 if ckpt_path is None or case.loader is stateful else 1, verbose=False)
    signal_handling._SIGCHLD_handler_set = False  # as in a new process: it is gone after a run with signal handlers
    own = RANK if ckpt_path is None else 100 + RANK
    random.seed(own)
    numpy.random.seed(own)
    torch.manual_seed(own)
    trainer = quiet_trainer(
        **{
            "strategy": STRATEGIES[case.strategy](),
            "devices": WORLD_SIZE,
            "precision": "64-true",
            "max_epochs": 2,
            "callbacks": list(callbacks),
            "enable_checkpointing": len(callbacks) > 1,
            "use_distributed_sampler": case.is_dealt,
            "default_root_dir": folder,
            **case.options,
        }
    )
    validation = DataLoader(list(zip(*samples(5), strict=True)), batch_size=2)
    module = case.module().double()  # Lightning would load into single precision, and convert afterwards
    loaders = [case.loader(), *([validation] if case.module is not RandomAdversaries else [])]
    trainer.fit(module, *loaders, ckpt_path=ckpt_path, weights_only=True)
