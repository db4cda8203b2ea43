"""The reducer without Lightning is exact with different batch sizes, and when a rank runs out of batches.

Run it with `python examples/plain_torch_loop.py`, or `torchrun --nproc-per-node=2 examples/plain_torch_loop.py`. Rank 0
has 30 batches of 12 samples, rank 1 has 20 batches of 5. Rank 1 then continues without a backward pass: with weight 0,
it receives the same gradient as rank 0 and takes the same steps, so that model and optimizer stay equal.
"""

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_ddp_ext import GradientReducer

WORLD_SIZE = 2
BATCHES = [[12] * 30, [5] * 20]  # sizes of each rank's batches

Batch = tuple[Tensor, Tensor]


def batches(rank: int) -> list[Batch]:
    """Generate a rank's data, in float64."""
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(size, 6, generator=generator, dtype=torch.float64) for size in BATCHES[rank]]
    return [(x, x.sin().sum(1, keepdim=True)) for x in inputs]


def network() -> nn.Module:
    """Return a network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def train(batches: list[Batch]) -> tuple[nn.Module, int]:
    """Train this rank's replica; return it, and the number of steps without data."""
    model = network()
    reducer = GradientReducer(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, dist.ReduceOp.MAX)  # every rank has to synchronise equally often
    without_data = 0
    for step in range(int(steps)):
        optimizer.zero_grad()
        if step < len(batches):
            x, y = batches[step]
            with reducer.synchronize(weight=len(x)):
                functional.mse_loss(model(x), y).backward()
        else:
            without_data += 1
            with reducer.synchronize(weight=0):
                pass
        optimizer.step()
    reducer.close()
    return model, without_data


def train_alone() -> nn.Module:
    """Train in one process on the concatenation of the ranks' batches."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    by_rank = [batches(rank) for rank in range(WORLD_SIZE)]
    for step in range(max(map(len, by_rank))):
        parts = [own[step] for own in by_rank if step < len(own)]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def flat(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def main(rank: int, init_method: str) -> None:
    """Train on one rank, and compare on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(minutes=1)
    )
    model, without_data = train(batches(rank))
    found: list[tuple[Tensor, int]] = [(torch.zeros(0), 0)] * WORLD_SIZE
    dist.all_gather_object(found, (flat(model), without_data))
    dist.barrier()  # torch 2.6 may hang where a group is destroyed right after a collective on tensors
    dist.destroy_process_group()
    if rank > 0:
        return
    for other, (_, steps) in enumerate(found):
        print(f"rank {other}: {len(BATCHES[other])} batches of {BATCHES[other][0]}, then {steps} steps without data")
    between_ranks = float((found[0][0] - found[1][0]).abs().max())
    to_one_process = float((found[0][0] - flat(train_alone())).abs().max())
    print(f"largest difference of a parameter: between the ranks {between_ranks}, to one process {to_one_process:.1e}")
    if between_ranks != 0 or to_one_process > 1e-9:
        raise SystemExit("the runs differ")


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun
        main(int(os.environ["RANK"]), "env://")
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(main, (f"file://{folder}/meeting",), WORLD_SIZE)
