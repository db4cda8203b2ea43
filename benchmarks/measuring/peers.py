"""Who is compared with `ddp_checkpoint`, and whether their gradients are right in each of the scenarios."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from measuring.scenarios import SCENARIOS, Mode, Verdict, play
from tests.support.processes import RankError, RankTimeoutError, run_processes

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
    """A scenario's driver with our reducer: one synchronisation per backward pass, with the weight of this rank."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.forward = model
        self.weight = 1.0
        self._reducer = GradientReducer(model, **options)
        self._blocked = False

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Pass a loss backward, and synchronise unless that is put off."""
        if self._blocked:
            loss.backward(retain_graph=retain_graph)
        else:
            with self._reducer.synchronize(self.weight):
                loss.backward(retain_graph=retain_graph)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
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

    P right; E an error; H no end within the hard limit; D ranks differ, or are equal but wrong, and nobody is told.
    """

    letter: str
    why: str = ""


def judge(name: str, scenario: str, mode: Mode, optimizer: str) -> Outcome:
    """Play a scenario on processes of its own, and return the outcome that a user would meet."""
    try:
        with redirect_stdout(None):  # what the ranks print
            verdicts = run_processes(_play, RANKS, name, scenario, mode, optimizer, timeout=HARD_LIMIT)
    except RankTimeoutError:
        return Outcome("H")
    except RankError as error:  # of any rank, which ends the others
        return Outcome("E", str(error).splitlines()[0][:_LONGEST])
    return next((Outcome("D", str(verdict)) for verdict in verdicts if not verdict.passed), Outcome("P"))


def _play(name: str, scenario: str, mode: Mode, optimizer: str) -> Verdict:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chosen = next(one for one in SCENARIOS if one.name == scenario)
    return play(chosen, mode, optimizer, lambda model: connect(name, model))
