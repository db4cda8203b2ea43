"""Fits that wait for their turns: ranks forked from one process, with the package of any tree.

Processes that are started separately may be slower or faster by a quarter for as long as they live, depending on where
their memory happens to lie. Forks of one process, which has imported torch and Lightning but not the package, share
that luck.
"""

import importlib
import itertools
import logging
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn

from measuring.contender import find_free_port
from measuring.models import CASES, Segmented, load_samples
from measuring.orders import HARD_LIMIT

WARM_UP = 3  # steps after each rest that are not counted

_forking = multiprocessing.get_context("fork")


class _Regression(pl.LightningModule):
    """The loss is the mean squared output; a slow rank computes it several times."""

    def __init__(self, network: nn.Module, times: int) -> None:
        super().__init__()
        self.network, self.times = network, times

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses = [self.network(batch).pow(2).mean() for _ in range(self.times)]
        return torch.stack(losses).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Turns(pl.Callback):
    """Sends the times of the steps of a turn, each from the end of the one before, and waits for another turn."""

    def __init__(self, pipe: Connection, steps: int) -> None:
        self._pipe, self._steps = pipe, steps
        self._ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self._ends.append(time.perf_counter())
        if len(self._ends) > self._steps + WARM_UP:
            self._pipe.send([end - start for start, end in itertools.pairwise(self._ends)][WARM_UP:])
            self._steps = self._pipe.recv()
            self._ends.clear()


class Fit:
    """A fit of a model on forked ranks, which stands still between turns.

    Args:
        tree: Folder that holds the package to be used.
        ranks: Number of processes.
        **order: Arguments of `_fit`.
    """

    def __init__(self, tree: Path, ranks: int, **order: Any) -> None:
        shared = {"NODE_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_PORT": str(find_free_port())}
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = _forking.Pipe()
            environment = {**shared, "LOCAL_RANK": str(rank)}
            process = _forking.Process(target=_serve, args=(tree, theirs, ranks, environment, order), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, steps: int) -> float:
        """Let the fit go on for some steps; return the median time of a step of the first rank, in seconds."""
        for pipe in self._pipes:
            pipe.send(steps)
        times = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(HARD_LIMIT):
                raise RuntimeError(f"rank {rank} did not end its turn within {HARD_LIMIT:g} s")
            times.append(pipe.recv())
        return statistics.median(times[0])

    def close(self) -> None:
        """Kill the ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@contextmanager
def started(fits: Mapping[str, Mapping[str, Any]], tree_of: Mapping[str, Path]) -> Iterator[dict[str, Fit]]:
    """Start fits by the arguments of `Fit`, and kill them after the block."""
    running: dict[str, Fit] = {}
    try:
        for name, order in fits.items():
            running[name] = Fit(tree_of[name], **order)
        yield running
    finally:
        for fit in running.values():
            fit.close()


def _serve(tree: Path, pipe: Connection, ranks: int, environment: dict[str, str], order: dict[str, Any]) -> None:
    sys.path.insert(0, str(tree))
    os.environ.update(environment)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    package = importlib.import_module("lightning_ddp_ext")
    if Path(str(package.__file__)).parents[1] != tree:
        raise RuntimeError(f"the package was imported from {package.__file__}, not from {tree}")
    _fit(pipe, ranks, int(environment["LOCAL_RANK"]), **order)


def _fit(
    pipe: Connection,
    ranks: int,
    rank: int,
    *,
    case: str,
    strategy: str,
    arguments: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    replicas: int = 1,
    threads: int = 1,
    mode: str = "none",
    slowness: Mapping[int, int] = MappingProxyType({}),
    skip: int = 0,
) -> None:
    """Fit until the process is killed; `skip` steps come before the first turn, and `slowness` is by rank, else 1."""
    import lightning_ddp_ext

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    chosen = CASES[case]
    network = chosen.build()
    if isinstance(network, Segmented):
        network.mode = mode  # type: ignore[assignment]
    made: Any = strategy
    if arguments:
        made = (pl.strategies.DDPStrategy if strategy == "ddp" else lightning_ddp_ext.BalancedDDPStrategy)(**arguments)
    loader = load_samples(batch_size or chosen.batch_size, chosen.shape)
    pl.Trainer(
        strategy=made, devices=replicas * ranks, accelerator="cpu", plugins=[LightningEnvironment()], max_epochs=-1,
        callbacks=[_Turns(pipe, pipe.recv() + skip)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(_Regression(network, slowness.get(rank, 1)), loader)  # fmt: skip
