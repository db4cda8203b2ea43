"""What checks of the reducer share."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer

CHECKS: dict[str, Callable[[], object]] = {}


def check(function: Callable[[], object]) -> Callable[[], object]:
    CHECKS[function.__name__] = function
    return function


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
    return max(float((one.to_dense() - other.to_dense()).abs().max()) for one, other in pairs if one is not None)


def spread(tensor: Tensor) -> float:
    """Largest difference to the first rank's, on any rank."""
    first = tensor.detach().clone().contiguous()
    dist.broadcast(first, 0)
    largest = (tensor.detach() - first).abs().max().double()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def step(reducer: GradientReducer, module: nn.Module, weight: float = 1.0) -> None:
    with reducer.synchronize(weight):
        module[0](batch(dist.get_rank())).pow(2).mean().backward()
