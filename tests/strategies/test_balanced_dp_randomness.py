"""Seeds and activation checkpointing keep their meaning although threads share one generator."""

from typing import ClassVar

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy
from tests.parity import FEATURES, Classifier, dataset, train

pytestmark = pytest.mark.filterwarnings("ignore:`training_step` draws random numbers")


class Dropping(Classifier):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, 64), nn.Dropout(0.5), nn.Linear(64, 3))


def test_a_seed_reproduces_a_run_bit_for_bit():
    def run():
        seed_everything(7, verbose=False)
        return train(Dropping(), BalancedDataParallelStrategy(split=[2, 6]), 2).parameters

    first, second = run(), run()
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


class ActivationCheckpointingOption(Classifier):
    """Keeps every mask that a step draws, in the forward pass and again when it is recomputed."""

    masks_of_steps: ClassVar[list] = []

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))

    def training_step(self, batch, batch_idx):
        masks = []

        def dropped(layer, hidden):
            output = layer(hidden)
            masks.append((torch.rand_like(output) > 0.5).to(output))
            return output * masks[-1]

        hidden = batch[0].requires_grad_()
        for layer in self.layers:
            hidden = checkpoint(dropped, layer, hidden, use_reentrant=self.use_reentrant)
        self.masks_of_steps.append(masks)
        return functional.cross_entropy(self.network(hidden), batch[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_draws_the_masks_of_the_forward_pass(use_reentrant):
    ActivationCheckpointingOption.masks_of_steps.clear()
    loader = DataLoader(dataset(64), batch_size=8)
    train(ActivationCheckpointingOption(use_reentrant), "balanced_dp", 2, loader=loader, max_epochs=2)
    assert len(ActivationCheckpointingOption.masks_of_steps) == 32
    for masks in ActivationCheckpointingOption.masks_of_steps:
        assert len(masks) == 8  # four in the forward pass, and again in reverse order
        assert all(torch.equal(one, two) for one, two in zip(masks[:4], reversed(masks[4:]), strict=True))
