"""What becomes of `ddp_join` under torchrun when its processes are killed, again and again.

Two agents of torchrun host one rank each, as on two nodes. A random rank is killed at a random moment; torchrun
restarts all, and they resume from the last checkpoint, which is never more than some steps old. In the end parameters,
buffers and the state of the optimizer have to be those of a run without interruption, bit for bit.

Run it with `python benchmarks/elastic.py --kills 20`; it takes some minutes. It ends with code 1 if any restart
failed.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from measuring.command import start_parser
from measuring.comparison import make_columns
from measuring.fitting import make_trainer
from measuring.leaving import Classifier, digest_of
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import DDPJoinStrategy
from tests.support.ports import free_port

AGENTS = 2
_SAMPLES, _BATCH = 1200, 3
_EVERY = 10  # steps between two checkpoints
_PAUSE = 0.004  # seconds in each step, so that there is time to be killed
LIMIT = 120.0  # seconds for a start or a restart
_LATEST = 1.0  # seconds in training after which a rank is killed


@dataclass(slots=True)
class Restart:
    """What came of a kill."""

    rank: int  # which was killed
    step: int  # the global step from which the ranks resumed
    seconds: float  # until they did


def main() -> None:
    """Kill, and count."""
    parser = start_parser(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="how many processes to kill")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--train", type=Path, help=argparse.SUPPRESS
    )  # by torchrun: a folder for checkpoints and results
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        _, whole = run(Path(folder), "whole", 0, draw)
        restarts: list[Restart] = []
        equal = runs = 0
        while len(restarts) < options.kills:
            made, digests = run(Path(folder), f"{runs}", options.kills - len(restarts), draw)
            restarts += made
            equal += digests == whole
            runs += 1
            if not made:
                break
    title = f"kills of one of {AGENTS} ranks under torchrun"
    table = make_columns(title, "killed", "ranks went on from step", "after seconds")
    for restart in restarts:
        table.add_row(f"rank {restart.rank}", f"{restart.step}", f"{restart.seconds:.1f}")
    counts = f"{len(restarts)} of {options.kills} restarts; {equal} of {runs} runs ended as the uninterrupted one."
    Console().print(table, counts)
    raise SystemExit(len(restarts) != options.kills or equal != runs)


class _Reporter(Callback):
    """Says which process is which rank, and at which step it has begun."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        draft = self._folder / f"draft-{trainer.global_rank}"
        draft.write_text(f"{trainer.global_rank} {trainer.global_step}")
        draft.replace(self._folder / f"started-{os.getpid()}")

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(_PAUSE)


def train(folder: Path) -> None:
    """Train, from the last checkpoint if there is one."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)  # deals the samples out
    torch.manual_seed(int(os.environ["RANK"]) + 10 * int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(_SAMPLES, 6, generator=generator)
    data = TensorDataset(features, features[:, :3].argmax(1))
    module = Classifier()
    saving = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=_EVERY, save_last=True, save_top_k=1)
    options = {"num_nodes": AGENTS, "max_epochs": 1, "default_root_dir": folder, "enable_checkpointing": True}
    trainer = make_trainer(DDPJoinStrategy(), _Reporter(folder), saving, devices=1, plugins=[], **options)
    trainer.fit(module, DataLoader(data, _BATCH, shuffle=True), ckpt_path="last", weights_only=True)
    (folder / f"digest-{trainer.global_rank}").write_text(digest_of(module, trainer.optimizers[0]))


def run(parent: Path, name: str, kills: int, draw: random.Random) -> tuple[list[Restart], list[str]]:
    """Train, and kill up to so many ranks on the way; return the restarts, and the digest of each rank."""
    folder = parent / name
    folder.mkdir()
    with (folder / "output").open("wb") as output:
        port = free_port()
        agents = [_start_agent(folder, port, kills, output.fileno()) for _ in range(AGENTS)]
        try:
            restarts = _kill_some(folder, agents, kills, draw)
            for agent in agents:
                agent.wait(LIMIT)
        except (subprocess.TimeoutExpired, TimeoutError) as error:
            print(f"{name}: {error}\n{(folder / 'output').read_text()[-3000:]}", file=sys.stderr)
            restarts = []
        finally:
            for agent in agents:
                _end(agent)
    return restarts, [path.read_text() for path in sorted(folder.glob("digest-*"))]


def _kill_some(folder: Path, agents: "list[subprocess.Popen[bytes]]", kills: int, draw: random.Random) -> list[Restart]:
    started = _wait_for_ranks(folder, agents)
    restarts = []
    for _ in range(kills):
        time.sleep(draw.uniform(0.0, _LATEST))
        rank = draw.randrange(AGENTS)
        if started is None or any(agent.poll() is not None for agent in agents):
            break
        moment = time.monotonic()
        os.kill(started[rank][0], signal.SIGKILL)
        started = _wait_for_ranks(folder, agents)
        restarts += [] if started is None else [Restart(rank, started[0][1], time.monotonic() - moment)]
    return restarts


def _wait_for_ranks(folder: Path, agents: "list[subprocess.Popen[bytes]]") -> dict[int, tuple[int, int]] | None:
    """Return process and step of each rank once all train; None if the run has come to its end instead."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        found = {}
        for path in folder.glob("started-*"):
            rank, step = map(int, path.read_text().split())
            found[rank] = int(path.name.partition("-")[2]), step
        if len(found) == AGENTS:
            for path in folder.glob("started-*"):
                path.unlink()
            return found
        if all(agent.poll() is not None for agent in agents):
            return None
        time.sleep(0.02)
    raise TimeoutError(f"the ranks did not train within {LIMIT:g} s")


def _start_agent(folder: Path, port: int, restarts: int, output: int) -> "subprocess.Popen[bytes]":
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{AGENTS}", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", f"{restarts}"),
        *("--monitor-interval", "0.1", __file__, "--train", str(folder)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)


def _end(agent: "subprocess.Popen[bytes]") -> None:
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


if __name__ == "__main__":
    main()
