"""Checks of gradients: backward passes of many kinds, weights, types and layouts."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.reducer.checking import EXACT, batch, check, combined, gradients, largest_error, net, spread


@check(EXACT)
def a_parameter_whose_bucket_was_sent_early_gets_its_gradient() -> float:
    """Its bucket is sent without it, as in the step before."""
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


@check([False, False, True, True])
def gradients_of_unused_parameters_stay_none() -> list[bool]:
    module = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    reducer = GradientReducer(module)
    with reducer.synchronize():
        module[0](batch(dist.get_rank(), dtype=torch.float32)).sum().backward()
    return [gradient is None for gradient in gradients(module)]


@check(EXACT)
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


@check((0.0, 0.0))
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


@check("torch.float64")
def a_module_converted_after_the_first_step() -> str:
    module = nn.Linear(6, 2)
    reducer = GradientReducer(module)
    for dtype in (torch.float32, torch.float64):
        module.to(dtype).zero_grad()
        with reducer.synchronize():
            module(batch(dist.get_rank(), dtype=dtype)).sum().backward()
    return str(module.weight.grad.dtype)


@check(EXACT)
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


@check((2, EXACT))
def buckets_of_frozen_layers_are_evicted() -> tuple[int, float]:
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


@check(EXACT)
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


@check(EXACT)
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


@check(lambda error, rank: error > 1e-3)
def equal_weights_are_wrong_for_uneven_batches() -> float:
    alone = net()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    alone(combined(lambda rank: 2 + 3 * rank)).pow(2).mean().backward()
    with reducer.synchronize():
        together(batch(dist.get_rank(), 2 + 3 * dist.get_rank())).pow(2).mean().backward()
    return largest_error(together, alone)


@check(EXACT)
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


@check(True)
def a_loss_without_weight_may_be_nan() -> bool:
    together = net()
    reducer = GradientReducer(together)
    for _ in range(2):
        together.zero_grad()
        rank = dist.get_rank()
        with reducer.synchronize(0 if rank == 0 else 1):
            (together(batch(rank)).mean() * (float("nan") if rank == 0 else 1.0)).backward()
    return all(bool(gradient.isfinite().all()) for gradient in gradients(together))


@check([False, True, True] * 3)
def gradients_of_ranks_without_weight_alone_stay_none() -> list[bool]:
    """For a parameter with a bucket, one without a bucket, and a sparse one."""
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


@check([True] * 4)
def no_rank_with_data_leaves_no_gradient() -> list[bool]:
    module = net()
    reducer = GradientReducer(module)
    with reducer.synchronize(0):
        pass
    return [gradient is None for gradient in gradients(module)]


@check([True, False, True])
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


@check((EXACT,) * 4)
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


@check([True, True, False, False])
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


@check(EXACT)
def synchronising_again_adds_to_the_mean() -> float:
    alone = net()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    for factor in (1.0, 2.0, 3.0):
        (alone(combined()).pow(2).mean() * factor).backward()
        with reducer.synchronize():
            (together(batch(dist.get_rank())).pow(2).mean() * factor).backward()
    return largest_error(together, alone)


@check((EXACT, "torch.sparse_coo"))
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


@check(EXACT)
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


@check(EXACT)
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


@check(EXACT)
def the_state_of_a_module_with_dense_gradients_is_left_alone() -> float:
    def make(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 1)).double()

    words = torch.tensor([[0, 1], [1, 2]])
    dense, sparse, alone = make(False), make(True), make(False)
    before, reducer = GradientReducer(dense), GradientReducer(sparse)
    with before.synchronize():
        dense(words[dist.get_rank()]).mean().backward()
    reducer.load_state_dict(before.state_dict())
    with reducer.synchronize():
        sparse(words[dist.get_rank()]).mean().backward()
    alone(words).mean().backward()
    return largest_error(sparse, alone)


@check(EXACT)
def sparse_gradients_of_functions() -> float:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Parameter(torch.randn(20, 3, dtype=torch.float64))
            self.large = nn.Parameter(torch.randn(20, 1000, dtype=torch.float64))

        def forward(self, index: Tensor) -> Tensor:
            tables = (nn.functional.embedding(index, table, sparse=True) for table in (self.small, self.large))
            return sum(values.pow(2).sum(1) for values in tables)

    alone = Table()
    together = copy.deepcopy(alone)
    reducer = GradientReducer(together)
    rows = [torch.tensor([1, 5, 5]), torch.tensor([5, 7, 1, 19])]
    error = 0.0
    for _ in range(3):
        alone.zero_grad()
        together.zero_grad()
        alone(torch.cat(rows)).mean().backward()
        mine = rows[dist.get_rank()]
        with reducer.synchronize(len(mine)):
            together(mine).mean().backward()
        error = max(error, largest_error(together, alone))
    return error


@check(["torch.complex64", *["torch.float64"] * 2, *["torch.bfloat16"] * 2, *["torch.float32"] * 2])
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


@check(True)
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


@check(True)
def channels_last_gradients_keep_their_layout() -> bool:
    module = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    reducer = GradientReducer(module)
    with reducer.synchronize():
        module(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).sum().backward()
    return module.weight.grad.is_contiguous(memory_format=torch.channels_last)
