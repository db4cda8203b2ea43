"""Checks of backward passes of many kinds."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.reducer.reducer_checks.checking import batch, check, combined, gradients, largest_error, net, spread


@check
def a_late_parameter_of_a_bucket_that_has_left_gets_its_gradient() -> float:
    """Its bucket leaves without it, as it did before; only one process can tell that `None` is wrong."""
    alone = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).double()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    x = batch(dist.get_rank())

    def loss(module: nn.Module, x: Tensor, first: bool) -> Tensor:
        # The last layer comes first in the backward pass, so that both kinds look alike at first.
        hidden = module[1](x) + (module[0](x) if first else 0.0)
        return module[2](hidden).pow(2).mean()

    errors = []
    for first in (True, False, False, True):
        alone.zero_grad()
        together.zero_grad()
        loss(alone, combined(), first).backward()
        with reducer.synchronize():
            loss(together, x, first).backward()
        errors.append(largest_error(together, alone))
    return max(errors)


@check
def gradients_of_unused_parameters_stay_none() -> list[bool]:
    module = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    reducer = GradientReducer(module)
    with reducer.synchronize():
        module[0](batch(dist.get_rank(), dtype=torch.float32)).sum().backward()
    return [gradient is None for gradient in gradients(module)]


@check
def zero_grad_in_place_or_never() -> float:
    error = 0.0
    for set_to_none in (True, False, None):
        alone = net()
        together = copy.deepcopy(alone)
        reducer = GradientReducer(together)
        for _ in range(3):
            if set_to_none is not None:
                alone.zero_grad(set_to_none)
                together.zero_grad(set_to_none)
            alone(combined()).pow(2).mean().backward()
            with reducer.synchronize():
                together(batch(dist.get_rank())).pow(2).mean().backward()
            error = max(error, largest_error(together, alone))
    return error


@check
def an_infinity_on_one_rank_skips_the_step_on_all() -> tuple[float, float]:
    module = nn.Linear(6, 1)
    reducer = GradientReducer(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = module.weight.detach().clone()
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        with reducer.synchronize():
            loss = module(batch(dist.get_rank(), dtype=torch.float32)).mean()
            scaler.scale(loss * (factor if dist.get_rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if factor != 1.0:
            skipped = float((module.weight - before).abs().max())
    return skipped, spread(module.weight) + spread(torch.tensor(scaler.get_scale()))


@check
def a_module_converted_after_the_first_step() -> str:
    module = nn.Linear(6, 2)
    reducer = GradientReducer(module)
    for dtype in (torch.float32, torch.float64):
        module.to(dtype).zero_grad()
        with reducer.synchronize():
            module(batch(dist.get_rank(), dtype=dtype)).sum().backward()
    return str(module.weight.grad.dtype)


@check
def double_backward_through_the_loss() -> float:
    alone = net()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)

    def penalty(module: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return slope.pow(2).mean()

    for _ in range(2):
        alone.zero_grad()
        together.zero_grad()
        penalty(alone, combined()).backward(create_graph=True)
        with reducer.synchronize():
            penalty(together, batch(dist.get_rank())).backward(create_graph=True)
    return largest_error(together, alone)


@check
def frozen_layers_stop_travelling() -> tuple[int, float]:
    alone = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together, bucket_cap_mb=0.0001)
    error = 0.0
    buckets = []
    for step in range(230):
        for module in (alone, together):
            module.zero_grad()
            module[:2].requires_grad_(not 2 <= step < 220)
        alone(combined()).pow(2).mean().backward()
        with reducer.synchronize():
            together(batch(dist.get_rank())).pow(2).mean().backward()
        error = max(error, largest_error(together, alone))
        buckets.append(len(reducer._layout.buckets))
    return buckets[1] - buckets[210], error


@check
def compiled_modules() -> float:
    alone = net()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    compiled = torch.compile(together, backend="aot_eager")
    for _ in range(2):
        alone.zero_grad()
        together.zero_grad()
        alone(combined()).pow(2).mean().backward()
        with reducer.synchronize():
            compiled(batch(dist.get_rank())).pow(2).mean().backward()
    return largest_error(together, alone)
