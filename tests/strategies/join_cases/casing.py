"""What users' code does while ranks have different amounts of data: cases that ranks run one after another."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import DDPJoinStrategy
from lightning_ddp_ext.errors import DDPExtError
from tests.strategies.ddp_ranks import quiet_trainer
from tests.strategies.join_ranks import Stream, Trace, samples

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
COUNTS = (8, 4, 2)  # samples of each rank, in batches of two
_CASES: dict[str, Callable[[str], Any]] = {}


def case(function: Callable[[str], Any]) -> Callable[[str], Any]:
    _CASES[function.__name__] = function
    return function


def run_cases(folder: str) -> dict[str, Any]:
    """Run every case on this rank; returns what it returns, or the error."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for name, function in _CASES.items():
        seed_everything(0, verbose=False)
        try:
            found[name] = function(folder)
        except (DDPExtError, ArithmeticError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def loader(*counts: int, stream: bool = False) -> DataLoader:
    """This rank's samples, numbered over all ranks."""
    parts = torch.split(torch.arange(sum(counts)), counts)[RANK]
    data = TensorDataset(*(part[parts] for part in samples(sum(counts))))
    return DataLoader(Stream(list(data)) if stream else data, batch_size=2)


def trainer(*callbacks: Callback, strategy: Any = None, **options: Any) -> Trainer:
    return quiet_trainer(
        **{
            "strategy": strategy if isinstance(strategy, str) else DDPJoinStrategy(**(strategy or {})),
            "devices": WORLD_SIZE,
            "precision": "64-true",
            "max_epochs": 1,
            "num_sanity_val_steps": 0,
            "callbacks": list(callbacks),
            **options,
        }
    )


def fit(module: LightningModule, *loaders: Any, **options: Any) -> tuple[Trainer, Trace]:
    trace = Trace()
    made = trainer(trace, *options.pop("callbacks", ()), **options)
    made.fit(module, *(loaders or [loader(*COUNTS)]))
    return made, trace
