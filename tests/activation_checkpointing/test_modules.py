"""Activation checkpointing changes nothing about a module except its memory and time."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp_ext.activation_checkpointing.policy import ActivationCheckpointing
from tests.activation_checkpointing.models import (
    STEPS,
    Block,
    Transformer,
    checkpointed_names,
    difference,
    tokens,
    train,
    vectors,
    with_checkpointing,
)


def test_names_keys_classes_and_signatures_do_not_change():
    model = Transformer()
    checkpointed, _ = with_checkpointing(model, Block)
    assert [name for name, _ in checkpointed.named_modules()] == [name for name, _ in model.named_modules()]
    assert list(checkpointed.state_dict()) == list(model.state_dict())
    assert type(checkpointed.blocks[0]) is Block
    assert str(checkpointed) == str(model)
    assert inspect.signature(checkpointed.blocks[0].forward) == inspect.signature(model.blocks[0].forward)


def test_removal_restores_the_module():
    def own_forward(hidden, scale):
        return hidden * scale

    model = Transformer()
    model.blocks[1].forward = own_forward
    before = [dict(module.__dict__) for module in model.modules()]
    checkpointing = ActivationCheckpointing(Block)
    checkpointing.apply(model)
    checkpointing.apply(model)
    ActivationCheckpointing({Block}).apply(model)
    model(tokens()).sum().backward()
    assert [block.calls for block in model.blocks] == [2, 0, 2]
    checkpointing.remove(model)
    for block in model.blocks:
        block.calls = 0
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_a_deep_copy_uses_its_own_parameters():
    checkpointed, checkpointing = with_checkpointing(Transformer().double(), Block)
    twin = copy.deepcopy(checkpointed)
    reference = copy.deepcopy(checkpointed)
    checkpointing.remove(reference)
    assert not checkpointed_names(reference)
    for parameter in checkpointed.parameters():
        parameter.data.fill_(float("nan"))
    assert difference(train(twin, tokens), train(reference, tokens)) < 1e-12
    assert [block.calls for block in twin.blocks] == [2 * STEPS] * 3
    assert [block.calls for block in checkpointed.blocks] == [0, 0, 0]


def tenfold(hidden, scale):
    return 10 * hidden


def test_a_pickled_module_is_an_ordinary_one():
    checkpointed, _ = with_checkpointing(Transformer(), Block)
    checkpointed.blocks[1].forward = tenfold
    ActivationCheckpointing(Block).apply(checkpointed)
    pickled = pickle.dumps(checkpointed)
    assert b"lightning_ddp_ext" not in pickled
    loaded = pickle.loads(pickled)
    assert not checkpointed_names(loaded)
    assert loaded.blocks[1].forward is tenfold
    batch = tokens()
    assert torch.equal(loaded.eval()(batch), checkpointed.eval()(batch))
    loaded.train()(batch).sum().backward()
    assert loaded.blocks[0].calls == checkpointed.blocks[0].calls + 1


def test_outermost_modules_are_checkpointed_once_and_the_root_never():
    model = nn.Sequential(
        nn.Sequential(nn.Sequential(nn.Linear(2, 2))), nn.ModuleList([nn.Linear(2, 2)]), nn.Identity()
    )
    model.append(model[0])
    ActivationCheckpointing({nn.Sequential, nn.Linear, nn.ModuleList}).apply(model)
    assert checkpointed_names(model) == ["0", "1.0"]


def test_hooks_of_a_checkpointed_module_run_once_and_hooks_below_it_again():
    checkpointed, _ = with_checkpointing(Transformer(blocks=1), Block)
    calls = []
    checkpointed.blocks[0].register_forward_hook(lambda *_: calls.append("module"))
    checkpointed.blocks[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    checkpointed.blocks[0].attention.register_forward_hook(lambda *_: calls.append("below"))
    checkpointed(tokens()).sum().backward()
    assert calls == ["below", "module", "below", "backward"]


class Odd(nn.Module):
    """Takes and returns more than tensors, under names that torch's checkpoint has too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pair, *, debug=False, use_reentrant=None, context_fn="own"):
        first, second = pair["first"], pair["second"]
        return {"sum": self.layer(first).tanh() + second, "text": context_fn, "nothing": use_reentrant, "debug": debug}


def test_arguments_and_outputs_may_be_of_any_kind():
    model = nn.ModuleDict({"odd": Odd()}).double()
    ActivationCheckpointing(Odd).apply(model)
    first, second = vectors(), vectors().requires_grad_()
    outputs = model["odd"]({"first": first, "second": second}, debug=True)
    assert {**outputs, "sum": None} == {"sum": None, "text": "own", "nothing": None, "debug": True}
    outputs["sum"].sum().backward()
    assert torch.equal(second.grad, torch.ones_like(second))
    expected = torch.autograd.grad(model["odd"].layer(first).tanh().sum(), model["odd"].layer.weight)[0]
    torch.testing.assert_close(model["odd"].layer.weight.grad, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_module_with_checkpoints_of_its_own_keeps_its_gradients(use_reentrant):
    class Own(Block):
        def forward(self, hidden, *, scale=1.0):
            hidden = hidden + checkpoint(self.feed_forward, hidden, use_reentrant=use_reentrant)
            return super().forward(hidden, scale=scale)

    model = Transformer().double()
    model.blocks = nn.ModuleList(Own() for _ in range(2)).double()
    checkpointed, _ = with_checkpointing(model, Own)
    assert difference(train(checkpointed, tokens), train(model, tokens)) < 1e-12
