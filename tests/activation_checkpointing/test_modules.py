"""Activation checkpointing changes nothing about a module and its gradients except time and memory."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp_ext.activation_checkpointing import ActivationCheckpointing, CheckpointedForward
from lightning_ddp_ext.errors import ActivationCheckpointingError

STEPS = 3


class Block(nn.Module):
    """A block of a transformer, with dropout."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden, *, scale=1.0):
        self.calls += 1
        normal = self.norm(hidden)
        hidden = hidden + self.attention(normal, normal, normal, need_weights=False)[0]
        return hidden + scale * self.dropout(self.feed_forward(self.norm(hidden)))


class Transformer(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(16, 11)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, scale=0.5)
        return self.head(hidden)


class Normalised(nn.Module):
    """Parts whose forward pass changes buffers."""

    def __init__(self, *layers):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh()) for layer in layers)

    def forward(self, inputs):
        for part in self.parts:
            inputs = part(inputs)
        return inputs


def train(model, make_batch, steps=STEPS):
    """Train a few steps, and return the gradients of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(7)
    gradients = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(make_batch())
        outputs.square().mean().backward()
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return gradients


def difference(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return max(float((one - other).norm() / other.norm().clamp_min(1e-12)) for one, other in pairs)


def tokens():
    return torch.randint(11, (2, 5))


def vectors():
    return torch.randn(6, 4, dtype=torch.float64)


def with_checkpointing(model, policy):
    copied = copy.deepcopy(model)
    checkpointing = ActivationCheckpointing(policy)
    checkpointing.apply(copied)
    return copied, checkpointing


def checkpointed_names(model):
    return [name for name, module in model.named_modules() if CheckpointedForward.find(module) is not None]


class Recurrent(Transformer):
    def forward(self, batch):
        hidden = self.embedding(batch)
        for _ in range(4):
            hidden = self.blocks[0](hidden)
        return self.head(hidden)


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        (Transformer(), Block),
        (Transformer(), [Block, nn.Linear]),
        (Transformer(), (nn.MultiheadAttention, nn.Sequential)),
        (Transformer(), f"{__name__}.Block"),
        (Transformer(), lambda module: isinstance(module, Block)),
        (Recurrent(blocks=1), Block),
    ],
    ids=["class", "list", "parts of blocks", "path", "predicate", "called several times"],
)
def test_gradients_are_the_same(model, policy):
    model = model.double()
    checkpointed, checkpointing = with_checkpointing(model, policy)
    assert difference(train(checkpointed, tokens), train(model, tokens)) < 1e-12
    assert checkpointed_names(checkpointed) == [*checkpointing.modules]
    if isinstance(model, Recurrent):
        assert checkpointed.blocks[0].calls == 2 * 4 * STEPS


def test_the_test_fails_if_masks_are_drawn_anew(monkeypatch):
    def forgetful(*args, **kwargs):
        return checkpoint(*args, **kwargs, preserve_rng_state=False)

    monkeypatch.setattr("lightning_ddp_ext.activation_checkpointing.checkpoint", forgetful)
    model = Transformer().double()
    checkpointed, _ = with_checkpointing(model, Block)
    assert difference(train(checkpointed, tokens), train(model, tokens)) > 1e-3


def test_the_forward_pass_runs_again_in_the_backward_pass_alone():
    model, _ = with_checkpointing(Transformer(), Block)
    for run, expected in (
        (lambda: model(tokens()).sum().backward(), 2),
        (torch.no_grad()(lambda: model(tokens())), 3),
        (lambda: model.eval()(tokens()).sum().backward(), 5),
    ):
        run()
        assert [block.calls for block in model.blocks] == [expected] * 3


def kept_by_autograd(model, batch):
    """Return the number of bytes that autograd holds after a forward pass, without parameters and buffers."""
    held = {}

    def hold(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        loss = model(batch).square().sum()
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    size = sum(tensor.untyped_storage().nbytes() for pointer, tensor in held.items() if pointer not in own)
    loss.backward()
    return size


def test_autograd_keeps_fewer_activations():
    normalised = Normalised(*[nn.BatchNorm1d(4) for _ in range(3)])
    for model, policy, batch in (
        (Transformer(), Block, torch.randint(11, (4, 9))),
        (normalised, nn.Sequential, torch.randn(64, 4)),
    ):
        checkpointed, _ = with_checkpointing(model, policy)
        assert kept_by_autograd(checkpointed, batch) < 0.6 * kept_by_autograd(model, batch)


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


def test_other_policies_are_refused():
    for policy, error, message in (
        (None, TypeError, "must name classes of modules, got None. Use a class"),
        (nn.Linear(1, 1), TypeError, "got the module Linear"),
        (int, TypeError, "holds <class 'int'>, not a class of modules"),
        ([nn.Linear, 3], TypeError, "holds 3, not a class of modules"),
        ([], ValueError, "is empty. Use a class"),
        (["Block"], ValueError, "names 'Block', which cannot be imported: No module named 'Block'. Write the path"),
        ("no such path", ValueError, "names 'no such path', which cannot be imported"),
        ("torch.nn", TypeError, "must name classes of modules, got <module 'torch.nn'"),
        (lambda: True, TypeError, "must take one module, got <function "),
        (lambda module, name: True, TypeError, "missing a required argument: 'name'. Use a class"),
    ):
        with pytest.raises(error, match="`activation_checkpointing` ") as raised:
            ActivationCheckpointing(policy)
        assert message in str(raised.value)


def test_a_policy_reaches_processes_that_are_started_anew():
    policy = [nn.Linear, "torch.nn.Tanh"]
    there = pickle.loads(pickle.dumps(ActivationCheckpointing(policy)))
    assert there.policy == policy
    there.apply(nn.Sequential(nn.Linear(2, 2), nn.Sigmoid()))
    assert there.modules == {"0": "Linear"}


def test_a_policy_that_names_no_module_is_refused_with_what_there_is():
    for policy in (nn.Conv2d, Transformer):
        with pytest.raises(ActivationCheckpointingError) as raised:
            ActivationCheckpointing(policy).apply(Transformer())
        assert str(raised.value) == (
            "`activation_checkpointing` names no module below Transformer, which is never recomputed as a whole;"
            " there are: Embedding (1), Block (3), LayerNorm (3), MultiheadAttention (3),"
            " NonDynamicallyQuantizableLinear (3), Sequential (3), Linear (7), GELU (3), Dropout (3). Name one of these"
            " classes."
        )
