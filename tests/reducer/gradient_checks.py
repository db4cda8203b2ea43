"""Checks of gradients: backward passes of many kinds, weights, types and layouts."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.reducer.checking import EXACT, Comparison, batch, check, gradients, largest_error, net, spread
from tests.support.devices import accelerator


@check(EXACT)
def a_parameter_whose_bucket_was_sent_early_gets_its_gradient() -> float:
    """Its bucket is sent without it, as in the step before."""
    compared = Comparison(nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).double())
    for first in (True, False, False, True):

        def loss(module: nn.Module, x: Tensor, first: bool = first) -> Tensor:
            # The last layer comes first in the backward pass, so that both kinds look alike at first.
            return module[2](module[1](x) + (module[0](x) if first else 0.0)).pow(2).mean()

        compared.zero_grad()
        compared.step(loss)
    return compared.error


@check(EXACT)
def compiled_modules() -> float:
    compared = Comparison(net())
    compiled = {compared.together: torch.compile(compared.together, backend="aot_eager")}
    for _ in range(2):
        compared.zero_grad()
        compared.step(lambda module, x: compiled.get(module, module)(x).pow(2).mean())
    return compared.error


@check(EXACT)
def synchronising_again_adds_to_the_mean() -> float:
    """Unless all weights are zero: then gradients synchronised before stay."""
    compared = Comparison(net())
    for _ in range(3):
        compared.step()
        with compared.reducer.synchronize(0):
            compared.together(batch(dist.get_rank())).pow(2).mean().backward()
        compared.error = max(compared.error, largest_error(compared.together, compared.alone))
    return compared.error


class Table(nn.Module):
    """Sparse gradients of functions, which the reducer cannot foresee."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randn(20, 3, dtype=torch.float64))
        self.large = nn.Parameter(torch.randn(20, 1000, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        tables = (nn.functional.embedding(index, table, sparse=True) for table in (self.small, self.large))
        return sum(values.pow(2).sum(1) for values in tables)


@check((EXACT, True), lacking="sparse tensors")
def sparse_gradients() -> tuple[float, bool]:
    """Of a module and of functions, on both ranks and on one."""
    error = 0.0
    rows = [torch.tensor([1, 5, 5]), torch.tensor([5, 7, 1, 19])]
    for alone in (nn.Embedding(20, 3, sparse=True).double(), Table()):
        compared = Comparison(alone)
        for weights in ((3, 4), (3, 4), (3, 0)):
            compared.zero_grad()
            active = [index for index, weight in zip(rows, weights, strict=True) if weight]
            output = compared.alone(torch.cat(active))
            (output.pow(2).sum() / sum(weights)).backward()
            own = weights[dist.get_rank()]
            with compared.reducer.synchronize(own):
                if own:
                    (compared.together(rows[dist.get_rank()]).pow(2).sum() / own).backward()
            error = max(error, largest_error(compared.together, compared.alone))
        if isinstance(alone, nn.Embedding):
            is_sparse = compared.together.weight.grad.is_sparse
    return error, is_sparse


@check(
    [("torch.complex64", 0.0), *[("torch.float64", 0.0)] * 2, *[("torch.bfloat16", 0.0)] * 2], lacking="complex tensors"
)
def several_types_in_one_module() -> list[tuple[str, float]]:
    module = nn.ModuleList([nn.Linear(6, 6, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)])
    module.scale = nn.Parameter(torch.ones(6, dtype=torch.complex64))
    reducer = GradientReducer(module)
    for _ in range(2):
        module.zero_grad()
        x = batch(dist.get_rank())
        with reducer.synchronize():
            outputs = [layer(x.to(layer.weight.dtype)).double() for layer in module]
            (sum(output.pow(2).mean() for output in outputs) + module.scale.abs().pow(2).sum().double()).backward()
    return [(str(gradient.dtype), spread(gradient)) for gradient in gradients(module)]


@check(EXACT, lacking="sparse tensors")
def a_sparse_embedding_tied_to_a_dense_layer() -> float:
    compared = Comparison(nn.Embedding(6, 6, sparse=True).double())

    def loss(module: nn.Module, rank: int) -> Tensor:
        sparse = module(torch.tensor([1, 2])).pow(2).mean()
        return sparse + nn.functional.linear(batch(rank), module.weight).pow(2).mean() if rank else sparse

    for rank in range(2):
        (loss(compared.alone, rank) / 2).backward()
    with compared.reducer.synchronize():
        loss(compared.together, dist.get_rank()).backward()
    return largest_error(compared.together, compared.alone)


@check((0.0, 0.0))
def an_infinity_on_one_rank_skips_the_step_on_all() -> tuple[float, float]:
    module = nn.Linear(6, 1)
    reducer = GradientReducer(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(accelerator(), init_scale=8.0)
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


@check([False, True, True] * 3, lacking="sparse tensors")
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


@check([[True] * 4, [False] * 4, [True, True, False, False]])
def no_rank_with_data_drops_on_all_ranks_what_one_had_not_synchronised() -> list[list[bool]]:
    """Nor does it leave gradients of its own backward pass."""
    module = net()
    reducer = GradientReducer(module)
    found = []
    for weight in (0, 1):
        with reducer.synchronize(weight):
            module(batch(dist.get_rank())).sum().backward()
        found.append([gradient is None for gradient in gradients(module)])
    if dist.get_rank() == 1:
        module[0](batch(1)).sum().backward()
    with reducer.synchronize(0):
        pass
    return [*found, [gradient is None for gradient in gradients(module)]]


@check(True)
def channels_last_gradients_keep_their_layout() -> bool:
    module = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    reducer = GradientReducer(module)
    with reducer.synchronize():
        module(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).sum().backward()
    return module.weight.grad.is_contiguous(memory_format=torch.channels_last)
