"""Times and memory of training steps on GPUs, against Lightning's `ddp` with one rank, one device, and `DataParallel`.

Strategies of ranks have one rank. `balanced_dp` and torch's `DataParallel` have a replica on each GPU, or two on the
only one; memory is the first one's. All contenders train in turn in one process, a few dozen steps at a time; ratios
are taken within a round. The host waits for the device before and after the steps that are counted, not in between. A
profiled run of each contender says how long the device computes in a step; in the rest of a step it waits for the host.
Run it with `python benchmarks/gpu.py`.
"""

import argparse
import gc
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from measuring.estimates import FEWEST, estimate_to_json, format_ratio
from measuring.fitting import Classifier, make_trainer
from measuring.models import CASES as SMALL_CASES
from measuring.models import MANY
from measuring.rounds import Burst, Measurement, collect_rounds, order_of
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity
from torch.profiler import profile as Profiler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext import BalancedDataParallelStrategy, BalancedDDPStrategy, DDPCheckpointStrategy, DDPJoinStrategy
from tests.support import devices

_PROFILED = 5  # steps
WARM_UP = 6  # steps, of which the first ones build buckets and choose kernels
ONE, DDP = "one device", "ddp"
DATA_PARALLEL, BALANCED = "DataParallel", "balanced_dp"
REFERENCES = {
    DATA_PARALLEL: [ONE], DDP: [ONE], "ddp_checkpoint": [DDP], "ddp_join": [DDP], "balanced_ddp": [DDP],
    "balanced_dp, 1 replica": [ONE],
    BALANCED: [ONE, DATA_PARALLEL],
}  # fmt: skip


class _Block(nn.TransformerEncoderLayer):
    def __init__(self, width: int, is_recomputed: bool) -> None:
        super().__init__(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.is_recomputed = is_recomputed

    def forward(self, src: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Return the next hidden states."""
        if not self.is_recomputed:
            return super().forward(src, *arguments, **options)
        outputs: Tensor = checkpoint(super().forward, src, *arguments, use_reentrant=False, **options)
        return outputs


class Transformer(nn.Module):
    """A transformer over words; about 100 million parameters with 12 layers of width 768."""

    def __init__(self, words: int, layers: int, width: int, is_recomputed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(_Block(width, is_recomputed) for _ in range(layers)))
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        """Return scores of the next words, with the classes in the second dimension."""
        scores: Tensor = self.head(self.blocks(self.embedding(words)))
        return scores.transpose(1, 2)


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.layers = nn.Sequential(
            *_convolution(inputs, width, 1), nn.ReLU(), *_convolution(width, width, 3, stride), nn.ReLU(),
            *_convolution(width, outputs, 1),
        )  # fmt: skip
        is_same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, images: Tensor) -> Tensor:
        """Return the next features."""
        return functional.relu(self.layers(images) + self.shortcut(images))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def residual_network(blocks: tuple[int, ...], width: int) -> nn.Module:
    """Return a residual network of bottlenecks; (3, 4, 6, 3) and 64 make a ResNet-50."""
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    inputs = width
    for stage, number in enumerate(blocks):
        for block in range(number):
            layers.append(_Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * width << stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, slots=True)
class Case:
    """A network, its precision and a function that makes a batch of inputs and labels."""

    build: Callable[[], nn.Module]
    precision: Any
    make_batch: Callable[[], tuple[Tensor, Tensor]]


def make_cases(is_quick: bool) -> dict[str, Case]:
    """Return the cases; in a quick run they are small enough for a CPU."""
    precision = "32-true" if is_quick else "bf16-mixed"
    vocabulary, layers, width, length, size = (99, 2, 64, 8, 4) if is_quick else (8192, 12, 768, 512, 16)
    blocks, channels, side, images = ((1, 1), 8, 32, 8) if is_quick else ((3, 4, 6, 3), 64, 224, 64)

    def words() -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (size, length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def pictures() -> tuple[Tensor, Tensor]:
        shown = torch.randn(images, 3, side, side).to(memory_format=torch.channels_last)
        return shown, torch.randint(1000, (images,))

    many = SMALL_CASES[MANY]

    def numbers() -> tuple[Tensor, Tensor]:
        return torch.randn(many.batch_size, *many.shape), torch.randint(10, (many.batch_size,))

    return {
        "transformer": Case(partial(Transformer, vocabulary, layers, width, False), precision, words),
        "residual network": Case(partial(residual_network, blocks, channels), precision, pictures),
        MANY: Case(many.build, "32-true", numbers),
        "transformer, recomputed": Case(partial(Transformer, vocabulary, layers, width, True), precision, words),
    }


class StayingClassifier(Classifier):
    """Stays on the device at the end of a turn: a copy to the host would take longer than the turn."""

    def cpu(self) -> "StayingClassifier":
        """Do nothing."""
        return self


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """The same few batches, which lie on the device already."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(1)
        self._batches = [tuple(part.to(device) for part in case.make_batch()) for _ in range(2)]

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._batches


class Window(pl.Callback):
    """Times and memory of the steps after the warm-up; a profiler makes steps longer, but not the device's work."""

    def __init__(self, device: torch.device, profiler: Profiler | None = None) -> None:
        self._device, self._is_cpu, self._profiler = device, device.type == "cpu", profiler
        self._begin = self.seconds = self.peak = self.held = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock after the warm-up, when the optimizer has cleared all gradients."""
        if batch_idx == WARM_UP:
            self._synchronize()
            if not self._is_cpu:
                torch.accelerator.reset_peak_memory_stats(self._device)
            if self._profiler is not None:
                self._profiler.start()
            self._begin = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Stop the clock when the device has finished, then read its memory."""
        self._synchronize()
        self.seconds = time.perf_counter() - self._begin
        if self._profiler is not None:
            self._profiler.stop()
        if not self._is_cpu:
            self.peak = torch.accelerator.max_memory_allocated(self._device)
            module.zero_grad()
            self.held = torch.accelerator.memory_allocated(self._device)

    def _synchronize(self) -> None:
        if not self._is_cpu:
            torch.accelerator.synchronize(self._device)


def make_strategies(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return the contenders; Lightning's `ddp` and torch's `DataParallel` run on no other accelerators than CUDA.

    On the CPU, `DataParallel` calls the network once, which only shows that the contender runs.
    """
    ranked = {"parallel_devices": [device]}
    one = partial(SingleDeviceStrategy, device)
    theirs = {DDP: partial(DDPStrategy, **ranked), DATA_PARALLEL: one} if device.type in ("cpu", "cuda") else {}
    return {
        ONE: one,
        **theirs,
        "ddp_checkpoint": partial(DDPCheckpointStrategy, **ranked),
        "ddp_join": partial(DDPJoinStrategy, **ranked),
        "balanced_ddp": partial(BalancedDDPStrategy, **ranked),
        "balanced_dp, 1 replica": partial(BalancedDataParallelStrategy, parallel_devices=[device]),
        BALANCED: partial(BalancedDataParallelStrategy, parallel_devices=replica_devices()),
    }


def replica_devices() -> list[torch.device]:
    """Return all devices, or the only one twice."""
    return devices.devices(max(2, devices.device_count()))


def fit(
    name: str,
    case: Case,
    data: Endless,
    strategy: Callable[[], Any],
    device: torch.device,
    steps: int,
    profiler: Profiler | None = None,
) -> Burst:
    """Train for some steps after a warm-up; memory is in bytes, without the parameters and the batches."""
    gc.collect()
    torch.manual_seed(0)
    with device:  # random numbers for 100 million parameters take seconds on a CPU
        network = case.build()
    if name == DATA_PARALLEL:
        network = nn.DataParallel(network, device_ids=replica_devices())
    module = StayingClassifier(network)
    window = Window(device, profiler)
    trainer = make_trainer(
        strategy(), window, accelerator=device.type, devices=1, precision=case.precision, max_epochs=-1,
        max_steps=WARM_UP + steps, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=None))
    mean = window.seconds / steps
    print(f"{type(trainer.strategy).__name__}: {steps} steps of {1000 * mean:.2f} ms", flush=True)
    size = sum(parameter.nbytes for parameter in module.parameters())
    return Burst(
        steps, mean, mean, mean, 0.0, 0.0, {"peak": window.peak, "held": window.held, "gradients": float(size)}
    )


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """What the device does in a step: seconds in which it computes or copies, and the number of kernels and copies."""

    busy: float
    launches: float


def profile(run: Callable[[Profiler], Burst], steps: int) -> tuple[float, DeviceWork]:
    """Return the seconds and the device's work of a step of a profiled run."""
    profiler = Profiler(activities=[ProfilerActivity.CUDA])
    mean = run(profiler).mean
    times = [event.time_range for event in profiler.events() if event.device_type == DeviceType.CUDA]
    busy = length_of_union((one.start, one.end) for one in times)
    return mean, DeviceWork(busy / steps / 1e6, len(times) / steps)


def length_of_union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of some intervals lasts."""
    length, until = 0.0, -math.inf
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, until))
        until = max(until, end)
    return length


def measure(case: Case, device: torch.device, options: argparse.Namespace) -> tuple[Measurement, dict[str, DeviceWork]]:
    """Run all contenders in rounds, after a profiled run of each that also finds the number of steps."""
    strategies, data = make_strategies(device), Endless(case, device)
    seconds, work = {}, {}
    for name, strategy in strategies.items():
        run = partial(fit, name, case, data, strategy, device, _PROFILED)
        if device.type == "cuda":
            seconds[name], work[name] = profile(run, _PROFILED)
        else:
            seconds[name] = run().mean
    until = time.perf_counter() + options.seconds
    turns = {
        name: partial(fit, name, case, data, strategy, device, max(5, round(options.burst / seconds[name])))
        for name, strategy in strategies.items()
    }

    measurement = collect_rounds(lambda: nullcontext(turns), FEWEST, FEWEST, any_load=True)
    while len(measurement.rounds) < options.rounds and time.perf_counter() < until:
        names = order_of(list(turns), len(measurement.rounds))
        measurement.rounds.append({name: turns[name]() for name in names})
    return measurement, work


def describe(name: str, measurement: Measurement, work: Mapping[str, DeviceWork]) -> tuple[dict[str, Any], list[str]]:
    """Return the conclusions of a case as numbers and as rows of a table."""
    numbers: dict[str, Any] = {}
    rows = []
    for contender in measurement.rounds[0]:
        bursts = [round_[contender] for round_ in measurement.rounds]
        alone = [round_[ONE] for round_ in measurement.rounds]
        references = [one for one in REFERENCES.get(contender, ()) if one in measurement.rounds[0]]
        ratios = {reference: measurement.ratio(contender, reference) for reference in references}
        peak = min(burst.extra["peak"] for burst in bursts)
        least = min(burst.extra["peak"] for burst in alone)
        unit = bursts[0].extra["gradients"]
        above = 1 + (peak - least) / unit
        numbers[contender] = {
            "seconds": estimate_to_json(measurement.time(contender)),
            "device": asdict(work[contender]) if work else None,
            "ratios": {reference: estimate_to_json(ratio) for reference, ratio in ratios.items()},
            "peak in bytes": peak,
            "held in bytes": min(burst.extra["held"] for burst in bursts),
            "gradients in bytes": unit,
            "memory of gradients": above,
        }
        times = format_ratio(measurement.time(contender), 1000)
        compared = "; ".join(f"{format_ratio(ratio)} of {reference}" for reference, ratio in ratios.items())
        memory = f"{peak / 2**30:.2f} | {above:.2f}" if peak else "|"
        busy = f"{1000 * work[contender].busy:.2f} | {work[contender].launches:.0f}" if work else "|"
        rows.append(f"| {name} | {contender} | {times} | {compared} | {busy} | {memory} |")
    return numbers, rows


def main() -> None:
    """Measure the cases and write `results.json` after each, with the lines of a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accelerator", default="cuda", help="another one to see whether it works")
    parser.add_argument("--rounds", type=int, default=12, help=f"at most; at least {FEWEST}")
    parser.add_argument("--seconds", type=float, default=10, help="for the rounds of a case beyond the first ones")
    parser.add_argument("--burst", type=float, default=0.4, help="seconds of a contender's turn")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="by default all")
    parser.add_argument("--quick", action="store_true", help="small models; the default except on CUDA")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks/gpu"), help="folder of the results")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}
    devices.choose(options.accelerator)
    device = devices.device()
    cases = make_cases(options.quick or options.accelerator != "cuda")
    results: dict[str, Any] = {"cases": {}, "page": [
        "Medians over rounds with exact 95 % intervals; ratios are taken within a round. Memory of gradients: the peak"
        " of a step less the peak on one device, in units of all gradients, plus 1. Device: the part of a step in which"
        " it computes or copies, and how many kernels and copies; in the rest of a step it waits for the host.",
        "",
        "| model | strategy | step in ms | ratio | device in ms | kernels | peak in GiB | memory of gradients |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]}  # fmt: skip
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.cases or cases:
        numbers, rows = describe(name, *measure(cases[name], device, options))
        results["cases"][name] = numbers
        results["page"] += rows
        print(*rows, sep="\n", flush=True)
        (options.output / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
