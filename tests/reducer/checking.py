"""Tools of the checks of the reducer, which ranks run one after another in one launch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.support import devices

EXACT = 1e-12
FLOAT32 = 1e-6
FLOAT16 = 1e-3

Judge = Callable[[object, int], bool]
CHECKS: dict[str, Callable[[], object]] = {}
EXPECTED: dict[str, object] = {}
MARKS: dict[str, pytest.MarkDecorator] = {}  # of the checks that virtual devices cannot run


def check(expected: object, lacking: str = "") -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register a check with its result on every rank: a value, a largest number, or a `Judge` of result and rank."""

    def register(function: Callable[[], object]) -> Callable[[], object]:
        assert function.__name__ not in CHECKS
        if lacking:
            MARKS[function.__name__] = devices.virtual_devices_lack(lacking)
        CHECKS[function.__name__], EXPECTED[function.__name__] = function, expected
        return function

    return register


def says(message: str, first: int = 0) -> Judge:
    """Judge that a result contains a message, with the numbers of this rank and of the other one of two."""
    return lambda found, rank: message.format(rank=rank, own=first + rank, other=first + 1 - rank) in str(found)


def agrees(found: object, expected: object, rank: int) -> bool:
    if callable(expected):
        return expected(found, rank)
    if isinstance(expected, tuple):
        return isinstance(found, tuple) and all(
            agrees(one, other, rank) for one, other in zip(found, expected, strict=True)
        )
    if isinstance(expected, float):
        return isinstance(found, float) and found <= expected
    return found == expected


def batch(rank: int, rows: int = 4, width: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def combined(rows: Callable[[int], int] = lambda rank: 4) -> Tensor:
    return torch.cat([batch(rank, rows(rank)) for rank in range(dist.get_world_size())])


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def largest_error(found: nn.Module, wanted: nn.Module) -> float:
    pairs = list(zip(gradients(found), gradients(wanted), strict=True))
    if any((one is None) != (other is None) for one, other in pairs):
        return float("inf")
    dense = [(one.to_dense(), other.to_dense()) for one, other in pairs if one is not None]
    return max((float((one - other).abs().max()) for one, other in dense), default=0.0)


def spread(tensor: Tensor) -> float:
    """Largest difference to the first rank's, on any rank."""
    first = tensor.detach().clone().contiguous()
    dist.broadcast(first.view(-1).view(torch.uint8), 0)  # gloo does not know every type
    largest = (tensor.detach() - first).abs().max().double()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


class Comparison:
    """A module on one process with the batches of all ranks, and its copy on this rank; `error` is of all steps."""

    def __init__(self, alone: nn.Module, **options: Any) -> None:
        self.alone, self.together = alone, copy.deepcopy(alone)
        self.reducer = GradientReducer(self.together, **options)
        self.error = 0.0

    def zero_grad(self) -> None:
        self.alone.zero_grad()
        self.together.zero_grad()

    def step(
        self, loss: Callable[[nn.Module, Tensor], Tensor] | None = None, rows: Callable[[int], int] = lambda rank: 4
    ) -> None:
        """Run a backward pass of a mean over as many rows as each rank has, weighted by the rows."""
        loss = loss or (lambda module, x: module(x).pow(2).mean())
        loss(self.alone, combined(rows)).backward()
        own = rows(dist.get_rank())
        with self.reducer.synchronize(own):
            if own:
                loss(self.together, batch(dist.get_rank(), own)).backward()
        self.error = max(self.error, largest_error(self.together, self.alone))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def step(reducer: GradientReducer, module: nn.Module, weight: float = 1.0) -> None:
    with reducer.synchronize(weight):
        module[0](batch(dist.get_rank())).pow(2).mean().backward()
