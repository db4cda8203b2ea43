"""Recomputed segments give the gradients and random numbers of a plain module: only time and memory change."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.activation_checkpointing.recomputed_models import (
    Block,
    Transformer,
    difference,
    tokens,
    train,
    with_segments,
)


@pytest.mark.parametrize(
    "policy",
    [
        Block,
        {Block},
        [Block, nn.Linear],
        (nn.MultiheadAttention, nn.Sequential),
        f"{Block.__module__}.Block",
        ["torch.nn.Sequential"],
        lambda module: isinstance(module, Block),
    ],
    ids=["class", "set", "list", "parts of blocks", "path", "list of paths", "predicate"],
)
def test_gradients_are_those_without_recomputation(policy):
    model = Transformer().double()
    recomputing, checkpointing = with_segments(model, policy)
    assert difference(train(recomputing, tokens), train(model, tokens)) < 1e-12
    assert checkpointing.report.memory.calls == len(checkpointing.report.segments)


def test_the_test_fails_if_masks_are_drawn_anew(monkeypatch):
    def forgetful(*args, **kwargs):
        return checkpoint(*args, **kwargs, preserve_rng_state=False)

    monkeypatch.setattr("lightning_ddp_ext.activation_checkpointing.recomputed_module.checkpoint", forgetful)
    model = Transformer().double()
    recomputing, _ = with_segments(model, Block)
    assert difference(train(recomputing, tokens), train(model, tokens)) > 1e-3


def test_the_forward_pass_runs_again_in_the_backward_pass():
    model = Transformer(dropout=0.0)
    recomputing, _ = with_segments(model, Block)
    batch = tokens()
    flops = {}
    for kind, net in [("plain", model), ("recomputed", recomputing)]:
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
    assert [block.calls for block in recomputing.blocks] == [2, 2, 2]


def test_nothing_is_recomputed_without_gradients():
    recomputing, checkpointing = with_segments(Transformer(), Block)
    with torch.no_grad():
        recomputing(tokens())
    assert [block.calls for block in recomputing.blocks] == [1, 1, 1]
    assert checkpointing.report.memory is None


def test_frozen_layers_in_evaluation_mode_are_recomputed_too():
    recomputing, _ = with_segments(Transformer(), Block)
    recomputing.eval()
    recomputing(tokens()).sum().backward()
    assert [block.calls for block in recomputing.blocks] == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_segment_is_recomputed_under_the_autocast_of_its_forward_pass(dtype):
    class Cast(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, batch):
            with torch.autocast("cpu", dtype=dtype):
                return self.inner(batch).float()

    model = Cast(Transformer())
    recomputing, checkpointing = with_segments(model, Block)
    for ours, theirs in zip(train(recomputing, tokens), train(model, tokens), strict=True):
        assert torch.equal(ours, theirs)
    assert checkpointing.report.memory.saved > 0


def test_a_graph_can_be_used_twice_and_differentiated_twice():
    model = Transformer().double()
    gradients = []
    for net in (model, with_segments(model, Block)[0]):
        torch.manual_seed(3)
        hidden = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
        output = net.blocks[1](net.blocks[0](hidden)).square().sum()
        output.backward(retain_graph=True)
        output.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(output, hidden, create_graph=True)
        slope.square().sum().backward()
        gradients.append([p.grad for block in net.blocks[:2] for p in block.parameters()])
    assert difference(gradients[1], gradients[0]) < 1e-12


def test_a_segment_may_be_called_several_times_in_a_step():
    class Recurrent(Transformer):
        def forward(self, batch):
            hidden = self.embedding(batch)
            for _ in range(4):
                hidden = self.blocks[0](hidden)
            return self.head(hidden)

    model = Recurrent(blocks=1).double()
    recomputing, checkpointing = with_segments(model, Block)
    assert difference(train(recomputing, tokens), train(model, tokens)) < 1e-12
    assert checkpointing.report.memory.calls == 4
