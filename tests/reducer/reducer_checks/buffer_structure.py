"""Checks with buffers that come, go, and are not like others."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.consistency.replica_differences import name_training_state
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.reducer.reducer_checks.checking import batch, check, net, spread, step


@check
def buffers_that_change_their_shape_on_all_ranks() -> float:
    module = net()
    module.register_buffer("seen", torch.zeros(2))
    module.register_buffer("count", torch.tensor(0))
    reducer = GradientReducer(module)
    difference = 0.0
    for number in range(5):
        module.count += 1
        module.seen = torch.full((2 + number // 2,), float(dist.get_rank()))
        step(reducer, module)
        difference = max(
            difference, spread(module.seen), spread(module.count), abs(float(module.seen.sum()) - len(module.seen) / 2)
        )
    return difference


@check
def a_buffer_that_becomes_none_and_comes_back() -> list[float]:
    module = net()
    module.register_buffer("seen", torch.zeros(2))
    module.register_buffer("last", torch.zeros(2))
    reducer = GradientReducer(module)
    found = []
    for number in range(5):
        module.seen = None if number in (1, 2) else torch.full((2,), float(dist.get_rank()))
        module.last.fill_(dist.get_rank())
        step(reducer, module)
        found += [-1.0 if module.seen is None else float(module.seen[0]), float(module.last[0])]
    return found


@check
def buffers_that_are_registered_late() -> float:
    module = net()
    reducer = GradientReducer(module)
    step(reducer, module)
    module.register_buffer("late", torch.zeros(2))
    for number in range(3):
        if number == 1:
            module.append(nn.BatchNorm1d(2, affine=False).double())
            module.append(nn.BatchNorm1d(2, affine=False).double())
        module.late += 1 + dist.get_rank()
        module(batch(10 + dist.get_rank()))
        step(reducer, module)
    del module.late
    step(reducer, module)
    return max(spread(buffer) for buffer in module.buffers())


@check
def a_buffer_replaced_several_times_between_two_steps() -> float:
    module = net()
    module.register_buffer("codes", torch.zeros(2))
    reducer = GradientReducer(module)
    difference = 0.0
    for _ in range(6):
        for _ in range(4):
            module.codes = module.codes + dist.get_rank()
        step(reducer, module)
        difference = max(difference, spread(module.codes))
    return difference


@check
def buffers_that_share_memory_among_elements() -> tuple[float, list[int]]:
    module = net()
    rank = float(dist.get_rank())
    module.register_buffer("wide", torch.full((1, 3), rank).expand(4, 3))
    reducer = GradientReducer(module)
    difference = spread(module.wide)
    for _ in range(3):
        module.wide[0] += rank
        step(reducer, module)
        difference = max(difference, spread(module.wide))
    return difference + abs(float(module.wide[3, 2]) - 1.5), module.wide.stride()[0]


@check
def a_buffer_that_is_not_dense() -> float:
    module = net()
    module.register_buffer("edges", torch.eye(3).to_sparse())
    reducer = GradientReducer(module)
    for _ in range(2):
        step(reducer, module)
    return spread(module.edges.to_dense())


@check
def what_torch_is_told_to_ignore() -> list[object]:
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


@check
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
