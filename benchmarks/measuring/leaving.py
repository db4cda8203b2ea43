"""A training run on two processes that is told to end at some moment, again and again, until it is done."""

import hashlib
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import DDPJoinStrategy
from measuring.fitting import make_trainer
from tests.support.ports import free_port

RANKS = 2
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LIMIT = 60.0  # seconds for a run to end after its signal
_COUNTS = (900, 600)  # samples of the ranks, so that a third of each epoch is the uneven phase
_BATCH = 3
_EPOCHS = 2
_STARTED, _ENDED = "started", "ended"


class Classifier(LightningModule):
    """Fast steps that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", functional.cross_entropy(self.network(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer with a state."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


class _Reporter(Callback):
    def __init__(self, parent: Connection) -> None:
        self._parent = parent

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parent.send(_STARTED)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parent.send(_ENDED)


@dataclass(slots=True)
class Ending:
    """How a run has ended."""

    codes: list[int | None]  # of the ranks; None if one had to be killed
    seconds: float  # from the signal to the end of the last rank
    is_complete: bool  # training had come to its end before the signal
    digests: set[str]  # of the ranks that came to their end


def run(folder: Path, resume: bool, signum: signal.Signals | None, rank: int, delay: float) -> Ending:
    """Train until a signal comes to a rank, seconds after the start of training, or the end.

    The folder gets checkpoints and the output of the ranks.
    """
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("fork")  # the packages have been imported already
    port = free_port()
    pipes = [context.Pipe() for _ in range(RANKS)]
    processes = [
        context.Process(target=_train, args=(number, port, folder, resume, pipes[number][1])) for number in range(RANKS)
    ]
    for process, (_, end) in zip(processes, pipes, strict=True):
        process.start()
        end.close()
    pipes[rank][0].poll(LIMIT)
    started = time.monotonic()
    if signum is not None:
        time.sleep(delay)
        started = time.monotonic()
        if processes[rank].is_alive():
            os.kill(processes[rank].pid or 0, signum)
    for process in processes:
        process.join(max(0.0, started + LIMIT - time.monotonic()))
    seconds = time.monotonic() - started
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    said = {message for pipe, _ in pipes for message in _read(pipe)}
    return Ending(codes, seconds, _ENDED in said, said - {_STARTED, _ENDED})


def _read(pipe: Connection) -> Iterator[str]:
    """Read what a process has sent that has ended."""
    try:
        while pipe.poll():
            yield pipe.recv()
    except EOFError:
        return


def _train(rank: int, port: int, folder: Path, resume: bool, parent: Connection) -> None:
    with (folder / f"rank{rank}.log").open("a", buffering=1) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    os.environ.update(
        LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(RANKS)
    )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        parent.send(_fit(rank, folder, resume, parent))
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise


def _fit(rank: int, folder: Path, resume: bool, parent: Connection) -> str:
    seed_everything(rank if not resume else random.randrange(10**6), verbose=False)
    generator = torch.Generator().manual_seed(rank)
    features = torch.randn(_COUNTS[rank], 6, generator=generator)
    data = TensorDataset(features, features[:, :3].argmax(1))
    module = Classifier()
    validating = {"val_check_interval": 100, "limit_val_batches": 5}
    trainer = make_trainer(
        DDPJoinStrategy(), _Reporter(parent), devices=RANKS, max_epochs=_EPOCHS, use_distributed_sampler=False,
        default_root_dir=folder, plugins=[], **validating,
    )  # fmt: skip
    resumed = {"ckpt_path": "hpc", "weights_only": True} if resume else {}
    trainer.fit(module, DataLoader(data, _BATCH, shuffle=True), DataLoader(data, 8), **resumed)
    return digest_of(module, trainer.optimizers[0])


def digest_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of parameters, buffers and the state of the optimizer."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    parts = [*module.parameters(), *module.buffers(), *states]
    return hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in parts)).hexdigest()


def check_checkpoints(folder: Path, load: Callable[[Path], Any]) -> tuple[int, list[str]]:
    """Return the number of checkpoints that can be loaded, and what is wrong with the others, or left half."""
    loadable, problems = 0, []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".ckpt":
            try:
                load(path)
                loadable += 1
            except (RuntimeError, EOFError, OSError) as error:
                problems.append(f"{path.name}: {error}")
        elif path.suffix == ".partial":
            problems.append(f"{path.name} was left")
    return loadable, problems
