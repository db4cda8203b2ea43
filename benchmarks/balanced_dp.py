"""Time of a training step through the whole Trainer: `balanced_dp` against one device.

Contenders run in turn within each round, and every ratio is taken within a round, so that a change of load meets all of
them. The reference is the better of one device with one thread and with all threads, found by trying both.

Run it with `python benchmarks/balanced_dp.py [--rounds 10] [--steps 30] [--json results.json]`.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext  # noqa: F401  registers "balanced_dp"

WARM_UP = 5  # steps at the start of each run that are not counted


class Classifier(pl.LightningModule):
    """Cross-entropy over a given network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the loss of a batch (inputs, labels)."""
        inputs, labels = batch
        return functional.cross_entropy(self.network(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD, so that the step is forward and backward."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encoder(inputs).mean(1))


def _conv() -> nn.Module:
    blocks = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 10))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def _tiny() -> nn.Module:
    hidden = [layer for _ in range(30) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, 16), *hidden, nn.Linear(16, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "conv net": (_conv, (3, 16, 16), 64),
    "transformer": (_Encoder, (32, 128), 32),
    "MLP": (_mlp, (512,), 256),
    "60 tiny layers": (_tiny, (16,), 64),
}
CONTENDERS: dict[str, tuple[str, int, int]] = {
    "one device, 1 thread": ("auto", 1, 1),
    "one device, all threads": ("auto", 1, torch.get_num_threads()),
    "balanced_dp, 2 replicas": ("balanced_dp", 2, torch.get_num_threads()),
}


class _StepTimes(pl.Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def measure(case: str, contender: str, steps: int) -> float:
    """Return the median time of a step, in seconds."""
    build, shape, batch_size = CASES[case]
    strategy, devices, threads = CONTENDERS[contender]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    inputs = torch.randn(batch_size * (steps + WARM_UP), *shape)
    data = TensorDataset(inputs, torch.randint(0, 10, (len(inputs),)))
    times = _StepTimes()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(build()), DataLoader(data, batch_size))
    return statistics.median(times.seconds[WARM_UP:])


def summarise(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Compute medians, and the ratio of `balanced_dp` to the better single device of the same round."""
    medians = {name: statistics.median(times[name] for times in rounds) for name in CONTENDERS}
    ours = "balanced_dp, 2 replicas"
    best = min((name for name in CONTENDERS if name != ours), key=lambda name: medians[name])
    ratios = sorted(times[ours] / times[best] for times in rounds)
    return {
        "milliseconds": {name: 1000 * value for name, value in medians.items()},
        "reference": best,
        "ratio": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
    }


def main() -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    table = Table(title="Time of a training step", caption=f"{arguments.rounds} rounds of {arguments.steps} steps")
    for column in ("model", *CONTENDERS, "ratio to the better one device", "lowest to highest"):
        table.add_column(column, justify="left" if column == "model" else "right")
    results: dict[str, Any] = {"torch": torch.__version__, "processor": platform.machine(), "cores": os.cpu_count()}
    results["load at the start"] = os.getloadavg()
    for case in CASES:
        rounds = [
            {contender: measure(case, contender, arguments.steps) for contender in CONTENDERS}
            for _ in range(arguments.rounds)
        ]
        result = results[case] = summarise(rounds)
        times = [f"{result['milliseconds'][contender]:.2f} ms" for contender in CONTENDERS]
        table.add_row(case, *times, f"{result['ratio']:.2f}", f"{result['lowest']:.2f} to {result['highest']:.2f}")
    results["load at the end"] = os.getloadavg()
    Console(width=140).print(table)
    print(f"load average at the start {results['load at the start']}, at the end {results['load at the end']}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
