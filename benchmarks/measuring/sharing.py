"""Runs of `balanced_ddp` on ranks of different speed, and of `ddp` on equal ranks."""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDDPStrategy

RANKS = 2
BATCH = 64
SPEEDS = (1.5, 0.5)  # milliseconds of each rank per sample
LAST = 30  # steps that are measured, the last ones of a run
TOLERANCE = 1.05


class Network(pl.LightningModule):
    """Computes on equal ranks, or sleeps for `milliseconds` of each rank per sample, swapped from a step on."""

    def __init__(self, milliseconds: Sequence[float], swap_at: int | None, width: int) -> None:
        super().__init__()
        self.milliseconds, self.swap_at = milliseconds, swap_at
        self.layers = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 10))
        self.seconds: list[float] = []
        self.sizes: list[tuple[int, ...]] = []
        self.began = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the cross-entropy."""
        if any(self.milliseconds):
            is_swapped = self.swap_at is not None and batch_idx >= self.swap_at
            rank = RANKS - 1 - self.global_rank if is_swapped else self.global_rank
            time.sleep(len(batch[0]) * self.milliseconds[rank] / 1000)
        return functional.cross_entropy(self.layers(batch[0]), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the time and the shares."""
        self.seconds.append(time.perf_counter() - self.began)
        strategy = self.trainer.strategy
        if isinstance(strategy, BalancedDDPStrategy):
            self.sizes.append(strategy.rank_steps.shared.sizes)  # type: ignore[union-attr]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(
    options: Mapping[str, Any] | None, steps: int, milliseconds: Sequence[float], swap_at: int | None, width: int
) -> Network:
    """Train on this rank under `balanced_ddp` with these options, or under `ddp` with half of the batch."""
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    module = Network(milliseconds, swap_at, width)
    data = TensorDataset(torch.randn(BATCH * steps, 64), torch.randint(10, (BATCH * steps,)))
    trainer = pl.Trainer(
        strategy="ddp" if options is None else BalancedDDPStrategy(**options), accelerator="cpu", devices=RANKS,
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, BATCH // RANKS if options is None else BATCH, shuffle=True))
    return module


def measure(contenders: Mapping[str, Any], rounds: int, steps: int, width: int = 0) -> dict[str, list[float]]:
    """Return the median time of the last steps of each contender in each round, on this rank."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    speeds = (0.0, 0.0) if width else SPEEDS
    for _ in range(rounds):
        for name, options in contenders.items():
            found[name].append(median(train(options, steps, speeds, None, width or 16).seconds[-LAST:]))
    return found


def follow(steps: int) -> int | None:
    """Swap the speeds after half of the steps; return the steps until the shares suit them, None if they never do."""
    swap_at = steps // 2
    sizes = train({}, steps, SPEEDS, swap_at, 16).sizes[swap_at:]
    best = BATCH / sum(1 / speed for speed in SPEEDS)
    is_close = [max(size * speed for size, speed in zip(one, SPEEDS[::-1], strict=True)) <= TOLERANCE * best
                for one in sizes]  # fmt: skip
    return next((step for step in range(len(is_close)) if all(is_close[step:])), None)
