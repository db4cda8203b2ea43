"""Runs of `balanced_ddp` and of what it is compared with, on ranks of equal and of unequal speed."""

import math
import random
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext import BalancedDDPStrategy
from measuring.fitting import StepTimes, make_trainer
from measuring.models import CASES, CLASSES, DEEP, REGRESSIONS, Case

RANKS = 2
BATCH = 64
SPEEDS = (1.5, 0.5)  # milliseconds of each rank per sample
SEQUENCES = 16  # in a batch
PER_TOKEN = 0.02  # milliseconds
LENGTHS = 8, 512
LAST = 30  # steps that are measured, the last ones of a run
TOLERANCE = 1.05
SLEEPING, SWAPPING = "sleeping", "swapping"
RANDOM_LENGTHS, SORTED_LENGTHS = "lengths in random order", "lengths in ascending order"
PADDED_LENGTHS = "padded lengths in random order"
SLEEPERS = {
    work: Case(lambda: nn.Linear(16, CLASSES), (16,), SEQUENCES if "lengths" in work else BATCH)
    for work in (SLEEPING, SWAPPING, RANDOM_LENGTHS, SORTED_LENGTHS, PADDED_LENGTHS)
}
WORKS = {**CASES, DEEP: REGRESSIONS[DEEP], **SLEEPERS}

Contender = str | Mapping[str, Any]
"""Name of a strategy, or the arguments of `balanced_ddp`."""


class Samples(Dataset[Any]):
    """Random samples; of sequences, the tokens are zeros."""

    def __init__(self, work: str, number: int) -> None:
        numbers = random.Random(0)
        self.shape = WORKS[work].shape
        self.lengths = [0] * number
        if "lengths" in work:
            lowest, highest = map(math.log, LENGTHS)
            self.lengths = [round(math.exp(numbers.uniform(lowest, highest))) for _ in range(number)]
        if work == SORTED_LENGTHS:
            batches = [self.lengths[at : at + SEQUENCES] for at in range(0, number, SEQUENCES)]
            self.lengths = [length for batch in batches for length in sorted(batch)]
        self.inputs = torch.randn(64, *self.shape)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, int, bytes]:
        return self.inputs[index % 64], index % CLASSES, bytes(self.lengths[index])


def collate(samples: Sequence[tuple[Tensor, int, bytes]]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack inputs and labels, and add the lengths."""
    inputs, labels, tokens = zip(*samples, strict=True)
    return torch.stack(inputs), torch.tensor(labels), torch.tensor([*map(len, tokens)])


def length_of(sample: tuple[Tensor, int, bytes]) -> float:
    """Return the number of tokens."""
    return len(sample[2])


class Network(pl.LightningModule):
    """Computes, or sleeps for its samples or tokens; notes the shares."""

    def __init__(self, work: str, swap_at: int) -> None:
        super().__init__()
        self.work, self.swap_at = work, swap_at
        self.layers = WORKS[work].build()
        self.sizes: list[tuple[int, ...]] = []

    def milliseconds(self, lengths: Tensor, batch_idx: int) -> float:
        """Return how long this rank sleeps."""
        if self.work in (RANDOM_LENGTHS, SORTED_LENGTHS):
            return int(lengths.sum()) * PER_TOKEN
        if self.work == PADDED_LENGTHS:
            return len(lengths) * int(lengths.max()) * PER_TOKEN
        is_swapped = self.work == SWAPPING and batch_idx >= self.swap_at
        return len(lengths) * SPEEDS[RANKS - 1 - self.global_rank if is_swapped else self.global_rank]

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the cross-entropy."""
        inputs, labels, lengths = batch
        if self.work in SLEEPERS:
            time.sleep(self.milliseconds(lengths, batch_idx) / 1000)
        return functional.cross_entropy(self.layers(inputs), labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the shares."""
        strategy = self.trainer.strategy
        if isinstance(strategy, BalancedDDPStrategy):
            self.sizes.append(strategy.driver.balance.shared.sizes)  # type: ignore[union-attr]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(contender: Contender, work: str, steps: int) -> tuple[Network, StepTimes]:
    """Train on this rank; each rank gets an even part of the batch unless ranks, or replicas, share it."""
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    batch_size = WORKS[work].batch_size
    options = {} if isinstance(contender, str) else {**contender}
    micro_batches, devices = options.pop("micro_batches", 1), options.pop("ranks", RANKS)
    accumulated = max(1, micro_batches // devices)
    module, data, times = Network(work, steps // 2), Samples(work, batch_size * steps), StepTimes()
    batch_size //= RANKS if contender in ("ddp", "ddp_join") else micro_batches
    name = options.pop("strategy", contender)
    strategy = name if isinstance(name, str) else BalancedDDPStrategy(**options)
    options = {"devices": devices, "max_epochs": 1, "plugins": [], "accumulate_grad_batches": accumulated}
    make_trainer(strategy, times, **options).fit(module, DataLoader(data, batch_size, collate_fn=collate))
    times.ends = times.ends[::accumulated]
    return module, times


def measure(contenders: Mapping[str, Contender], work: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the median time of the last steps of each contender in each round, on this rank."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            found[name].append(median(train(contenders[name], work, steps)[1].counted[-LAST:]))
    return found


def count_bytes(ranks: int, virtual_ranks: int) -> float:
    """Return the bytes of gradients that this rank sends in a step, relative to a rank in a ring's all-reduce."""
    bytes_of, to_all, gather = list[int](), dist.all_to_all_single, dist.all_gather

    def send(received: Tensor, sent: Tensor, into: list[int], splits: list[int], **options: Any) -> Any:
        bytes_of.append((len(sent) - splits[dist.get_rank()]) * sent.element_size())
        return to_all(received, sent, into, splits, **options)

    def give(gathered: list[Tensor], own: Tensor, **options: Any) -> Any:
        bytes_of.append((len(gathered) - 1) * own.nbytes)
        return gather(gathered, own, **options)

    dist.all_to_all_single, dist.all_gather = send, give
    module, _ = train({"virtual_ranks": virtual_ranks, "ranks": ranks}, DEEP, 2)
    return sum(bytes_of) / 2 / (2 * (ranks - 1) / ranks * sum(one.nbytes for one in module.parameters()))


def follow(steps: int) -> int | None:
    """Swap the speeds after half of the steps; return the steps until the shares suit them, None if they never do."""
    sizes = train({}, SWAPPING, steps)[0].sizes[steps // 2 :]
    best = BATCH / sum(1 / speed for speed in SPEEDS)
    is_close = [max(size * speed for size, speed in zip(one, SPEEDS[::-1], strict=True)) <= TOLERANCE * best
                for one in sizes]  # fmt: skip
    return next((step for step in range(len(is_close)) if all(is_close[step:])), None)
