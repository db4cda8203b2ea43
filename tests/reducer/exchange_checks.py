"""Checks of the exchange between ranks: control values, errors and communication hooks."""

import contextlib
import copy
import math
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.distributed.exchange import own_group
from lightning_ddp_ext.errors import RanksOutOfStepError
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.reducer.checking import (
    EXACT,
    FLOAT16,
    FLOAT32,
    Comparison,
    batch,
    check,
    gradients,
    largest_error,
    net,
    says,
    spread,
)
from tests.support.devices import is_cpu


@check(EXACT)
def training_continues_after_a_failed_forward_pass() -> float:
    compared = Comparison(net())
    for fails in (False, True, False):
        compared.zero_grad()
        if fails:
            with contextlib.suppress(ArithmeticError), compared.reducer.synchronize():
                compared.together(batch(dist.get_rank()))
                raise ArithmeticError
        else:
            compared.step()
    return compared.error


@check(says("['', 'rank {rank}: the last synchronisation failed after its backward pass had begun"))
def training_cannot_continue_after_a_failed_backward_pass() -> list[str]:
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
            left = any(parameter.grad is not None for parameter in module.parameters())  # rather than in a bucket
            assert reducer.has_unsynchronized(module.parameters()) == left
            assert left == (number == 2) or not is_cpu()  # on a device, every bucket has been sent
    return found


@check(says("use of a communication hook is True on rank 0 but False on rank 1"))
def a_hook_that_only_one_rank_has_is_refused() -> str:
    GradientReducer(net(), comm_hook=None if dist.get_rank() else default_hooks.allreduce_hook)
    return "nothing was raised"


ONE_BEHIND = says("rank {rank} makes its synchronisation {own} of gradients, others theirs of number {other}.", 2)


@check((ONE_BEHIND, ONE_BEHIND))
def an_error_on_one_rank_is_noticed() -> tuple[str, ...]:
    """In the backward pass or the arguments of the second of three synchronisations, on rank 1 alone."""
    found = []
    for kind, weight in ((ArithmeticError, 1.0), (ValueError, -1.0)):
        module = net()
        reducer = GradientReducer(module)
        try:
            for number in range(3):
                fails = number == 1 and dist.get_rank() == 1
                with contextlib.suppress(kind), reducer.synchronize(weight if fails else 1.0):
                    loss = module(batch(dist.get_rank())).pow(2).mean()
                    if fails:
                        raise kind
                    loss.backward()
        except RanksOutOfStepError as error:
            found.append(str(error))
    return tuple(found)


@check([(1 if is_cpu() else 2, True), (2, True)], lacking="complex tensors")
def control_values_are_sent_with_the_gradients() -> list[tuple[int, bool]]:
    """With real and complex ones: messages of the third synchronisation, and whether the values have arrived."""
    found = []
    weights, own = [1e-9, 2.0**40 + 1], dist.get_rank()
    for dtype in (torch.float32, torch.complex64):
        module = nn.Linear(6, 2).to(dtype)
        reducer = GradientReducer(module)
        for number in range(3):
            counted = mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)
            with counted as all_reduce, reducer.synchronize(weights[own]):
                if own == 0 and number < 2:
                    loss = module(batch(own, dtype=torch.float64).to(dtype)).abs().sum()
                    (loss * float("nan")).backward()
        found.append((all_reduce.call_count, list(reducer.control.weights) == weights))
    return found


@check([True, False, False])
def gradients_outside_a_synchronisation_are_reported() -> list[bool]:
    module = net()
    reducer = GradientReducer(module)
    module[0](batch(0)).sum().backward()
    first = reducer.has_unsynchronized(module[0].parameters()), reducer.has_unsynchronized(module[2].parameters())
    with reducer.synchronize():
        pass
    return [*first, reducer.has_unsynchronized(module.parameters())]


def synchronised() -> tuple[nn.Module, GradientReducer, list[Tensor | None]]:
    """Make a module and its reducer, and gradients that have been synchronised."""
    module = net()
    reducer = GradientReducer(module)
    with reducer.synchronize():
        module(batch(0)).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return module, reducer, gradients


@check([True, False, False])
def discarded_gradients_leave_earlier_ones() -> list[bool]:
    module, reducer, before = synchronised()
    with reducer.discard_gradients():
        (module(batch(1)).sum() * math.nan).backward()
        is_nan = all(bool(parameter.grad.isnan().any()) for parameter in module.parameters())
    changed = any(
        one.grad is not own or own.isnan().any() for one, own in zip(module.parameters(), before, strict=True)
    )
    return [is_nan, changed, reducer.has_unsynchronized(module.parameters())]


@check([True, False])
def an_error_in_a_discarded_backward_pass_leaves_earlier_gradients() -> list[bool]:
    module, reducer, before = synchronised()
    with contextlib.suppress(MemoryError), reducer.discard_gradients():
        module(batch(1)).sum().backward()
        raise MemoryError
    kept = [one.grad is own for one, own in zip(module.parameters(), before, strict=True)]
    return [all(kept), reducer.has_unsynchronized(module.parameters())]


@check([2, 0, 0, 0, 5])
def hooks_of_parameters_see_the_gradient_of_all_ranks() -> list[float]:
    """Hooks added later too, once per accumulation; removed hooks do not run, and `close` restores the others."""
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


def with_hook(hook: Callable[..., object], make_state: Callable[[], object], steps: int = 4) -> float:
    """Difference to torch's reducer with the same hook, in one bucket."""
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


@check((FLOAT32, FLOAT16, FLOAT32, FLOAT32), lacking="streams of futures")
def hooks_give_the_gradients_of_torchs_reducer() -> tuple[float, ...]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = groups[dist.get_rank()]
    return (
        with_hook(default_hooks.allreduce_hook, lambda: None),
        with_hook(default_hooks.fp16_compress_hook, lambda: None),
        with_hook(
            post_localSGD_hook.post_localSGD_hook,
            lambda: post_localSGD_hook.PostLocalSGDState(None, own, start_localSGD_iter=2),
        ),
        with_hook(
            powerSGD_hook.powerSGD_hook,
            lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3),
        ),
    )


def compressed_error(hook: Callable[..., object], weight: float) -> float:
    plain = nn.Linear(40, 30)
    compressed = copy.deepcopy(plain)
    for module, comm_hook in ((plain, None), (compressed, hook)):
        reducer = GradientReducer(module, comm_hook=comm_hook)
        for _ in range(2):
            module.zero_grad()
            with reducer.synchronize(weight):
                module(batch(dist.get_rank(), width=40, dtype=torch.float32)).pow(2).mean().backward()
    return largest_error(compressed, plain) + max(spread(gradient) for gradient in gradients(compressed))


@check((1e-2, FLOAT16))
def compressed_gradients_keep_their_precision() -> tuple[float, float]:
    """torch's reducer refuses bfloat16 on the CPU. Sums of gradients by token would not fit into 16 bits."""
    return compressed_error(default_hooks.bf16_compress_hook, 1.0), compressed_error(
        default_hooks.fp16_compress_hook, 1e6
    )


@check(0.0)
def half_precision_does_not_overflow_after_a_light_step() -> float:
    """With a short last batch between others; in parameters, and in the messages of a hook."""
    errors = []
    for dtype, hook in ((torch.float16, None), (torch.float32, default_hooks.fp16_compress_hook)):
        module = nn.Linear(3, 1, bias=False, dtype=dtype)
        reducer = GradientReducer(module, comm_hook=hook)
        for weight in (4096.0, 4096.0, 4.0, 4096.0, 1.0, 2.0, 1024.0, 1.0):
            module.zero_grad()
            with reducer.synchronize(weight):
                (100 * module.weight.sum()).backward()
            errors.append(float((module.weight.grad - 100).abs().max()))
        assert reducer.state_dict()["expected_total"] == 512.0 * dist.get_world_size()
    return max(errors)


@check(FLOAT32)
def hooks_with_state_see_the_same_units_in_every_step() -> float:
    """State such as the residuals of PowerSGD is added to later gradients."""
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


@check(0.0)
def late_collectives_of_hooks_do_not_mix_with_buffers() -> float:
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
    group = own_group()
    reducer = GradientReducer(module, group, comm_hook=hook, comm_state=group)
    for step in range(3):
        with reducer.synchronize():
            module(batch(step + dist.get_rank(), dtype=torch.float32)).pow(2).mean().backward()
    return max(map(spread, [*gradients(module), module[1].running_mean]))


@check(0.0, lacking="streams of futures")
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
