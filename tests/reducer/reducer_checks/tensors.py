"""Checks with gradients of several types and layouts."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.reducer.reducer_checks.checking import batch, check, gradients, largest_error, spread


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


@check
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
