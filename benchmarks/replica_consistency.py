"""What comparing replicas costs: fingerprints of 100 MB on the CPU, and `ReplicaConsistency` as a share of training.

Fingerprints are measured beside what the standard library has to hash bytes with, in turn, in one thread. Training is
that of Lightning's `ddp` on two processes with Adam, whose state is twice the parameters, comparing after every step.
Times are those of the processor, which depend little on what else runs.

Run it with `python benchmarks/replica_consistency.py`; it takes about two minutes.
"""

import hashlib
import itertools
import os
import statistics
import time
import zlib
from collections.abc import Callable
from contextlib import redirect_stdout

import torch
from lightning.pytorch import LightningModule
from measuring.command import print_with_load, start_parser
from measuring.comparison import make_columns
from measuring.fitting import Classifier, StepTimes, make_trainer
from measuring.models import CASES, load
from rich.table import Table
from torch import Tensor

from lightning_ddp_ext.callbacks import ReplicaConsistency
from lightning_ddp_ext.consistency import fingerprint_all
from tests.support.processes import run_processes

_MEGABYTES = 100
_WARM_UP = 5
LAUNCHED = {"TORCHELASTIC_RUN_ID": "benchmark", "GROUP_RANK": "0"}  # as torchrun does


def main() -> None:
    """Measure and print two tables."""
    parser = start_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="how often each hash is timed")
    parser.add_argument("--steps", type=int, default=60, help="how many steps each model is trained")
    options = parser.parse_args()
    tables = [tabulate_hashes(options.rounds), tabulate_training(options.steps)]
    print_with_load(*tables)


def tabulate_hashes(rounds: int) -> Table:
    """Time fingerprints of 100 MB, cut into few and many tensors."""
    torch.set_num_threads(1)
    contenders: dict[str, Callable[[], object]] = {}
    for count in (1, 100, 10_000):
        tensors = {str(i): torch.randn(_MEGABYTES * 10**6 // 4 // count) for i in range(count)}
        contenders[f"fingerprint, {count} tensor{'s' if count > 1 else ''}"] = lambda tensors=tensors: fingerprint_all(
            tensors
        )
    data = memoryview(torch.randn(_MEGABYTES * 10**6 // 4).numpy()).cast("B")
    contenders["zlib.crc32"] = lambda: zlib.crc32(data)
    contenders["hashlib.blake2b"] = lambda: hashlib.blake2b(data).digest()
    words = torch.frombuffer(data, dtype=torch.float32)
    contenders["reading only (sum)"] = lambda: words.sum()

    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_, (name, run) in itertools.product(range(rounds + 1), contenders.items()):
        started = time.process_time()
        run()
        if round_:
            times[name].append(time.process_time() - started)
    title = f"{_MEGABYTES} MB, one thread, median (and quartiles) of {rounds}"
    table = make_columns(title, "hash", "ms", title_justify="left")
    for name, own in times.items():
        low, middle, high = (1000 * value for value in statistics.quantiles(own, n=4))
        table.add_row(name, f"{middle:.1f} ({low:.1f}, {high:.1f})")
    return table


def tabulate_training(steps: int) -> Table:
    """Train each model and compare after every step."""
    columns = ("model", "compared", "step", "comparison", "share every 100 steps")
    table = make_columns(f"two processes, Adam, medians of {steps} steps", *columns, title_justify="left")
    for name in CASES:
        with redirect_stdout(None):  # what the ranks say
            results = run_processes(train, 2, name, steps, timeout=300, env=LAUNCHED)
        step, comparison, size = results[0]
        share = comparison / (100 * step)
        times = [f"{1000 * seconds:.1f} ms" for seconds in (step, comparison)]
        table.add_row(name, f"{size / 1e6:.1f} MB", *times, f"{share:.2%}")
    return table


class WithAdam(Classifier):
    """As the other benchmarks train, but with two more tensors per parameter to compare."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def train(name: str, steps: int) -> tuple[float, float, int]:
    """Train one model on this rank; return seconds of a step and of a comparison, and the bytes that are compared."""
    case = CASES[name]
    consistency = ReplicaConsistency(every_n_steps=1)
    before, after = StepTimes(time.process_time), StepTimes(time.process_time)
    devices = int(os.environ["WORLD_SIZE"])
    options = {"devices": devices, "max_steps": steps + _WARM_UP, "plugins": []}
    trainer = make_trainer("ddp", before, consistency, after, **options)
    torch.manual_seed(1)
    module: LightningModule = WithAdam(case.build())
    trainer.fit(module, load(None, case.batch_size // 2, case.shape))
    parameters: list[Tensor] = list(module.parameters())
    size = 3 * sum(parameter.nbytes for parameter in parameters)
    comparisons = [end - start for start, end in zip(before.ends, after.ends, strict=True)]
    # From the end of a comparison to the beginning of the next one.
    whole_steps = [start - end for end, start in zip(after.ends, before.ends[1:], strict=False)]
    step, comparison = (statistics.median(seconds[_WARM_UP:]) for seconds in (whole_steps, comparisons))
    return step, comparison, size


if __name__ == "__main__":
    main()
