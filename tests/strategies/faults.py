"""Training in which one of two ranks gets into trouble: the ranks, their runs, and the outcome of a run.

Tests and benchmarks use it; the process that imports it forks the ranks.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy, ManualEnvironment
from tests.distributed import rank_server
from tests.support.ports import free_port

# In batches. Rank 1 has fewer, so that batch 6 is in the uneven phase, where rank 1 makes shadow steps.
COUNTS = (8, 4)
VALIDATION = 3
WHEN = {"even": 2, "tail": 6, "validation": 1}
CHECKPOINTS = "checkpoints"
_BEATS = 1.5  # seconds after which heartbeats say where a rank is, however short the steps are
_DISK = "1500k"  # room for some checkpoints
_CUT = 4.0  # seconds
_LEFTOVER = 8.0  # seconds that workers of loaders take to notice that their process is gone
_SUBREAPER = 36  # of prctl: processes whose parent has ended become ours, so that they are found


class Network(LightningModule):
    """Large enough that a checkpoint is not a detail of a disk."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Trouble(Callback):
    """Makes a fault of `FAULTS` in a phase of the first epoch, and writes its time into a folder."""

    def __init__(self, fault: str, culprit: int, phase: str, folder: Path, limit: float) -> None:
        self.fault, self.culprit, self.phase, self.folder, self.limit = fault, culprit, phase, folder, limit

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.phase != "validation" and trainer.current_epoch == 0 and batch_idx == WHEN[self.phase]:
            self._act(trainer)

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self.phase == "validation" and trainer.current_epoch == 0 and args[2] == WHEN["validation"]:
            self._act(trainer)

    def _act(self, trainer: Trainer) -> None:
        is_culprit = trainer.global_rank == self.culprit
        if is_culprit:
            time.sleep(_BEATS)
            part = self.folder / "fault.part"
            part.write_text(str(time.monotonic()))
            part.replace(self.folder / "fault")
        FAULTS[self.fault](self, trainer, is_culprit)


def _on_culprit(act):
    return lambda trouble, trainer, is_culprit: act(trouble) if is_culprit else None


def _fail(trouble: Trouble) -> None:
    raise ArithmeticError("boom")


def _fill_disk(trouble: Trouble, trainer: Trainer, is_culprit: bool) -> None:
    """Save a checkpoint to a disk that has become full."""
    folder = trouble.folder / CHECKPOINTS
    if trainer.is_global_zero:
        (folder / "filler").write_bytes(bytes(max(0, shutil.disk_usage(folder).free - 65536)))
    trainer.save_checkpoint(folder / "full.ckpt")


def _lose_folder(trouble: Trouble, trainer: Trainer, is_culprit: bool) -> None:
    """Save a checkpoint to a folder that has become a link to nowhere, as on a file system that is gone."""
    folder = trouble.folder / CHECKPOINTS
    if trainer.is_global_zero:
        folder.rename(folder.with_name("vanished"))
        folder.symlink_to(trouble.folder / "nowhere" / "at" / "all")
    trainer.save_checkpoint(folder / "lost.ckpt")


def _wait_for_cut(trouble: Trouble) -> None:
    """Wait until the link has been cut."""
    deadline = time.monotonic() + 30
    while not (trouble.folder / "cut").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


FAULTS = {
    "none": _on_culprit(lambda trouble: None),
    "kill -9": _on_culprit(lambda trouble: os.kill(os.getpid(), signal.SIGKILL)),
    "SIGSTOP": _on_culprit(lambda trouble: os.kill(os.getpid(), signal.SIGSTOP)),
    "exception": _on_culprit(_fail),
    "out of memory": _on_culprit(lambda trouble: torch.empty(2**50)),
    "full disk": _fill_disk,
    "vanished folder": _lose_folder,
    "slow rank": _on_culprit(lambda trouble: time.sleep(1.5 * trouble.limit)),
    "link cut for 4 s": _on_culprit(_wait_for_cut),
    "link cut": _on_culprit(_wait_for_cut),
}
OF_CHECKPOINTS = ("full disk", "vanished folder")  # written by rank 0 only
OF_LINKS = ("link cut for 4 s", "link cut")
GO_ON = ("none", "slow rank", "link cut for 4 s")  # training completes


def train(
    *,
    rank: int,
    main_port: int,
    folder: str,
    fault: str,
    culprit: int,
    phase: str,
    limit: float,
    strategy: str = "ddp_join",
    main_address: str = "127.0.0.1",
    hosts: bool = False,
    workers: int = 0,
) -> dict[str, Any]:
    """Train two epochs on this rank of two; returns the number of steps."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    counts = COUNTS if strategy == "ddp_join" else (COUNTS[0],) * 2
    batches = [torch.randn(4, 8) for _ in range(counts[rank])]
    kind = DDPJoinStrategy if strategy == "ddp_join" else DDPCheckpointStrategy
    limits = {"timeout": timedelta(minutes=10), "stall_timeout": timedelta(seconds=limit)}
    environment = LightningEnvironment()
    if hosts:
        environment = ManualEnvironment(num_nodes=2, node_rank=rank, main_address=main_address, main_port=main_port)
    else:
        os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR=main_address, MASTER_PORT=str(main_port))
    trainer = Trainer(
        strategy=kind(process_group_backend="gloo", network_interface="auto", **limits),
        accelerator="cpu",
        devices=1 if hosts else 2,
        num_nodes=2 if hosts else 1,
        plugins=[environment],
        max_epochs=2,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Trouble(fault, culprit, phase, Path(folder), limit),
            ModelCheckpoint(Path(folder) / CHECKPOINTS, every_n_train_steps=2, save_top_k=-1),
        ],
    )
    loader = DataLoader(batches, batch_size=None, num_workers=workers)
    trainer.fit(Network(), loader, DataLoader([torch.randn(4, 8) for _ in range(VALIDATION)], batch_size=None))
    return {"steps": trainer.global_step}


@dataclass(frozen=True)
class Fault:
    """A fault on a rank in a phase."""

    kind: str  # a key of `FAULTS`
    rank: int
    phase: str  # a key of `WHEN`


@dataclass
class FaultOutcome:
    """The outcome of a run."""

    fault: Fault
    seconds: float | None  # from the fault to the end of the last living rank; None after the hard limit
    rows: list[dict[str, Any]]  # of the ranks, see `rank_server.describe`
    checkpoints: int
    broken: list[str]  # checkpoints that cannot be loaded
    left: int = 0  # processes

    @property
    def living(self) -> list[dict[str, Any]]:
        """Outcomes of the ranks that could say something."""
        silent = self.fault.kind in ("kill -9", "SIGSTOP")
        return [row for row in self.rows if not (silent and row["rank"] == self.fault.rank)]

    @property
    def said(self) -> str:
        """What a rank said that was not the culprit, or the culprit if there is no other."""
        rows = sorted(self.rows, key=lambda row: row["rank"] == self.fault.rank)
        return next((row["error"] for row in rows if row["error"]), "")

    @property
    def is_right(self) -> bool:
        """Whether nothing hung, broke or stayed, and training went on or ended as it should."""
        completes = all(row["value"] for row in self.rows)
        goes_on = self.fault.kind in GO_ON
        return self.seconds is not None and completes == goes_on and not self.broken and not self.left


def list_faults(kinds: Sequence[str], phases: Sequence[str], ranks: Sequence[int] = (0, 1)) -> list[Fault]:
    """Return the faults there are of some kinds, in some phases, on some ranks."""
    return [
        Fault(kind, rank, phase)
        for kind in kinds
        for rank in ranks
        for phase in phases
        if rank == 0 or kind not in OF_CHECKPOINTS
    ]


def run_fault(
    fault: Fault, folder: Path, limit: float, hosts: Any = None, port: int = 29500, **options: Any
) -> FaultOutcome:
    """Train on two ranks with a fault; cut links need hosts of `tests.distributed.hosts` and a free port there."""
    (folder / CHECKPOINTS).mkdir(parents=True)
    settings = {
        "folder": str(folder), "fault": fault.kind, "culprit": fault.rank, "phase": fault.phase, "limit": limit,
        **options,
    }  # fmt: skip
    hard_limit = limit + 60
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with _small_disk(folder / CHECKPOINTS, fault.kind == "full disk"):
        if hosts is None:
            settings |= {"main_port": free_port()}
            jobs = [{"rank": rank, "arguments": {**settings, "rank": rank}} for rank in range(2)]
            rows = rank_server.run(train, jobs, hard_limit, folder)
        else:
            settings |= {"hosts": True, "main_address": "node1", "main_port": port}
            with _cutting(fault, hosts, folder):
                ranks = [(rank + 1, {**settings, "rank": rank}) for rank in range(2)]
                outcomes = hosts.run("train_with_fault", ranks, limit=hard_limit)
            rows = [vars(outcome) for outcome in outcomes]
        left = _count_left(before)
        checkpoints = list(folder.rglob("*.ckpt"))
        outcome = FaultOutcome(fault, None, rows, len(checkpoints), _list_broken(checkpoints), left)
    marker = folder / ("cut" if fault.kind in OF_LINKS else "fault")
    if marker.exists() and not any(row["timed_out"] for row in rows):
        outcome.seconds = max(row["ended"] for row in outcome.living) - float(marker.read_text())
    return outcome


def become_subreaper() -> None:
    """Adopt the processes that ranks leave behind, so that they can be counted."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)


def _count_left(before: set[int]) -> int:
    """Count processes below this one that do not end by themselves, and end them."""
    deadline = time.monotonic() + _LEFTOVER
    while (left := _list_left(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(left)


def _list_left(before: set[int]) -> list[psutil.Process]:
    left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid in before:
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
            else:
                left.append(process)
    return left


def _list_broken(paths: Sequence[Path]) -> list[str]:
    """Return the names of checkpoints that cannot be loaded."""
    broken = []
    for path in paths:
        try:
            torch.load(path, weights_only=True)
        except Exception:
            broken.append(path.name)
    return broken


@contextlib.contextmanager
def _small_disk(folder: Path, is_wanted: bool) -> Iterator[None]:
    if not is_wanted:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def _cutting(fault: Fault, hosts: Any, folder: Path) -> Iterator[None]:
    """Cut the link of the culprit's host when training has got to the fault."""
    host = fault.rank + 1
    is_over = threading.Event()

    def cut() -> None:
        while not (folder / "fault").exists():
            if is_over.wait(0.05):
                return
        hosts.configure(host, "link set eth0 down")
        (folder / "cut").write_text(str(time.monotonic()))
        is_over.wait(_CUT if fault.kind == "link cut for 4 s" else None)
        hosts.configure(host, "link set eth0 up")

    thread = threading.Thread(target=cut)
    if fault.kind in OF_LINKS:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()
