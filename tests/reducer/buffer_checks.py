"""Checks of buffers: their values, and buffers that appear, disappear or change shape."""

import copy
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.consistency import name_training_state
from lightning_ddp_ext.distributed.exchange import gather_integer
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.reducer.checking import EXACT, batch, check, net, says, spread, step


@check((EXACT, 0.0, 3))
def buffers_become_equal_after_every_step() -> tuple[float, float, int]:
    alone = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).double()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    starts = [copy.deepcopy(alone) for _ in range(2)]
    difference = error = 0.0
    for _ in range(3):
        for rank, start in enumerate(starts):
            start.load_state_dict(together.state_dict())
            start(batch(rank, 3 + 2 * rank))
        with reducer.synchronize(3 + 2 * dist.get_rank()):
            together(batch(dist.get_rank(), 3 + 2 * dist.get_rank())).pow(2).mean().backward()
        mean = (3 * starts[0][1].running_mean + 5 * starts[1][1].running_mean) / 8
        error = max(error, float((together[1].running_mean - mean).abs().max()))
        difference = max(difference, *(spread(buffer.double()) for buffer in together.buffers()))
    return error, difference, int(together[1].num_batches_tracked)


@check((EXACT, 0.0))
def buffers_become_equal_when_no_rank_has_weight() -> tuple[float, float]:
    """Before and after buffers are sent ahead; the mean has equal weights."""
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).double()
    reducer = GradientReducer(module)
    norm = module[1]
    error = difference = 0.0
    for weight in (0, 1 + dist.get_rank(), 0):
        module(batch(dist.get_rank()))
        mean = norm.running_mean.clone()
        dist.all_reduce(mean)
        with reducer.synchronize(weight):
            pass
        if not weight:
            error = max(error, float((norm.running_mean - mean / dist.get_world_size()).abs().max()))
        difference = max(difference, *(spread(buffer.double()) for buffer in module.buffers()))
    return error, difference


@check([1, 3, 5, 6, -1, 0, 0, 0])
def integers_come_from_the_first_rank_with_data() -> list[int]:
    module = net()
    module.register_buffer("steps", torch.tensor(0))
    module.register_buffer("mask", torch.tensor([True, False]))
    module.register_buffer("large", torch.tensor(0))
    reducer = GradientReducer(module)
    rank = dist.get_rank()
    found = []
    for first in (0, 1, 1, 0):
        active = rank >= first
        if active:
            module.steps += 1 + rank
            module.mask.logical_not_()
            module.large.fill_(-(2**62) - 1 - rank)
        with reducer.synchronize(1 if active else 0):
            if active:
                module[0:3](batch(rank)).sum().backward()
        found.append(int(module.steps))
    differences = [spread(buffer.long()) for buffer in module.buffers()]
    return [*found, int(module.large) + 2**62, *map(int, differences)]


class SilentStatistics(nn.Module):
    """Someone else's batch normalisation: torch does not increase the version of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("var", torch.ones(6, dtype=torch.float64))
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, self.weight, training=self.training)


@check(0.0)
def buffers_that_change_silently() -> float:
    module = SilentStatistics()
    reducer = GradientReducer(module)
    for number in range(8):
        with reducer.synchronize():
            module(batch(number + dist.get_rank())).pow(2).sum().backward()
    return spread(module.mean) + spread(module.var)


@check([], lacking="complex tensors")
def buffers_of_many_kinds() -> list[str]:
    module = net()
    kinds = "float16 bfloat16 float32 float64 complex64 int64 uint8 bool int8 float8_e4m3fn"
    for kind in kinds.split():
        module.register_buffer(f"of_{kind}", torch.zeros(3).to(getattr(torch, kind)))
    module.register_buffer("scalar", torch.tensor(0.0))
    module.register_buffer("empty", torch.zeros(0, 4))
    module.register_buffer("transposed", torch.zeros(3, 4).t())
    reducer = GradientReducer(module)
    for number in range(3):
        for buffer in module.buffers():
            buffer.copy_((torch.arange(buffer.numel()) % 3 + dist.get_rank() + number).view(buffer.shape))
        step(reducer, module)
    assert module.of_float32.tolist() == [2.5, 3.5, 4.5]
    assert module.of_int8.tolist() == [2, 3, 4]
    assert module.transposed.stride() == (1, 4)
    return [name for name, buffer in module.named_buffers() if buffer.numel() and spread(buffer.to(torch.complex128))]


@check([], lacking="complex tensors")
def values_equal_on_all_ranks_are_unchanged() -> list[str]:
    module = net()
    for kind in ("float32", "float64", "complex64", "complex128"):
        module.register_buffer(kind, torch.rand(1000, dtype=getattr(torch, kind)) / 3 - 0.1)
    reducer = GradientReducer(module)
    changed = []
    for weight in (3.0 + 4 * dist.get_rank(), 0.3 + dist.get_rank() / 7, 0.0, float(dist.get_rank())):
        before = {name: buffer.mul_(1.1).clone() for name, buffer in module.named_buffers()}
        step(reducer, module, weight)
        changed += [name for name, buffer in module.named_buffers() if not torch.equal(buffer, before[name])]
    return changed


@check([])
def equal_nans_are_no_difference() -> list[str]:
    module = net()
    module.register_buffer("mean", torch.zeros(3))
    reducer = GradientReducer(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            module.mean.copy_(torch.tensor([float("nan"), number, float("inf")]))
            step(reducer, module)
    return [str(one.message) for one in caught]


@check(0.0)
def means_of_values_that_differ_little_are_exact() -> float:
    module = net()
    module.register_buffer("table", torch.ones(10, dtype=torch.float64))
    reducer = GradientReducer(module)
    module.table += dist.get_rank() * 2.0**-40
    step(reducer, module)
    return float((module.table - 1 - 2.0**-41).abs().max()) + spread(module.table)


@check((0.0, 0.0, 0))
def large_buffers_are_sent_only_if_they_differ() -> tuple[float, float, int]:
    module = net()
    module.register_buffer("queue", torch.zeros(2**19, 5))
    reducer = GradientReducer(module)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for number in range(4):
            module.queue[:4] += number
            step(reducer, module)
        before = max(call.args[0].numel() for call in all_reduce.call_args_list)
        module.queue += dist.get_rank()
        step(reducer, module, 1.0 + 2 * dist.get_rank())
        largest = max(call.args[0].numel() for call in all_reduce.call_args_list)
    assert before < 2**10
    return float((module.queue[4:] - 0.75).abs().max()), spread(module.queue), int(largest > 2**20)


@check(0.0)
def buffers_that_appear_disappear_or_change_their_shape_on_all_ranks() -> float:
    """Ranks have the mean of 0 and 1 in every buffer that is set; other buffers still become equal."""
    module = net()
    for name in ("shape", "gone", "replaced", "last"):
        module.register_buffer(name, torch.zeros(2))
    reducer = GradientReducer(module)
    rank, errors = float(dist.get_rank()), []
    for number in range(6):
        module.shape = torch.full((2 + number // 2,), rank)
        module.gone = None if number in (1, 2) else torch.full((2,), rank)
        for value in (5.0, rank):
            module.replaced = torch.full((2,), value)
        module.last.fill_(rank)
        if number == 2:
            module.register_buffer("late", torch.zeros(2))
            module.append(nn.BatchNorm1d(2, affine=False).double())
            module.append(nn.BatchNorm1d(2, affine=False).double())
        if 2 <= number < 5:
            module.late.fill_(rank)
            module(batch(10 + dist.get_rank()))
        if number == 5:
            del module.late
        step(reducer, module)
        errors += [float((buffer - 0.5).abs().max()) for name, buffer in module.named_buffers() if "." not in name]
        errors += [spread(buffer) for buffer in module.buffers()]
    return max(errors)


@check((0.0, 0, 0.0), lacking="sparse tensors")
def buffers_in_unusual_memory() -> tuple[float, int, float]:
    """Elements that share memory, and a buffer that is not dense, which each rank keeps."""
    module = net()
    rank = float(dist.get_rank())
    module.register_buffer("wide", torch.full((1, 3), rank).expand(4, 3))
    module.register_buffer("edges", torch.eye(3).to_sparse())
    reducer = GradientReducer(module)
    difference = spread(module.wide)
    for _ in range(3):
        module.wide[0] += rank
        step(reducer, module)
        difference = max(difference, spread(module.wide))
    return difference + abs(float(module.wide[3, 2]) - 1.5), module.wide.stride()[0], spread(module.edges.to_dense())


@check([*[True] * 6, [], 0.0])
def parameters_and_buffers_that_torch_ignores_are_ignored() -> list[object]:
    rank = dist.get_rank()
    module = net()
    module[2].register_buffer("queue", torch.full((2 + rank,), float(rank)))
    module.register_buffer("own", torch.tensor(float(rank)))
    module.register_buffer("common", torch.tensor(float(rank)))
    module[0].bias.data.fill_(rank)
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(module, ["own"])
    ignore(module[2], [".queue"])
    ignore(module[0], {"bias"})
    reducer = GradientReducer(module)
    kept = [module.own.item() == rank, len(module[2].queue) == 2 + rank, bool((module[0].bias == rank).all())]
    for _ in range(2):
        module.zero_grad()
        module.own += rank
        module[2].queue += rank
        module.common += rank
        step(reducer, module)
    own, difference = module[0].bias.grad.clone(), spread(module[0].weight.grad) + spread(module.common)
    module.zero_grad()
    module[0](batch(rank)).pow(2).mean().backward()
    kept += [
        module.own.item() == 3 * rank,
        bool((module[2].queue == 3 * rank).all()),
        torch.equal(module[0].bias.grad, own),
    ]
    compared = [name for name in name_training_state(module) if "0.bias" in name or "own" in name or "queue" in name]
    return [*kept, compared, difference]


@check([[2, 3], 1.5, [False, True], 0.0])
def caches_may_differ_in_shape() -> list[object]:
    rank = dist.get_rank()
    module = net()
    module.register_buffer("cache", None, persistent=False)
    module.register_buffer("own", torch.tensor(0.0), persistent=False)
    module.register_buffer("count", torch.tensor(0.0))
    reducer = GradientReducer(module)
    shapes: list[int] = []
    for number in range(3):
        module.count += rank
        module.cache = torch.ones(1, 2 + bool(number)).expand(2 + (rank if number else 0), -1)
        step(reducer, module)
        shapes.append(len(module.cache))
    kept = [any(part in name for name in name_training_state(module)) for part in ("cache", "own")]
    return [shapes[:1] + gather_integer(shapes[-1])[1:], module.count.item(), kept, spread(module.count)]


@check(
    says(
        "ReplicaMismatchError: ranks are not set up alike: buffer `seen` is float32 [2] on rank 0 but float32 [3] on"
        " rank 1. Build"
    )
)
def buffers_that_differ_in_shape() -> str:
    module = net()
    module.register_buffer("seen", torch.zeros(2))
    module.register_buffer("count", torch.tensor(0))
    reducer = GradientReducer(module)
    for number in range(3):
        module.count += 1
        module.seen = torch.ones(2 + number * dist.get_rank())
        step(reducer, module)
    return "nothing was raised"
