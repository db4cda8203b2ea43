"""Time of a training step whose batch takes as long to fetch as the step itself, with and without `prefetch`.

In each round, every contender trains the same number of steps in turn, in one process on the CPU; so do a run whose
batches cost nothing, and a loop over the loader alone. A ratio is the time of a contender divided by the longer of the
latter two in the same round. Batches and steps wait for `--milliseconds`, as for a disk and a device.

Run it with `python benchmarks/prefetch.py`; it takes about five minutes.
"""

import statistics
import time
from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from measuring.command import print_with_load, start_parser
from measuring.comparison import make_columns
from measuring.estimates import FEWEST, estimate_median, format_ratio
from measuring.fitting import make_trainer
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext import BalancedDataParallelStrategy, DDPCheckpointStrategy, DDPJoinStrategy

_BATCH = 4
_PREFETCH = 2
OURS: dict[str, Callable[..., Strategy]] = {
    "ddp_checkpoint": DDPCheckpointStrategy,
    "ddp_join": DDPJoinStrategy,
    "balanced_dp": BalancedDataParallelStrategy,
}


class Samples(Dataset[Tensor]):
    """Samples whose batches wait for some seconds."""

    def __init__(self, steps: int, seconds: float) -> None:
        self._steps, self._seconds = steps, seconds

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._steps * _BATCH

    def __getitem__(self, index: int) -> Tensor:
        """Make a sample."""
        if index % _BATCH == 0:  # for the whole batch, since samples are in order
            time.sleep(self._seconds)
        return torch.ones(4)


class Network(LightningModule):
    """A small layer, and a step that waits for some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._layer, self._seconds = nn.Linear(4, 1), seconds

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Make a loss."""
        time.sleep(self._seconds)
        loss: Tensor = self._layer(batch).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), 1e-6)


def train(strategy: Strategy, steps: int, of_batch: float, of_step: float) -> float:
    """Return the seconds of one epoch, without the set-up of the Trainer."""
    trainer = make_trainer(strategy, devices=1, max_epochs=1, use_distributed_sampler=False)
    module = Network(of_step)
    ends: list[float] = []
    hooks = ("on_train_epoch_start", "on_train_epoch_end")
    vars(module).update(dict.fromkeys(hooks, lambda: ends.append(time.perf_counter())))
    trainer.fit(module, DataLoader(Samples(steps, of_batch), batch_size=_BATCH))
    return ends[-1] - ends[0]


def iterate(steps: int, of_batch: float) -> float:
    """Return the seconds of a loop over the loader."""
    started = time.perf_counter()
    for _ in DataLoader(Samples(steps, of_batch), batch_size=_BATCH):
        pass
    return time.perf_counter() - started


def measure(seconds: float, steps: int, rounds: int) -> Table:
    """Measure all contenders."""
    single = lambda: SingleDeviceStrategy(torch.device("cpu"))  # noqa: E731
    contenders: dict[str, Callable[[], Strategy]] = {"Lightning, one device": single}
    for name, make in OURS.items():
        for prefetch in (0, _PREFETCH):
            contenders[f"{name}, prefetch={prefetch}"] = lambda make=make, prefetch=prefetch: make(prefetch=prefetch)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    ratios: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        longer = max(train(single(), steps, 0.0, seconds), iterate(steps, seconds))
        for name, make in contenders.items():
            taken = train(make(), steps, seconds, seconds)
            if number:  # the first round is a warm-up
                times[name].append(taken / steps)
                ratios[name].append(taken / longer)
    title = f"waiting, {1000 * seconds:g} ms each, {steps} steps, {rounds} rounds"
    table = make_columns(title, "contender", "step", "ratio to the longer of the two", title_justify="left")
    for name in contenders:
        ratio = format_ratio(estimate_median(ratios[name]))
        table.add_row(name, f"{1000 * statistics.median(times[name]):.1f} ms", ratio)
    return table


def main() -> None:
    """Measure and print a table."""
    parser = start_parser(__doc__)
    parser.add_argument("--milliseconds", type=float, default=10.0, help="of a batch, and of a step")
    parser.add_argument("--steps", type=int, default=50, help="steps of a contender in each round")
    parser.add_argument("--rounds", type=int, default=9, help=f"at least {FEWEST}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = measure(options.milliseconds / 1000, options.steps, options.rounds)
    print_with_load(table)


if __name__ == "__main__":
    main()
