"""A contender that redirects collectives in several ways; run as `python -m measuring.redirecting`.

Of three ranks the last one has run out of data: it sleeps, and the collectives of all are to run among the other two.
What that costs is compared with the same collectives in a group of these two.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ddp_ext.steps.active_collectives import ActiveRankCollectives
from measuring.fitting import StepTimes
from measuring.models import CASES, CLASSES, TINY
from measuring.orders import WARM_UP, Orders

RANKS = 3
ACTIVE = (0, 1)
DIRECT, REPLACED, MODE, BACKEND = "direct", "replaced methods", "dispatch mode", "Python backend"
PASSES, SMALL, LARGE = "forward and backward", "all-reduce of 4 bytes", "all-reduce of 1 MiB"
COLLECTIVES_OF_STEP = 10
_ELEMENTS = {SMALL: 1, LARGE: 2**18}
_BACKEND_NAME = "delegating"
_TIMEOUT = timedelta(minutes=2)

Redirect = Callable[[], AbstractContextManager[Any]]


class DelegatingGroup(dist.ProcessGroup):
    """A backend in Python: whatever the group is asked for, it asks another one. Only all-reduce, which is timed.

    Args:
        store: Where ranks find each other.
        rank: This rank, in the group.
        size: Number of ranks.
        timeout: Of a collective.

    Attributes:
        target: Does the work; in the uneven phase another group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.target: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, *arguments: Any) -> dist.Work:
        """Let another group reduce."""
        work: dist.Work = self.target.allreduce(*arguments)
        return work

    @contextmanager
    def redirect(self, target: dist.ProcessGroup) -> Iterator[None]:
        """Ask another group during a block."""
        before, self.target = self.target, target
        try:
            yield
        finally:
            self.target = before


class RedirectingMode(TorchDispatchMode):
    """Sees every operation of this thread, and gives all-reduces another group."""

    def __init__(self, target: dist.ProcessGroup) -> None:
        super().__init__()
        self._target = target.boxed()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.allreduce_.default:
            args = (args[0], self._target, *args[2:])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of all ways, made once on each rank.

    Attributes:
        pair: The active ranks.
        delegating_pair: These, with a backend in Python.
        delegating_all: All ranks, with a backend in Python.
        tail: What we redirect with.
    """

    pair: Any
    delegating_pair: Any
    delegating_all: Any
    tail: ActiveRankCollectives

    @classmethod
    def make(cls) -> "Groups":
        """Make them; on every rank."""
        dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=RANKS, timeout=_TIMEOUT)
        dist.Backend.register_backend(_BACKEND_NAME, DelegatingGroup, devices=["cpu"])
        pair, delegating_pair = (dist.new_group(list(ACTIVE), backend=backend) for backend in (None, _BACKEND_NAME))
        tail = ActiveRankCollectives(dist.new_group())
        tail.prepare(ACTIVE, torch.nn.Module())
        return cls(pair, delegating_pair, dist.new_group(backend=_BACKEND_NAME), tail)

    def choose(self, way: str, in_uneven_phase: bool) -> tuple[dist.ProcessGroup, Redirect]:
        """Return the group that a collective is issued in, and what redirects it."""
        pair, everyone = self.pair, self.delegating_all
        if not in_uneven_phase:
            return (self.delegating_pair if way == BACKEND else pair), nullcontext
        ways: dict[str, tuple[Any, Redirect]] = {
            REPLACED: (dist.group.WORLD, lambda: self.tail.redirect()),
            MODE: (dist.group.WORLD, lambda: RedirectingMode(pair)),
            BACKEND: (everyone, lambda: everyone.redirect(pair)),
        }
        return ways[way]


class Redirections:
    """Carries out orders.

    Args:
        groups: Those of this rank.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def time(self, orders: Orders, *, work: str, way: str, in_uneven_phase: bool, steps: int, ranks: int) -> None:
        """Run steps that consist of one kind of work only, and report their times.

        Args:
            orders: Where to report to.
            work: `PASSES` of a model of tiny layers, redirected as in training, each by itself; or `SMALL` or `LARGE`
                all-reduces one after the other.
            way: `REPLACED`, `MODE` or `BACKEND`; or `DIRECT`, if nothing has to be redirected.
            in_uneven_phase: Whether collectives have to be redirected.
            steps: Steps that count.
            ranks: How many ranks have got the order.

        Raises:
            RuntimeError: If a collective does not reach the active ranks.
        """
        group, redirect = self._groups.choose(way, in_uneven_phase)
        probe = torch.ones(())
        with redirect():
            dist.all_reduce(probe, group=group)
        if probe != ranks:
            raise RuntimeError(f"a sum over {ranks} ranks is {probe:g}, redirected by way of: {way}")
        step, times = _make_step(work, group, redirect), StepTimes()
        for _ in range(1 + WARM_UP + steps):
            step()
            times.end_step()
        orders.reply(times.counted)


def _make_step(work: str, group: dist.ProcessGroup, redirect: Redirect) -> Callable[[], None]:
    if work != PASSES:
        zeros = torch.zeros(_ELEMENTS[work])

        def communicate() -> None:
            with redirect():
                for _ in range(COLLECTIVES_OF_STEP):
                    dist.all_reduce(zeros, group=group)

        return communicate
    case = CASES[TINY]
    network = case.build()
    inputs, labels = torch.randn(case.batch_size, *case.shape), torch.randint(0, CLASSES, (case.batch_size,))

    def compute() -> None:
        network.zero_grad()
        with redirect():
            loss = functional.cross_entropy(network(inputs), labels)
        with redirect():
            loss.backward()

    return compute


def main() -> None:
    """Make the groups, and run some steps for each order."""
    orders = Orders()  # before gloo prints anything
    torch.set_num_threads(1)
    orders.serve(Redirections(Groups.make()).time)


if __name__ == "__main__":
    main()
