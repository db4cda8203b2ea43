"""Who is compared with `ddp_checkpoint`, and whether their gradients are right in each of the scenarios."""

import faulthandler
import inspect
import json
import multiprocessing
import os
import sys
import tempfile
import time
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from measuring.scenarios import SCENARIOS, Driver, Mode, Model, play

OURS = "ddp_checkpoint"


def _of_this_torch(ways: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    known = inspect.signature(DistributedDataParallel).parameters
    return {name: flags for name, flags in ways.items() if flags.keys() <= known.keys()}


PEERS = _of_this_torch({
    "ddp": {},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "batched_copy": {"batched_grad_copy": True},  # torch 2.13
})  # fmt: skip
"""Arguments of `DistributedDataParallel`, and of Lightning's `DDPStrategy`, by a short name."""

MEMORY_PEERS = {**PEERS, **_of_this_torch({"lazy_buckets": {"lazy_bucket_allocation": True}})}  # torch 2.15
"""Those, and ways that only save memory."""

RANKS = 2
HARD_LIMIT = 30.0  # seconds of a play, which takes less than one
_LONGEST = 200  # characters of an error


class Wrapped:
    """A scenario's driver with torch's `DistributedDataParallel`."""

    def __init__(self, model: Any, **flags: Any) -> None:
        self.model = model
        self.forward: Any = DistributedDataParallel(model, **flags)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Pass a loss backward; whether that synchronises is up to the wrapper."""
        loss.backward(retain_graph=retain_graph)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let the wrapper not synchronise."""
        manager: AbstractContextManager[None] = self.forward.no_sync()
        return manager


class Reduced:
    """A scenario's driver with our reducer: one synchronisation per backward pass."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.forward = model
        self._reducer = GradientReducer(model)
        self._blocked = False

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Pass a loss backward, and synchronise unless that is put off."""
        if self._blocked:
            loss.backward(retain_graph=retain_graph)
        else:
            with self._reducer.synchronize():
                loss.backward(retain_graph=retain_graph)

    @contextmanager
    def no_sync(self) -> Any:
        """Accumulate gradients without synchronising them."""
        self._blocked = True
        yield
        self._blocked = False


def connect(name: str, model: nn.Module) -> Wrapped | Reduced:
    """Prepare a model for several ranks, in the way of ours or of a peer."""
    return Reduced(model) if name == OURS else Wrapped(model, **MEMORY_PEERS[name])


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a play ended.

    Attributes:
        letter: P right; E an error; H no end within the hard limit; D ranks differ, or are equal but wrong, and nobody
            is told.
        why: The error, or what is wrong.
    """

    letter: str
    why: str = ""


def judge(name: str, scenario: str, mode: Mode, optimizer: str) -> Outcome:
    """Play a scenario on processes of its own, which cost little: they are copies of one that has torch loaded.

    Args:
        name: Ours or a peer.
        scenario: The name of one of `SCENARIOS`.
        mode: How activations are recomputed.
        optimizer: A key of `Optimizers`.

    Returns:
        The worst outcome of any rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([GradientReducer.__module__, DistributedDataParallel.__module__])
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_play, args=(folder, rank, name, scenario, mode, optimizer), daemon=True)
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + HARD_LIMIT
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        ends = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        return combine([_read_outcome(Path(folder) / str(rank), end) for rank, end in enumerate(ends)])


def combine(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome that a user would meet: an error on any rank ends the others, too."""
    return min(outcomes, key=lambda outcome: "EHDP".index(outcome.letter))


def _read_outcome(file: Path, exit_code: int | None) -> Outcome:
    if file.exists():
        return Outcome(*json.loads(file.read_text()))
    return Outcome("H") if exit_code is None else Outcome("E", f"ended with exit code {exit_code}")


def _play(folder: str, rank: int, name: str, scenario: str, mode: Mode, optimizer: str) -> None:
    faulthandler.dump_traceback_later(2 * HARD_LIMIT, exit=True)  # should nobody be left who kills us
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what torch says of an error is in the exception
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    chosen = next(one for one in SCENARIOS if one.name == scenario)

    def connect_model(model: Model) -> Driver:
        return connect(name, model)

    try:
        verdict = play(chosen, mode, optimizer, connect_model)
    except Exception as error:
        outcome = ["E", str(error).strip().splitlines()[0][:_LONGEST]]
    else:
        outcome = ["P", ""] if verdict.passed else ["D", str(verdict)]
    unfinished = Path(folder) / f"{rank}.part"
    unfinished.write_text(json.dumps(outcome))
    unfinished.replace(Path(folder) / str(rank))
    os._exit(0)  # an orderly end may wait for collectives of other ranks
