"""Memory of gradients and buckets, in units of the size of all gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer

LAYERS = 64


class LiveStorages(TorchDispatchMode):
    """Adds up the bytes of the storages that were made in this block and are alive, beyond the parameters."""

    def __init__(self, model):
        super().__init__()
        self.parameters = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}
        self.sizes, self.total, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            reference = StorageWeakRef(storage)
            if reference not in self.parameters and reference not in self.sizes:
                self.sizes[reference] = storage.nbytes()
                self.total += storage.nbytes()
        if self.total > self.peak:  # at most, since the total has freed storages too
            self.peak = max(self.peak, self.alive())
        return result

    def alive(self):
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        self.total = sum(self.sizes.values())
        return self.total


def measure(batches, keeps_gradients=False, **options):
    """Return the peaks of two steps; between them nothing is held."""
    model = nn.Sequential(*(nn.Linear(512, 256, bias=False) for _ in range(LAYERS)))
    unit = sum(parameter.nbytes for parameter in model.parameters())
    reducer, inputs, kept, found = GradientReducer(model, **options), torch.ones(1, 512), [], []
    for parameter in model.parameters() if keeps_gradients else ():
        parameter.register_hook(kept.append)
    for _ in range(2):
        model.zero_grad()
        with LiveStorages(model) as storages:
            for _ in range(batches - 1):
                sum(layer(inputs).sum() for layer in model).backward()
            with reducer.synchronize():
                sum(layer(inputs).sum() for layer in model).backward()
        kept.clear()
        found.append(storages.peak / unit)
        model.zero_grad()
        assert storages.alive() / unit < 0.01
    return found


@pytest.mark.cpu_only("buckets are smaller on CPUs")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("batches", [1, 2], ids=["one batch", "two accumulated batches"])
def test_gradients_and_buckets_take_the_memory_of_the_gradients(batches):
    assert max(measure(batches, bucket_cap_mb=1.0)) < 1.04
    assert max(measure(batches)) < 1.14  # 32 MiB in buckets of 4 MiB


@pytest.mark.cpu_only("see above")
@pytest.mark.usefixtures("group")
def test_gradients_that_are_kept_beside_their_buckets_take_it_twice():
    assert min(measure(1, keeps_gradients=True)) > 1.9
