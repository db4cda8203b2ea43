"""Checks of the reducer that ranks run one after another in one launch; each returns a number or raises."""

import copy
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.parallel.reducer import GradientReducer

CHECKS: dict[str, Callable[[], object]] = {}


def check(function: Callable[[], object]) -> Callable[[], object]:
    CHECKS[function.__name__] = function
    return function


def run_checks() -> dict[str, object]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, object] = {}
    for name, function in CHECKS.items():
        try:
            torch.manual_seed(0)
            results[name] = function()
        except Exception:
            results[name] = traceback.format_exc()
    return results


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


@check
def parameters_and_buffers_start_as_the_first_ranks() -> float:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2).half())
    module[1].running_mean.normal_()
    GradientReducer(module)
    return max(spread(tensor.double()) for tensor in module.state_dict().values())


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
        with reducer.synchronize(weight):
            module(batch(dist.get_rank())).sum().backward()
        found.append(all(gradient is None for gradient in gradients(module)))
    return found


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
def sparse_gradients() -> tuple[float, str]:
    alone = nn.Embedding(20, 3, sparse=True).double()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    rows = [torch.tensor([1, 5, 5]), torch.tensor([5, 7, 1, 19])]
    for index in rows:
        (alone(index).pow(2).sum() * len(index) / 7).backward()
    mine = rows[dist.get_rank()]
    with reducer.synchronize(len(mine)):
        together(mine).pow(2).sum().backward()
    return largest_error(together, alone), str(together.weight.grad.layout)


@check
def sparse_gradients_that_one_rank_lacks() -> float:
    alone = nn.Embedding(20, 3, sparse=True).double()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    alone(torch.tensor([3, 4])).sum().backward()
    if dist.get_rank() == 0:
        with reducer.synchronize(2):
            together(torch.tensor([3, 4])).sum().backward()
    else:
        with reducer.synchronize(0):
            pass
    return largest_error(together, alone)


@check
def a_sparse_embedding_tied_to_a_dense_layer() -> float:
    alone = nn.Embedding(6, 6, sparse=True).double()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)

    def loss(module: nn.Module, dense: bool, x: Tensor) -> Tensor:
        sparse = module(torch.tensor([1, 2])).pow(2).mean()
        return sparse + nn.functional.linear(x, module.weight).pow(2).mean() if dense else sparse

    for rank in range(2):
        (loss(alone, rank == 1, batch(rank)) / 2).backward()
    with reducer.synchronize():
        loss(together, dist.get_rank() == 1, batch(dist.get_rank())).backward()
    return largest_error(together, alone)


@check
def several_types_in_one_module() -> list[str]:
    module = nn.ModuleList([nn.Linear(6, 6, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float32)])
    module.scale = nn.Parameter(torch.ones(6, dtype=torch.complex64))
    reducer = GradientReducer(module)
    for _ in range(2):
        module.zero_grad()
        x = batch(dist.get_rank())
        with reducer.synchronize():
            outputs = [layer(x.to(layer.weight.dtype)).double() for layer in module]
            (sum(output.pow(2).mean() for output in outputs) + module.scale.abs().pow(2).sum().double()).backward()
    differences = [spread(torch.view_as_real(g) if g.is_complex() else g.float()) for g in gradients(module)]
    return [str(g.dtype) for g in gradients(module)] if not any(differences) else [str(differences)]


@check
def bfloat16_as_torch_does_it() -> bool:
    ours = nn.Linear(300, 300, dtype=torch.bfloat16)
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    reducer = GradientReducer(ours)
    x = batch(dist.get_rank(), width=300).bfloat16()
    for _ in range(2):
        ours.zero_grad()
        theirs.zero_grad()
        with reducer.synchronize():
            ours(x).pow(2).mean().backward()
        theirs(x).pow(2).mean().backward()
    return all(torch.equal(one, other) for one, other in zip(gradients(ours), gradients(theirs), strict=True))


@check
def channels_last_gradients_keep_their_layout() -> bool:
    module = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    reducer = GradientReducer(module)
    with reducer.synchronize():
        module(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).sum().backward()
    return module.weight.grad.is_contiguous(memory_format=torch.channels_last)


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
def training_goes_on_after_a_backward_pass_that_failed_everywhere() -> float:
    alone = net()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    for fails in (False, True, False):
        alone.zero_grad()
        together.zero_grad()
        alone(combined()).pow(2).mean().backward()
        try:
            with reducer.synchronize():
                together(batch(dist.get_rank())).pow(2).mean().backward()
                if fails:
                    raise ArithmeticError
        except ArithmeticError:
            continue
    return largest_error(together, alone)


@check
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


@check
def whole_numbers_come_from_the_first_rank_with_data() -> list[int]:
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
    """Someone else's batch normalisation: torch changes its buffers without counting the change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("var", torch.ones(6, dtype=torch.float64))
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, self.weight, training=self.training)


@check
def buffers_that_change_silently() -> float:
    module = SilentStatistics()
    reducer = GradientReducer(module)
    for step in range(8):
        with reducer.synchronize():
            module(batch(step + dist.get_rank())).pow(2).sum().backward()
    return spread(module.mean) + spread(module.var)


@check
def buffers_without_changes_cost_nothing() -> list[int]:
    module = net()
    module.register_buffer("table", torch.randn(10))
    reducer = GradientReducer(module)
    with reducer.synchronize():
        module(batch(dist.get_rank())).sum().backward()
    return list(reducer._buffers._expected)


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
def a_stop_that_one_rank_wants_reaches_all() -> list[bool]:
    module = net()
    reducer = GradientReducer(module)
    seen = []
    for stop in (False, True, False):
        with reducer.synchronize(stop=stop and dist.get_rank() == 1):
            module(batch(dist.get_rank())).sum().backward()
        seen.append(reducer.stop_agreed)
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


@check
def ranks_out_of_step() -> str:
    """The last check: collectives do not match after it."""
    module = net()
    reducer = GradientReducer(module)
    with reducer.synchronize(position=3 + dist.get_rank()):
        module(batch(0)).sum().backward()
    return "nothing was raised"
