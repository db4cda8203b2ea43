"""Checks of what ranks tell each other, and of what goes wrong."""

import contextlib
import copy
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_ddp_ext.errors import RanksOutOfStepError, ReplicaMismatchError
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.reducer.reducer_checks.checking import batch, check, combined, largest_error, net, spread


@check
def training_goes_on_after_a_forward_pass_that_failed() -> float:
    alone = net()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    for fails in (False, True, False):
        alone.zero_grad()
        together.zero_grad()
        alone(combined()).pow(2).mean().backward()
        try:
            with reducer.synchronize():
                loss = together(batch(dist.get_rank())).pow(2).mean()
                if fails:
                    raise ArithmeticError
                loss.backward()
        except ArithmeticError:
            continue
    return largest_error(together, alone)


@check
def training_does_not_go_on_after_a_backward_pass() -> list[str]:
    module = net()
    reducer = GradientReducer(module)
    found = []
    for number in range(4):
        module.zero_grad()
        try:
            with reducer.synchronize():
                module(batch(dist.get_rank())).pow(2).mean().backward()
                if number == 2:
                    raise ArithmeticError
        except (ArithmeticError, RanksOutOfStepError) as error:
            found.append(str(error))
            assert reducer.unsynchronized(module.parameters()) == (number == 2)
    return found


@check
def an_error_of_arguments_on_one_rank_is_noticed() -> str:
    reducer = GradientReducer(net())
    if dist.get_rank():
        with contextlib.suppress(ValueError), reducer.synchronize(-1.0):
            pass
    try:
        with reducer.synchronize():
            pass
    except RanksOutOfStepError as error:
        return str(error)
    return ""


@check
def a_hook_that_one_rank_has_is_told() -> str:
    try:
        GradientReducer(net(), comm_hook=None if dist.get_rank() else default_hooks.allreduce_hook)
    except ReplicaMismatchError as error:
        return str(error)
    return ""


@check
def an_error_on_one_rank_is_noticed() -> str:
    module = net()
    reducer = GradientReducer(module)
    error = ""
    for number in range(4):
        try:
            with reducer.synchronize():
                loss = module(batch(dist.get_rank())).pow(2).mean()
                if number == 1 and dist.get_rank() == 1:
                    raise ArithmeticError
                loss.backward()
        except ArithmeticError:
            continue
        except RanksOutOfStepError as out_of_step:
            error = str(out_of_step)
            break
    return error


@check
def what_ranks_tell_travels_with_the_gradients() -> dict[str, tuple[int, bool]]:
    """For gradients of several types: messages of the third synchronisation, and whether what was told has arrived."""
    found = {}
    weights, logged_keys = [1e-9, 2.0**40 + 1], [2.0**52 - 1, 0.0]
    own = dist.get_rank()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64):
        module = nn.Linear(6, 2).to(dtype)
        reducer = GradientReducer(module)
        reducer.control.logged_keys, reducer.control.has_next_batch = logged_keys[own], own == 1
        for number in range(3):
            counted = mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)
            with counted as all_reduce, reducer.synchronize(weights[own]):
                if own == 0 and number < 2:
                    loss = module(batch(own, dtype=torch.float64).to(dtype)).abs().sum()
                    (loss * float("nan")).backward()
        exchanged = reducer.control.exchanged
        arrived = list(exchanged.weights) == weights and list(exchanged.logged_keys) == logged_keys
        arrived = arrived and exchanged.has_next_batch == [False, True]
        found[str(dtype)] = all_reduce.call_count, arrived
    return found


@check
def a_stop_that_one_rank_wants_reaches_all() -> list[bool]:
    module = net()
    reducer = GradientReducer(module)
    seen = []
    for stop in (False, True, False):
        reducer.control.stop = stop and dist.get_rank() == 1
        with reducer.synchronize():
            module(batch(dist.get_rank())).sum().backward()
        seen.append(reducer.control.exchanged.stop)
    return seen


@check
def gradients_outside_a_synchronisation_are_noticed() -> list[bool]:
    module = net()
    reducer = GradientReducer(module)
    module[0](batch(0)).sum().backward()
    first = reducer.unsynchronized(module[0].parameters()), reducer.unsynchronized(module[2].parameters())
    with reducer.synchronize():
        pass
    return [*first, reducer.unsynchronized(module.parameters())]


@check
def ranks_out_of_step() -> str:
    module = net()
    reducer = GradientReducer(module)
    reducer.control.position = 3 + dist.get_rank()
    with reducer.synchronize():
        module(batch(0)).sum().backward()
    return "nothing was raised"


@check
def hooks_of_parameters_see_the_gradient_of_all_ranks() -> list[float]:
    """Also those added later, in accumulation once; removed ones run no more, and `close` leaves them as they were."""
    module = net()
    seen: list[Tensor] = []
    first = module[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    reducer = GradientReducer(module)
    removed = module[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad * 5))
    module[2].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad[:1, :1].clone()))
    reducer.defer_hooks()
    module(batch(dist.get_rank())).pow(2).sum().backward()
    removed.remove()
    with reducer.synchronize():
        module(batch(dist.get_rank() + 5)).pow(2).sum().backward()
    gradient = module[0].weight.grad
    found = [float(len(seen)), spread(seen[0]), spread(seen[1]), float((seen[1] - gradient).abs().max())]
    reducer.close()
    module(batch(dist.get_rank())).pow(2).sum().backward()
    first.remove()
    module(batch(dist.get_rank())).pow(2).sum().backward()
    return [*found, float(len(seen))]
