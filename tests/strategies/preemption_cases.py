"""Runs that are told to end, or saved: where, and what they train."""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule

from tests.strategies.preemption_data import (
    Estimating,
    PlateauBySteps,
    Random,
    RandomAdversaries,
    Unnormalised,
    dealt,
    of_generators,
    own,
    stateful,
    streams,
)


@dataclass(frozen=True)
class Case:
    """A run that is told to end.

    Attributes:
        after: Batches after which the signal is sent.
        loader: Makes the training loader of this rank.
        strategy: Its name.
        hook: Where the signal is sent.
        rank: Who sends it to itself.
        is_to_group: Whether it sends it to its workers too.
        signum: The signal.
        module: Makes the module.
        is_dealt: Whether the strategy deals the samples out.
        options: Other arguments of the Trainer.
    """

    after: int
    loader: Callable[[], Any]
    strategy: str = "ddp_join"
    hook: str = "on_train_batch_start"
    rank: int = 1
    is_to_group: bool = False
    signum: signal.Signals = signal.SIGTERM
    module: Callable[[], LightningModule] = Random
    is_dealt: bool = True
    options: dict[str, Any] = field(default_factory=dict)


# With 22 samples on two ranks in batches of 3, an epoch has 4 batches.
CASES = {
    "within an epoch": Case(1, dealt()),
    "at the end of an epoch": Case(3, dealt()),
    "at the beginning of an epoch": Case(4, dealt()),
    "in the second epoch": Case(6, dealt()),
    "by rank 0": Case(2, dealt(), rank=0),
    "by SIGUSR1": Case(2, dealt(), signum=signal.SIGUSR1),
    "in backward": Case(2, dealt(), hook="on_before_optimizer_step"),
    "after a batch": Case(2, dealt(), hook="on_train_batch_end"),
    "before a validation": Case(1, dealt(), options={"val_check_interval": 2}),
    "in a validation": Case(1, dealt(), hook="on_validation_batch_start", options={"val_check_interval": 2}),
    "in the last validation": Case(3, dealt(), hook="on_validation_batch_start"),
    "in a window": Case(4, dealt(34), module=Unnormalised, options={"accumulate_grad_batches": 3}),
    "with workers": Case(5, dealt(num_workers=2)),
    "with workers, which get the signal too": Case(1, dealt(num_workers=2), is_to_group=True),
    "SIGUSR1 to workers too": Case(2, dealt(num_workers=1), is_to_group=True, signum=signal.SIGUSR1),
    "with a schedule that asks for the number of steps": Case(2, dealt(), module=Estimating),
    "after a validation, with a plateau": Case(1, dealt(), module=PlateauBySteps, options={"val_check_interval": 2}),
    "by number of steps": Case(5, dealt(), options={"max_epochs": -1, "max_steps": 9}),
    "by number of steps, at the end of an epoch": Case(3, dealt(), options={"max_epochs": -1, "max_steps": 9}),
    "with generators of its own": Case(1, of_generators(), is_dealt=False),
    "with generators of its own, in the second epoch": Case(6, of_generators(), is_dealt=False),
    "with generators of its own, at the end of an epoch": Case(3, of_generators(), is_dealt=False),
    "in the uneven phase": Case(2, own(12, 5), is_dealt=False, rank=0),
    "in the uneven phase, on a joined rank": Case(3, own(12, 5), is_dealt=False, hook="on_train_batch_end"),
    "in a stream": Case(1, streams(14, 11)),
    "in the uneven phase of a stream": Case(3, streams(14, 5), rank=0),
    "in a stream, at the end of an epoch": Case(4, streams(14, 5), rank=0),
    "manual optimization": Case(2, own(12, 5), is_dealt=False, rank=0, module=RandomAdversaries),
    "ddp_checkpoint": Case(2, dealt(), "ddp_checkpoint"),
    "ddp_checkpoint, at the end of an epoch": Case(3, dealt(), "ddp_checkpoint"),
    "ddp_checkpoint, with generators of its own": Case(6, of_generators(), "ddp_checkpoint", is_dealt=False),
    "ddp_checkpoint, in a stream": Case(2, streams(14, 14), "ddp_checkpoint"),
    "ddp_checkpoint, with workers": Case(1, dealt(num_workers=1), "ddp_checkpoint"),
    "ddp_checkpoint, in the second epoch": Case(6, dealt(), "ddp_checkpoint"),
    "ddp_checkpoint, in the second epoch, with workers": Case(6, dealt(num_workers=1), "ddp_checkpoint"),
    "ddp_checkpoint, with a schedule that asks": Case(2, dealt(), "ddp_checkpoint", module=Estimating),
    "ddp_checkpoint, in a stream with a limit": Case(
        2, streams(14, 14), "ddp_checkpoint", options={"limit_train_batches": 100}
    ),
    "ddp_checkpoint, with a loader that resumes by itself": Case(2, stateful, "ddp_checkpoint"),
}


AFTER_VALIDATION = {"monitor": "val_loss", "save_on_train_epoch_end": False}


def by_steps(number: int) -> dict[str, Any]:
    return {"every_n_train_steps": number, "save_on_train_epoch_end": False}


# Runs that a `ModelCheckpoint` with these arguments saves at the end of an epoch.
SAVED = {
    "a loader": (by_steps(4), Case(0, dealt())),
    "a loader, after validation": (AFTER_VALIDATION, Case(0, dealt())),
    "a loader with workers": (by_steps(4), Case(0, dealt(num_workers=2))),
    "no validation": (by_steps(4), Case(0, dealt(), options={"limit_val_batches": 0})),
    "two validations in an epoch": (by_steps(4), Case(0, dealt(), options={"val_check_interval": 2})),
    "validations by steps": (
        by_steps(4),
        Case(0, dealt(), options={"val_check_interval": 4, "check_val_every_n_epoch": None}),
    ),
    "by number of steps": (by_steps(4), Case(0, dealt(), options={"max_epochs": -1, "max_steps": 9})),
    "a window that is short": (
        by_steps(2),
        Case(0, dealt(), module=Unnormalised, options={"accumulate_grad_batches": 3}),
    ),
    "a plateau": (by_steps(4), Case(0, dealt(), module=PlateauBySteps)),
    "the uneven phase": (by_steps(4), Case(0, own(12, 5), is_dealt=False)),
    "streams": (by_steps(5), Case(0, streams(14, 5))),
    "streams, after validation": (AFTER_VALIDATION, Case(0, streams(14, 5))),
    "streams with windows": (
        by_steps(2),
        Case(0, streams(14, 14), module=Unnormalised, options={"accumulate_grad_batches": 4}),
    ),
    "manual optimization": (by_steps(8), Case(0, own(12, 5), is_dealt=False, module=RandomAdversaries)),
    "generators of the loader's own": (by_steps(4), Case(0, of_generators(), is_dealt=False)),
    "generators of the loader's own, with a worker": (
        by_steps(4),
        Case(0, of_generators(num_workers=1), is_dealt=False),
    ),
    "after an epoch": ({}, Case(0, dealt())),
    "after an epoch without validation": ({}, Case(0, dealt(), options={"limit_val_batches": 0})),
    "after an epoch, by number of steps": ({}, Case(0, dealt(), options={"max_epochs": -1, "max_steps": 9})),
    "after an epoch without validation, by number of steps": (
        {},
        Case(0, dealt(), options={"max_epochs": -1, "max_steps": 9, "limit_val_batches": 0}),
    ),
    "after an epoch of streams": ({}, Case(0, streams(14, 5))),
    "ddp_checkpoint, after an epoch": ({}, Case(0, dealt(), "ddp_checkpoint")),
    "ddp_checkpoint": (by_steps(4), Case(0, dealt(), "ddp_checkpoint")),
    "ddp_checkpoint, after validation": (AFTER_VALIDATION, Case(0, dealt(), "ddp_checkpoint")),
    "ddp_checkpoint, with a schedule that asks for the number of steps, and workers": (
        by_steps(4),
        Case(0, dealt(num_workers=1), "ddp_checkpoint", module=Estimating),
    ),
    "ddp_checkpoint, generators of the loader's own": (
        by_steps(4),
        Case(0, of_generators(), "ddp_checkpoint", is_dealt=False),
    ),
    "ddp_checkpoint, streams": (by_steps(5), Case(0, streams(14, 14), "ddp_checkpoint")),
}

# Runs that a `ModelCheckpoint` with these arguments saves within an epoch, where a validation or a step of
# `ReduceLROnPlateau` is due.
SAVED_WITHIN = {
    "before a validation": (by_steps(2), Case(0, dealt(), options={"val_check_interval": 2})),
    "after a validation": (AFTER_VALIDATION, Case(0, dealt(), options={"val_check_interval": 2})),
    "before a validation, with a plateau": (
        by_steps(2),
        Case(0, dealt(), module=PlateauBySteps, options={"val_check_interval": 2}),
    ),
    "after a validation, with a plateau": (
        AFTER_VALIDATION,
        Case(0, dealt(), module=PlateauBySteps, options={"val_check_interval": 2}),
    ),
    "before a validation, with workers": (
        by_steps(2),
        Case(0, dealt(num_workers=1), options={"val_check_interval": 2}),
    ),
    "in windows": (
        by_steps(1),
        Case(0, dealt(34), module=Unnormalised, options={"accumulate_grad_batches": 2, "val_check_interval": 2}),
    ),
    "in the uneven phase": (by_steps(3), Case(0, own(12, 5), is_dealt=False, options={"val_check_interval": 3})),
    "streams": (
        by_steps(4),
        Case(0, streams(14, 5), options={"val_check_interval": 2, "check_val_every_n_epoch": None}),
    ),
    "manual optimization": (by_steps(4), Case(0, own(12, 5), is_dealt=False, module=RandomAdversaries)),
    "ddp_checkpoint": (by_steps(2), Case(0, dealt(), "ddp_checkpoint", options={"val_check_interval": 2})),
    "ddp_checkpoint, after a validation": (
        AFTER_VALIDATION,
        Case(0, dealt(), "ddp_checkpoint", options={"val_check_interval": 2}),
    ),
    "ddp_checkpoint, with a loader that resumes by itself": (
        by_steps(2),
        Case(0, stateful, "ddp_checkpoint", options={"val_check_interval": 2}),
    ),
}
