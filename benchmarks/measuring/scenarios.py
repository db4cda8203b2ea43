"""Twelve ways in which real backward passes differ from one gradient per parameter, and a judge of each."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Mode = Literal["none", "reentrant", "non-reentrant"]
MODES: tuple[Mode, ...] = ("none", "reentrant", "non-reentrant")
STEPS = 5
WIDTH = 8


def run_segment(segment: nn.Module, x: Tensor, mode: Mode) -> Tensor:
    """Run a part of a model whose activations are recomputed in the backward pass if asked for."""
    if mode == "none":
        return segment(x)
    return checkpoint(segment, x, use_reentrant=mode == "reentrant")


class Model(nn.Module):
    """A trunk of segments, each recomputed in the backward pass if asked for, and a head for each of two tasks."""

    def __init__(self, mode: Mode, tied: bool = False) -> None:
        super().__init__()
        self.mode = mode
        self.first = nn.Linear(WIDTH, WIDTH)
        self.segments = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH if tied else 1) for _ in range(2))
        if tied:
            self.heads[0].weight = self.first.weight
            self.heads[1].weight = self.segments[1][0].weight
        self.double()

    def forward(self, x: Tensor, tasks: Sequence[int] = (0,), reused: Sequence[int] = ()) -> list[Tensor]:
        """Return an output for each task; the segments in `reused` are applied twice."""
        x = self.first(x)
        for index, segment in enumerate(self.segments):
            for _ in range(2 if index in reused else 1):
                x = run_segment(segment, x, self.mode)
        return [self.heads[task](x) for task in tasks]


class Driver(Protocol):
    """How a scenario calls the model, passes a loss backward and puts off synchronisation."""

    model: Model
    forward: Callable[..., list[Tensor]]

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Pass a loss backward, and synchronise unless that is put off."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without synchronising them."""


Step = Callable[[Driver, Tensor, int, int], None]
"""Called with the driver, the batch, the number of the step and the rank."""


@dataclass(frozen=True)
class Scenario:
    """What happens between two optimizer steps, on a rank."""

    name: str
    step: Step
    tied: bool = False  # weights of the model
    frozen: bool = False  # the segments, before gradients are first synchronised


def _loss(outputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([output.pow(2).mean() for output in outputs]).sum()


def _one_backward(options: Callable[[int, int], dict[str, Sequence[int]]]) -> Step:
    def run_step(run: Driver, x: Tensor, step: int, rank: int) -> None:
        run.backward(_loss(run.forward(x, **options(step, rank))))

    return run_step


_both = _one_backward(lambda step, rank: {"tasks": (0, 1)})


def _two_backwards_of_one_forward(run: Driver, x: Tensor, step: int, rank: int) -> None:
    first, second = run.forward(x, tasks=(0, 1))
    run.backward(_loss([first]), retain_graph=True)
    run.backward(_loss([second]))


def _forward_and_backward_per_task(run: Driver, x: Tensor, step: int, rank: int) -> None:
    for task in (0, 1):
        run.backward(_loss(run.forward(x, tasks=(task,))))


def _forward_per_task(run: Driver, x: Tensor, step: int, rank: int) -> None:
    run.backward(_loss([*run.forward(x, tasks=(0,)), *run.forward(x, tasks=(1,))]))


def _accumulation(run: Driver, x: Tensor, step: int, rank: int) -> None:
    first, second = x.chunk(2)
    with run.no_sync():
        run.backward(_loss(run.forward(first, tasks=(0, 1))))
    run.backward(_loss(run.forward(second, tasks=(0, 1))))


def _accumulation_later(run: Driver, x: Tensor, step: int, rank: int) -> None:
    (_accumulation if step else _both)(run, x, step, rank)


def _thawed(run: Driver, x: Tensor, step: int, rank: int) -> None:
    if step == 2:
        run.model.segments.requires_grad_(True)
    _both(run, x, step, rank)


def _frozen_and_thawed(run: Driver, x: Tensor, step: int, rank: int) -> None:
    run.model.segments[1:].requires_grad_(step not in (1, 2))
    _both(run, x, step, rank)


SCENARIOS = (
    Scenario("sum of losses, segment reused", _one_backward(lambda step, rank: {"tasks": (0, 1), "reused": (0, 2)})),
    Scenario("two backwards of one forward", _two_backwards_of_one_forward),
    Scenario("forward and backward per task", _forward_and_backward_per_task),
    Scenario("forward per task, one backward", _forward_per_task),
    Scenario("alternating task", _one_backward(lambda step, rank: {"tasks": (step % 2,)})),
    Scenario("different task on each rank", _one_backward(lambda step, rank: {"tasks": ((step + rank) % 2,)})),
    Scenario(
        "reused segments change",
        _one_backward(lambda step, rank: {"tasks": (0, 1), "reused": (0,) if step < 2 else (1, 2)}),
    ),
    Scenario("tied weights", _both, tied=True),
    Scenario("accumulation", _accumulation),
    Scenario("accumulation after a first step without", _accumulation_later),
    Scenario("frozen before, then thawed", _thawed, frozen=True),
    Scenario("frozen later, then thawed", _frozen_and_thawed),
)


class OneProcess:
    """Runs a scenario for all ranks in turn, on one model: what every other way is compared with."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.forward = model
        self.share = 1.0

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Add this rank's share to the gradients."""
        (loss * self.share).backward(retain_graph=retain_graph)

    def no_sync(self) -> AbstractContextManager[None]:
        """There is nothing to synchronise."""
        return nullcontext()


Optimizers = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


@dataclass(frozen=True)
class Verdict:
    """How far a rank was from one process, and from the other ranks, in any step."""

    gradient_error: float  # relative to the norm of the gradients of one process
    missing: bool  # a gradient, on either side only
    rank_difference: float  # of a parameter to the first rank's

    @property
    def passed(self) -> bool:
        """Whether gradients were right and ranks identical."""
        return self.gradient_error < 1e-12 and not self.missing and self.rank_difference == 0.0


def play(
    scenario: Scenario,
    mode: Mode,
    optimizer: str,
    connect: Callable[[Model], Driver],
    samples: Callable[[int], int] = lambda rank: 4,
    weigh: Callable[[Driver, int], None] = lambda run, samples: None,
) -> Verdict:
    """Train some steps of a scenario on this rank, next to one process that has the batches of all ranks.

    The process group has to be there. `connect` prepares a model for several ranks; `samples` is the even size of a
    rank's batch, and `weigh` is called with that of this rank before a step.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = OneProcess(Model(mode, scenario.tied))
    if scenario.frozen:
        alone.model.segments.requires_grad_(False)
    together = connect(copy.deepcopy(alone.model))
    runs = (alone, together)
    optimizers = [Optimizers[optimizer](run.model.parameters()) for run in runs]
    total = sum(samples(other) for other in range(world_size))
    error, missing, difference = 0.0, False, 0.0
    for step in range(STEPS):
        batches = list(_batches(step, [samples(other) for other in range(world_size)]))
        for other, batch in enumerate(batches):
            alone.share = samples(other) / total
            scenario.step(alone, batch, step, other)
        weigh(together, samples(rank))
        scenario.step(together, batches[rank], step, rank)
        found, lacks = _compare(alone.model, together.model)
        error, missing = max(error, found), missing or lacks
        for one in optimizers:
            one.step()
            one.zero_grad()
        difference = max(difference, difference_to_first_rank(together.model))
    return Verdict(error, missing, difference)


def _batches(step: int, sizes: Sequence[int]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(step)
    for size in sizes:
        yield torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)


def _compare(alone: nn.Module, together: nn.Module) -> tuple[float, bool]:
    pairs = [(one.grad, other.grad) for one, other in zip(alone.parameters(), together.parameters(), strict=True)]
    if any((one is None) != (other is None) for one, other in pairs):
        return 0.0, True
    present = [(one, other) for one, other in pairs if one is not None and other is not None]
    wanted = torch.cat([one.flatten() for one, _ in present])
    found = torch.cat([other.flatten() for _, other in present])
    return float((wanted - found).norm() / wanted.norm()), False


def difference_to_first_rank(model: nn.Module) -> float:
    """Return the largest difference of a parameter on any rank to that of the first rank."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = flat.clone()
    dist.broadcast(first, 0)
    largest = (flat - first).abs().amax()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)
