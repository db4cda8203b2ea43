"""Gradients and random numbers are the same as without activation checkpointing; only time and memory change."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.activation_checkpointing.models import (
    STEPS,
    Block,
    Normalised,
    Transformer,
    checkpointed_names,
    difference,
    tokens,
    train,
    with_checkpointing,
)


@pytest.mark.parametrize(
    "policy",
    [
        Block,
        [Block, nn.Linear],
        (nn.MultiheadAttention, nn.Sequential),
        f"{Block.__module__}.Block",
        lambda module: isinstance(module, Block),
    ],
    ids=["class", "list", "parts of blocks", "path", "predicate"],
)
def test_gradients_are_the_same(policy):
    model = Transformer().double()
    checkpointed, checkpointing = with_checkpointing(model, policy)
    assert difference(train(checkpointed, tokens), train(model, tokens)) < 1e-12
    assert checkpointed_names(checkpointed) == [*checkpointing.modules]


def test_the_test_fails_if_masks_are_drawn_anew(monkeypatch):
    def forgetful(*args, **kwargs):
        return checkpoint(*args, **kwargs, preserve_rng_state=False)

    monkeypatch.setattr("lightning_ddp_ext.activation_checkpointing.checkpointed_forward.checkpoint", forgetful)
    model = Transformer().double()
    checkpointed, _ = with_checkpointing(model, Block)
    assert difference(train(checkpointed, tokens), train(model, tokens)) > 1e-3


def test_the_forward_pass_runs_again_in_the_backward_pass():
    model = Transformer(dropout=0.0)
    checkpointed, _ = with_checkpointing(model, Block)
    batch = tokens()
    flops = {}
    for kind, net in [("plain", model), ("recomputed", checkpointed)]:
        with FlopCounterMode(display=False) as counter:
            loss = net(batch).sum()
        forward = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        flops[kind] = (forward, counter.get_total_flops())
    assert flops["recomputed"][0] == flops["plain"][0]
    again = flops["recomputed"][1] - flops["plain"][1]
    assert 0.5 * flops["plain"][0] < again < flops["plain"][0]
    assert [block.calls for block in model.blocks] == [1, 1, 1]
    assert [block.calls for block in checkpointed.blocks] == [2, 2, 2]
    with torch.no_grad():
        checkpointed(batch)
    assert [block.calls for block in checkpointed.blocks] == [3, 3, 3]
    checkpointed.eval()
    checkpointed(batch).sum().backward()
    assert [block.calls for block in checkpointed.blocks] == [5, 5, 5]


def kept_by_autograd(model, batch):
    """Return the number of bytes that autograd holds after a forward pass, without parameters and buffers."""
    held = {}

    def hold(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        loss = model(batch).square().sum()
    for tensor in [*model.parameters(), *model.buffers()]:
        held.pop(tensor.untyped_storage().data_ptr(), None)
    size = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    loss.backward()
    return size


@pytest.mark.parametrize(
    ("model", "policy", "batch"),
    [
        (Transformer(), Block, torch.randint(11, (4, 9))),
        (
            nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)]),
            nn.TransformerEncoderLayer,
            torch.randn(4, 9, 16, requires_grad=True),
        ),
        (Normalised(*[nn.BatchNorm1d(4) for _ in range(3)]), nn.Sequential, torch.randn(64, 4)),
    ],
    ids=["own", "torch", "batch normalisation"],
)
def test_autograd_keeps_fewer_activations(model, policy, batch):
    checkpointed, _ = with_checkpointing(model, policy)
    assert kept_by_autograd(checkpointed, batch) < 0.6 * kept_by_autograd(model, batch)


def test_the_second_forward_pass_has_the_autocast_state_of_the_first():
    class Cast(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(batch).float()

    model = Cast(Transformer())
    checkpointed, _ = with_checkpointing(model, Block)
    for ours, theirs in zip(train(checkpointed, tokens), train(model, tokens), strict=True):
        assert torch.equal(ours, theirs)


def test_a_graph_can_be_used_twice_and_differentiated_twice():
    model = Transformer().double()
    gradients = []
    for net in (model, with_checkpointing(model, Block)[0]):
        torch.manual_seed(3)
        hidden = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
        output = net.blocks[1](net.blocks[0](hidden)).square().sum()
        output.backward(retain_graph=True)
        output.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(output, hidden, create_graph=True)
        slope.square().sum().backward()
        gradients.append([p.grad for block in net.blocks[:2] for p in block.parameters()])
    assert difference(gradients[1], gradients[0]) < 1e-12


def test_a_module_may_be_called_several_times_in_a_step():
    class Recurrent(Transformer):
        def forward(self, batch):
            hidden = self.embedding(batch)
            for _ in range(4):
                hidden = self.blocks[0](hidden)
            return self.head(hidden)

    model = Recurrent(blocks=1).double()
    checkpointed, _ = with_checkpointing(model, Block)
    assert difference(train(checkpointed, tokens), train(model, tokens)) < 1e-12
    assert checkpointed.blocks[0].calls == 2 * 4 * STEPS
