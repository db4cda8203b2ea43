"""Runs that are resumed on another number of ranks; kept apart because every rank imports it."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_ddp_ext import DDPJoinStrategy
from tests.strategies.ddp_ranks import quiet_trainer
from tests.strategies.preemption_data import RANK, WORLD_SIZE, Augmented, Unnormalised, streams


def save_within_an_epoch(folder: str, steps: list[int]) -> list[list[int]]:
    """Save after some batches of an epoch; returns the samples of this rank until then."""
    return [_train_on(folder, None, number)[0] for number in steps]


def resume_on_others(folder: str, steps: list[int]) -> list[Any]:
    """Resume on the ranks of this launch; returns the samples of this rank in the rest of the epoch and in the next."""
    return [_train_on(folder, f"{folder}/{number}.ckpt", number) for number in steps]


DRAWN = 8  # steps: 6 are an epoch on two ranks


def save_what_is_drawn(folder: str) -> list[int]:
    """Save in the second epoch of a sampler with a generator of its own; returns the samples of this rank in it."""
    return _train_on(folder, None, DRAWN, _drawn, name="drawn")[1]


def resume_what_is_drawn(folder: str) -> list[int]:
    """Resume on the ranks of this launch; returns the samples of this rank in the rest of the epoch."""
    return _train_on(folder, f"{folder}/drawn.ckpt", DRAWN, _drawn)[1]


def _drawn() -> DataLoader:
    generator = torch.Generator().manual_seed(RANK)
    sampler = WeightedRandomSampler([1.0] * 31, 31, replacement=False, generator=generator)
    return DataLoader(Augmented(31), batch_size=3, sampler=sampler)


def refuse_on_others(folder: str) -> list[str]:
    """Resume where that is not possible."""
    found = []
    for loader in (streams(12, 12, 12), lambda: [DataLoader(Augmented(12), 2), DataLoader(Augmented(12), 2)]):
        try:
            _train_on(folder, f"{folder}/stream.ckpt", 2, loader)
            found.append("")
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def save_streams(folder: str) -> None:
    """Save within an epoch of a stream."""
    _train_on(folder, None, 2, streams(12, 12), name="stream")


def _train_on(
    folder: str, ckpt_path: str | None, steps: int, loader: Callable[[], Any] | None = None, name: str | None = None
) -> tuple[list[int], list[int]]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seed_everything(0 if ckpt_path is None else 1, verbose=False)
    module = Unnormalised()  # a batch may have one sample
    by_epoch: dict[int, list[int]] = {0: [], 1: []}

    class Collect(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            by_epoch[trainer.current_epoch].extend(module.seen)
            module.seen.clear()

    saving = ModelCheckpoint(folder, f"{name or steps}", every_n_train_steps=steps, save_top_k=-1)
    trainer = quiet_trainer(
        strategy=DDPJoinStrategy(),
        devices=WORLD_SIZE,
        precision="64-true",
        max_epochs=2,
        max_steps=-1 if ckpt_path else steps,
        callbacks=[Collect()] if ckpt_path else [Collect(), saving],
        enable_checkpointing=ckpt_path is None,
        use_distributed_sampler=True,
    )
    made = DataLoader(Augmented(31), batch_size=3, shuffle=True) if loader is None else loader()
    trainer.fit(module, made, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return by_epoch[0], by_epoch[1]
