"""Checks with communication hooks."""

import copy
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.reducer.reducer_checks.checking import batch, check, gradients, largest_error, spread


def with_hook(hook: Callable[..., object], make_state: Callable[[], object], steps: int = 4) -> float:
    """Difference to torch's own reducer with the same hook, in one bucket."""
    ours = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    reducer = GradientReducer(ours, comm_hook=hook, comm_state=make_state())
    theirs.register_comm_hook(make_state(), hook)
    error = 0.0
    for step in range(steps):
        x = batch(10 * step + dist.get_rank(), width=40, dtype=torch.float32)
        ours.zero_grad()
        theirs.zero_grad()
        with reducer.synchronize():
            ours(x).pow(2).mean().backward()
        theirs(x).pow(2).mean().backward()
        error = max(error, largest_error(ours, theirs))
    return error


@check
def allreduce_hook() -> float:
    return with_hook(default_hooks.allreduce_hook, lambda: None)


@check
def fp16_compress_hook() -> float:
    return with_hook(default_hooks.fp16_compress_hook, lambda: None)


@check
def bf16_compress_hook() -> tuple[float, float]:
    """torch's own reducer refuses this hook on the CPU."""
    plain = nn.Linear(40, 30)
    compressed = copy.deepcopy(plain)
    for module, hook in ((plain, None), (compressed, default_hooks.bf16_compress_hook)):
        reducer = GradientReducer(module, comm_hook=hook)
        for _ in range(2):
            module.zero_grad()
            with reducer.synchronize():
                module(batch(dist.get_rank(), width=40, dtype=torch.float32)).pow(2).mean().backward()
    return largest_error(compressed, plain), max(spread(gradient) for gradient in gradients(compressed))


@check
def fp16_compress_hook_with_large_weights() -> float:
    """Sums of gradients by token would not fit into 16 bits, means do; in the first step as well."""
    plain = nn.Linear(40, 30)
    compressed = copy.deepcopy(plain)
    for module, hook in ((plain, None), (compressed, default_hooks.fp16_compress_hook)):
        reducer = GradientReducer(module, comm_hook=hook)
        with reducer.synchronize(weight=1e6):
            module(batch(dist.get_rank(), width=40, dtype=torch.float32)).pow(2).mean().backward()
    return largest_error(compressed, plain)


@check
def hooks_with_state_see_the_same_units_in_every_step() -> float:
    """What they keep, such as the residuals of PowerSGD, is added to later gradients."""
    seen = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future:
        seen.append(float(bucket.buffer().sum()))
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    module = nn.Linear(3, 1, bias=False)
    reducer = GradientReducer(module, comm_hook=hook, comm_state=object())
    weights = (4.0, 1.0, 16.0, 4.0, 3.0)
    for weight in weights:
        module.zero_grad()
        with reducer.synchronize(weight):
            module(torch.ones(1, 3)).sum().backward()
    by_weight = [sight / weight for sight, weight in zip(seen, weights, strict=True)]
    return max(by_weight) - min(by_weight)


@check
def hooks_that_issue_collectives_later_do_not_meet_those_of_buffers() -> float:
    """The second collective of this hook begins when the first has ended: on rank 0 at once, on rank 1 later."""

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future:
        def go_on(done: torch.futures.Future) -> torch.Tensor:
            time.sleep(0.2 * dist.get_rank())
            dist.all_reduce(torch.zeros(7), group=group)
            return done.value()[0] / dist.get_world_size()

        future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(go_on)
        if dist.get_rank() == 0:
            future.wait()
        return future

    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    group = dist.new_group()
    reducer = GradientReducer(module, group, comm_hook=hook, comm_state=group)
    for step in range(3):
        with reducer.synchronize():
            module(batch(step + dist.get_rank(), dtype=torch.float32)).pow(2).mean().backward()
    return max(map(spread, [*gradients(module), module[1].running_mean]))


@check
def post_local_sgd_hook() -> float:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return with_hook(
        post_localSGD_hook.post_localSGD_hook,
        lambda: post_localSGD_hook.PostLocalSGDState(None, groups[dist.get_rank()], start_localSGD_iter=2),
    )


@check
def power_sgd_hook() -> float:
    return with_hook(
        powerSGD_hook.powerSGD_hook,
        lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3),
    )


@check
def several_buckets_with_hooks() -> float:
    ours = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    reducer = GradientReducer(
        ours,
        bucket_cap_mb=0.005,
        comm_hook=powerSGD_hook.powerSGD_hook,
        comm_state=powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2),
    )
    for step in range(4):
        ours.zero_grad()
        with reducer.synchronize():
            ours(batch(step + dist.get_rank(), width=40, dtype=torch.float32)).pow(2).mean().backward()
    return max(spread(gradient) for gradient in gradients(ours))
