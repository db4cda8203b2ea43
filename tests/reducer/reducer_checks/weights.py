"""Checks of what each rank counts."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.reducer.reducer_checks.checking import batch, check, combined, gradients, largest_error, net


@check
def weights_make_uneven_batches_exact() -> float:
    alone = net()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    error = 0.0
    for rows in (lambda rank: 2 + 3 * rank, lambda rank: 5 - rank, lambda rank: 0 if rank == 0 else 3):
        alone.zero_grad()
        together.zero_grad()
        alone(combined(rows)).pow(2).mean().backward()
        mine = rows(dist.get_rank())
        with reducer.synchronize(mine):
            if mine:
                together(batch(dist.get_rank(), mine)).pow(2).mean().backward()
        error = max(error, largest_error(together, alone))
    return error


@check
def equal_weights_are_wrong_for_uneven_batches() -> float:
    alone = net()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    alone(combined(lambda rank: 2 + 3 * rank)).pow(2).mean().backward()
    with reducer.synchronize():
        together(batch(dist.get_rank(), 2 + 3 * dist.get_rank())).pow(2).mean().backward()
    return largest_error(together, alone)


@check
def a_rank_without_data_gets_the_gradients_of_the_others() -> float:
    alone = net()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    for _ in range(3):
        alone.zero_grad()
        together.zero_grad()
        alone(batch(1)).pow(2).mean().backward()
        if dist.get_rank() == 1:
            with reducer.synchronize(4):
                together(batch(1)).pow(2).mean().backward()
        else:
            with reducer.synchronize(0):
                pass
    return largest_error(together, alone)


@check
def a_loss_that_counts_nothing_may_be_nan() -> bool:
    together = net()
    reducer = GradientReducer(together)
    for _ in range(2):
        together.zero_grad()
        rank = dist.get_rank()
        with reducer.synchronize(0 if rank == 0 else 1):
            (together(batch(rank)).mean() * (float("nan") if rank == 0 else 1.0)).backward()
    return all(bool(gradient.isfinite().all()) for gradient in gradients(together))


@check
def what_only_ranks_that_count_nothing_have_used_stays_none() -> list[bool]:
    """In a bucket, in none yet, and sparse."""
    module = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2), nn.Embedding(3, 2, sparse=True)]).double()
    reducer = GradientReducer(module)
    rank = dist.get_rank()
    found = []
    for late in (False, True):
        module.zero_grad()
        with reducer.synchronize(rank):
            loss = module[0](batch(rank)).sum()
            if late and rank == 0:
                loss = loss + module[1](batch(rank)).sum() + module[2](torch.tensor([0])).sum()
            loss.backward()
        found += [part.weight.grad is None for part in module]
    with reducer.synchronize(1.0):
        module[1](batch(rank)).sum().backward()
    module.zero_grad()
    with reducer.synchronize(rank):
        module[1 - rank](batch(rank)).sum().backward()
    return [*found, *[part.weight.grad is None for part in module]]


@check
def no_rank_with_data_leaves_no_gradient() -> list[bool]:
    module = net()
    reducer = GradientReducer(module)
    with reducer.synchronize(0):
        pass
    return [gradient is None for gradient in gradients(module)]


@check
def no_rank_with_data_leaves_no_gradient_of_a_backward_pass_either() -> list[bool]:
    module = net()
    reducer = GradientReducer(module)
    found = []
    for weight in (0, 1, 0):
        module.zero_grad()
        with reducer.synchronize(weight):
            module(batch(dist.get_rank())).sum().backward()
        found.append(all(gradient is None for gradient in gradients(module)))
    return found


@check
def no_rank_with_data_keeps_what_was_synchronised_before() -> tuple[float, ...]:
    alone = net()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    found = []
    for weight in (1, 0, 1, 0):
        with reducer.synchronize(weight):
            together(batch(dist.get_rank())).pow(2).mean().backward()
        if weight:
            alone(combined()).pow(2).mean().backward()
        found.append(largest_error(together, alone))
    return tuple(found)


@check
def no_rank_with_data_drops_on_all_ranks_what_one_had_not_synchronised() -> list[bool]:
    module = net()
    reducer = GradientReducer(module)
    with reducer.synchronize(1):
        module(batch(dist.get_rank())).sum().backward()
    if dist.get_rank() == 1:
        module[0](batch(1)).sum().backward()
    with reducer.synchronize(0):
        pass
    return [gradient is None for gradient in gradients(module)]


@check
def synchronising_again_adds_to_the_mean() -> float:
    alone = net()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    for factor in (1.0, 2.0, 3.0):
        (alone(combined()).pow(2).mean() * factor).backward()
        with reducer.synchronize():
            (together(batch(dist.get_rank())).pow(2).mean() * factor).backward()
    return largest_error(together, alone)
