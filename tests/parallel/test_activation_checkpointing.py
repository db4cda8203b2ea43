"""Recomputed segments give the gradients, buffers and random numbers of a plain module, and the module stays itself."""

import copy
import gc
import inspect
import io
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_ddp_ext.errors import ActivationCheckpointingError
from lightning_ddp_ext.parallel.activation_checkpointing import ActivationCheckpointing
from lightning_ddp_ext.parallel.recomputation import Segment

STEPS = 3


class Block(nn.Module):
    """A block of a transformer, with dropout."""

    def __init__(self, width=16, dropout=0.3):
        super().__init__()
        self.calls = 0
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=dropout, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden, *, scale=1.0):
        self.calls += 1
        normal = self.norm(hidden)
        hidden = hidden + self.attention(normal, normal, normal, need_weights=False)[0]
        return hidden + scale * self.dropout(self.feed_forward(self.norm(hidden)))


class Transformer(nn.Module):
    def __init__(self, blocks=3, width=16, dropout=0.3):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, scale=0.5)
        return self.head(hidden)


class Normalised(nn.Module):
    """Segments whose forward pass changes buffers."""

    def __init__(self, *layers):
        super().__init__()
        self.segments = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh()) for layer in layers)

    def forward(self, inputs):
        for segment in self.segments:
            inputs = segment(inputs)
        return inputs


class Codebook(nn.Module):
    """Computes with a buffer that it then moves, as vector quantisation does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.ones(4, dtype=torch.float64))
        self.alias = nn.Module()
        self.alias.register_buffer("same_codes", self.codes)
        self.seen = []

    def forward(self, inputs):
        self.seen.append(self.alias.same_codes.clone())
        outputs = inputs.square() * self.codes.clone()
        self.codes.mul_(0.5).add_(inputs.detach().mean(0))
        return outputs


class Moving(nn.Module):
    """Computes with a buffer that it then replaces. One changed in place differs by compilation alone (torch 2.13)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.ones(4, dtype=torch.float64))

    def forward(self, inputs):
        torch._dynamo.graph_break()  # ends what is compiled around it, the segment included
        outputs = inputs.square() * self.codes
        self.codes = 0.5 * self.codes + inputs.detach().mean(0)
        return outputs


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


def with_segments(model, policy):
    copied = copy.deepcopy(model)
    checkpointing = ActivationCheckpointing(policy)
    checkpointing.apply(copied)
    return copied, checkpointing


def segments_of(model):
    return [name for name, module in model.named_modules() if Segment.find(module) is not None]


def kept_by_autograd(model, batch):
    """Bytes that autograd really holds after a forward pass, parameters and buffers aside."""
    held = {}

    def hold(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        loss = model(batch).square().sum()
    fixed = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    sizes = {address: tensor.untyped_storage().nbytes() for address, tensor in held.items() if address not in fixed}
    loss.backward()
    return sum(sizes.values())


# --- the promise: nothing but time and memory changes


@pytest.mark.parametrize(
    "policy",
    [
        Block,
        {Block},
        [Block, nn.Linear],
        (nn.MultiheadAttention, nn.Sequential),
        f"{__name__}.Block",
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

    monkeypatch.setattr("lightning_ddp_ext.parallel.recomputation.checkpoint", forgetful)
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


# --- buffers


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_updated_once_per_step(momentum):
    model = Normalised(nn.BatchNorm1d(4, momentum=momentum), nn.BatchNorm1d(4, momentum=momentum)).double()
    recomputing, _ = with_segments(model, nn.Sequential)
    assert difference(train(recomputing, vectors), train(model, vectors)) < 1e-12
    for ours, theirs in zip(recomputing.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert recomputing.segments[0][1].num_batches_tracked == STEPS


def test_statistics_frozen_at_first_are_updated_once_when_they_thaw():
    model = Normalised(nn.BatchNorm1d(4)).double()
    recomputing, _ = with_segments(model, nn.Sequential)
    for net in (model, recomputing):
        net.segments[0][1].eval()
        train(net, vectors)
        net.train()
        train(net, vectors)
    for ours, theirs in zip(recomputing.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_test_of_statistics_fails_with_torchs_checkpoint_alone():
    class Twice(Normalised):
        def forward(self, inputs):
            return checkpoint(super().forward, inputs, use_reentrant=False)

    model = Twice(nn.BatchNorm1d(4)).double()
    train(model, vectors)
    assert model.segments[0][1].num_batches_tracked == 2 * STEPS


def test_layers_that_compute_with_buffers_they_change_are_recomputed_as_they_ran():
    model = Normalised(nn.Identity(), nn.Identity()).double()
    for segment in model.segments:
        parametrizations.spectral_norm(segment[0])
    recomputing, _ = with_segments(model, nn.Sequential)
    assert difference(train(recomputing, vectors), train(model, vectors)) < 1e-12
    for ours, theirs in zip(recomputing.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_shared_buffers_stay_shared_and_keep_their_identity():
    model = Normalised(Codebook()).double()
    recomputing, _ = with_segments(model, nn.Sequential)
    codebook = recomputing.segments[0][1]
    before = codebook.codes
    assert difference(train(recomputing, vectors), train(model, vectors)) < 1e-12
    assert codebook.codes is before
    assert codebook.alias.same_codes is before
    assert torch.equal(before, model.segments[0][1].codes)
    assert len(codebook.seen) == 2 * STEPS
    assert all(torch.equal(*codebook.seen[step : step + 2]) for step in range(0, 2 * STEPS, 2))


# --- the module stays what it is


def test_names_keys_classes_and_signatures_do_not_change():
    model = Transformer()
    recomputing, _ = with_segments(model, Block)
    assert [name for name, _ in recomputing.named_modules()] == [name for name, _ in model.named_modules()]
    assert list(recomputing.state_dict()) == list(model.state_dict())
    assert type(recomputing.blocks[0]) is Block
    assert str(recomputing) == str(model)
    assert inspect.signature(recomputing.blocks[0].forward) == inspect.signature(model.blocks[0].forward)


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


def test_a_deep_copy_recomputes_with_its_own_parameters():
    recomputing, checkpointing = with_segments(Transformer().double(), Block)
    twin = copy.deepcopy(recomputing)
    reference = copy.deepcopy(recomputing)
    checkpointing.remove(reference)
    assert not segments_of(reference)
    for parameter in recomputing.parameters():
        parameter.data.fill_(float("nan"))
    assert difference(train(twin, tokens), train(reference, tokens)) < 1e-12
    assert [block.calls for block in twin.blocks] == [2 * STEPS] * 3
    assert [block.calls for block in recomputing.blocks] == [0, 0, 0]
    assert checkpointing.report.memory is None  # the copy is not what was asked about


def tenfold(hidden, scale):
    return 10 * hidden


def test_a_pickled_module_is_an_ordinary_one():
    recomputing, _ = with_segments(Transformer(), Block)
    recomputing.blocks[1].forward = tenfold
    ActivationCheckpointing(Block).apply(recomputing)
    for loaded in (pickle.loads(pickle.dumps(recomputing)), saved_and_loaded(recomputing)):
        assert not segments_of(loaded)
        assert loaded.blocks[1].forward is tenfold
        batch = tokens()
        assert torch.equal(loaded.eval()(batch), recomputing.eval()(batch))
        loaded.train()(batch).sum().backward()
        assert loaded.blocks[0].calls == recomputing.blocks[0].calls + 1
        recomputing.blocks[0].calls = 0
    assert b"lightning_ddp_ext.parallel" not in pickle.dumps(recomputing)


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_outermost_modules_become_segments_once_and_the_root_never():
    model = nn.Sequential(
        nn.Sequential(nn.Sequential(nn.Linear(2, 2))), nn.ModuleList([nn.Linear(2, 2)]), nn.Identity()
    )
    model.append(model[0])
    ActivationCheckpointing({nn.Sequential, nn.Linear, nn.ModuleList}).apply(model)
    assert segments_of(model) == ["0", "1.0"]


def test_hooks_of_a_segment_run_once_and_those_below_it_again():
    recomputing, _ = with_segments(Transformer(blocks=1), Block)
    calls = []
    recomputing.blocks[0].register_forward_hook(lambda *_: calls.append("segment"))
    recomputing.blocks[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    recomputing.blocks[0].attention.register_forward_hook(lambda *_: calls.append("below"))
    recomputing(tokens()).sum().backward()
    assert calls == ["below", "segment", "below", "backward"]


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
def test_a_module_that_recomputes_parts_itself_keeps_its_gradients(use_reentrant):
    class Own(Block):
        def forward(self, hidden, *, scale=1.0):
            hidden = hidden + checkpoint(self.feed_forward, hidden, use_reentrant=use_reentrant)
            return super().forward(hidden, scale=scale)

    model = Transformer().double()
    model.blocks = nn.ModuleList(Own() for _ in range(2)).double()
    recomputing, checkpointing = with_segments(model, Own)
    assert difference(train(recomputing, tokens), train(model, tokens)) < 1e-12
    assert checkpointing.report.memory.saved > 0


# --- what is measured


@pytest.mark.parametrize("kind", ["own", "torch's", "batch normalisation"])
def test_the_memory_saved_is_what_autograd_holds_less(kind):
    model, policy, batch = {
        "own": (Transformer(), Block, torch.randint(11, (4, 9))),
        "torch's": (
            nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)]),
            nn.TransformerEncoderLayer,
            torch.randn(4, 9, 16, requires_grad=True),
        ),
        "batch normalisation": (Normalised(*[nn.BatchNorm1d(4) for _ in range(3)]), nn.Sequential, torch.randn(64, 4)),
    }[kind]
    recomputing, checkpointing = with_segments(model, policy)
    without, kept = kept_by_autograd(model, batch), kept_by_autograd(recomputing, batch)
    memory = checkpointing.report.memory
    assert memory.saved == pytest.approx(without - kept, rel=0.02)
    assert memory.saved > 0.4 * without
    assert memory.calls == 3
    assert memory.without <= without
    # Later batches are not measured, whatever their size.
    train(recomputing, lambda: torch.cat([batch, batch]))
    assert checkpointing.report.memory is memory


def test_every_run_measures_its_first_batch():
    recomputing, checkpointing = with_segments(Transformer(), Block)
    saved = []
    for length in (4, 8):
        checkpointing.apply(recomputing)
        assert checkpointing.report.memory is None
        recomputing(torch.randint(11, (2, length))).sum().backward()
        saved.append(checkpointing.report.memory.saved)
    assert 1.9 < saved[1] / saved[0] < 2.3


def test_a_forward_pass_without_a_backward_pass_does_not_count():
    recomputing, checkpointing = with_segments(Transformer(), Block)
    batch = tokens()
    recomputing(batch)
    recomputing(batch).sum().backward()
    twice, checkpointing_once = with_segments(Transformer(), Block)
    twice(batch).sum().backward()
    assert checkpointing.report.memory == checkpointing_once.report.memory
    assert checkpointing.report.memory.calls == 3


def test_segments_that_keep_more_than_they_save_are_reported_as_such():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    checkpointing = ActivationCheckpointing(nn.ReLU)
    checkpointing.apply(model)
    model(torch.rand(2**16, 4)).sum().backward()
    assert checkpointing.report.memory.saved < 0
    assert "nothing saved: 2.0 MiB of activations kept for it instead of 1.0 MiB" in str(checkpointing.report)


def test_the_report_tells_what_and_how_much():
    model = Transformer(width=64)
    checkpointing = ActivationCheckpointing([Block, nn.Linear])
    checkpointing.apply(model)
    assert str(checkpointing.report) == (
        "activation checkpointing: 3 Block, 1 Linear recomputed in the backward pass; memory not measured"
    )
    assert checkpointing.report.segments == {
        "blocks.0": "Block", "blocks.1": "Block", "blocks.2": "Block", "head": "Linear"
    }  # fmt: skip
    model(torch.randint(11, (16, 32))).sum().backward()
    memory = checkpointing.report.memory
    assert str(checkpointing.report) == (
        "activation checkpointing: 3 Block, 1 Linear recomputed in the backward pass;"
        f" {memory.saved / 2**20:.1f} MiB saved: {memory.kept / 2**20:.1f} MiB of activations kept for it instead of"
        f" {memory.without / 2**20:.1f} MiB"
    )


def test_the_memory_saved_is_what_the_allocator_has_given_out_less():
    model = nn.Sequential(*[nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)])
    recomputing, checkpointing = with_segments(model, nn.TransformerEncoderLayer)
    allocated = []
    for net in (model, recomputing):
        net(torch.randn(8, 16, 32)).sum().backward()  # workspaces of libraries stay
        net.zero_grad()
        batch = torch.randn(64, 16, 32)
        checkpointing.apply(recomputing)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            loss = net(batch).square().sum()
        allocated.append(sum(event.self_cpu_memory_usage for event in profiled.events()))
        loss.backward()
    assert checkpointing.report.memory.saved == pytest.approx(allocated[0] - allocated[1], rel=0.02)


def test_measuring_keeps_nothing_alive():
    recomputing, checkpointing = with_segments(Transformer(), Block)
    recomputing(tokens()).sum().backward()
    gone = weakref.ref(recomputing)
    del recomputing
    gc.collect()
    assert gone() is None
    assert checkpointing.report.memory.calls == 3


# --- compiled modules


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's, hidden by itself
@pytest.mark.parametrize("how", ["wrapped", "in place", "around"])
@pytest.mark.parametrize("layer", [nn.Identity, lambda: nn.BatchNorm1d(4), Moving])
def test_compiled_modules_give_the_same_gradients_and_buffers(how, layer):
    torch.compiler.reset()
    model = Normalised(layer(), layer()).double()
    reference = copy.deepcopy(model)
    if how == "wrapped":
        model.segments = nn.ModuleList(torch.compile(segment, backend="aot_eager") for segment in model.segments)
    elif how == "in place":
        for segment in model.segments:
            segment.compile(backend="aot_eager")
    checkpointing = ActivationCheckpointing(nn.Sequential)
    checkpointing.apply(model)
    assert list(checkpointing.report.segments.values()) == ["Sequential"] * 2
    run = torch.compile(model, backend="aot_eager") if how == "around" else model
    assert difference(train(run, vectors), train(reference, vectors)) < 1e-12
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    if how != "around":
        assert checkpointing.report.memory.calls == 2
    checkpointing.remove(model)
    assert not segments_of(model)


# --- models of HuggingFace


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), "transformers.models.gpt2.modeling_gpt2.GPT2Block"


def t5():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=11, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), "transformers.models.t5.modeling_t5.T5Block"


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        attention_dropout=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), "transformers.models.llama.modeling_llama.LlamaDecoderLayer"


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(input_ids=batch, labels=batch).loss


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("own", [False, True], ids=["plain", "recomputing itself too"])
@pytest.mark.parametrize("make", [gpt2, t5, llama])
def test_models_of_huggingface_keep_their_gradients(make, own):
    network, path = make()
    model = Loss(network.double())
    recomputing, checkpointing = with_segments(model, path)
    if own:
        recomputing.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert difference(train(recomputing, tokens), train(model, tokens)) < 1e-12
    memory = checkpointing.report.memory
    assert memory.calls == len(checkpointing.report.segments) >= 2
    assert list(recomputing.state_dict()) == list(model.state_dict())
    if not own:
        assert memory.saved > 0.5 * memory.without


def test_a_cache_that_holds_something_is_refused():
    network, path = gpt2()
    ActivationCheckpointing(path).apply(network)
    with torch.no_grad():
        cache = network(tokens(), use_cache=True).past_key_values
    with pytest.raises(ActivationCheckpointingError, match="DynamicCache that holds keys and values of 5 tokens"):
        network(tokens(), past_key_values=cache)


# --- what is refused


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (None, TypeError, "must name classes of modules, got None. Use a class"),
        (3, TypeError, "must name classes of modules, got 3"),
        (nn.Linear(1, 1), TypeError, "got the module Linear"),
        (nn.Sequential(nn.Linear(1, 1)), TypeError, "got the module Sequential"),
        (int, TypeError, "holds <class 'int'>, not a class of modules"),
        ([nn.Linear, 3], TypeError, "holds 3, not a class of modules"),
        ({nn.Linear, lambda module: True}, TypeError, "not a class of modules"),
        ([], ValueError, "is empty. Use a class"),
        ("Block", ValueError, "names 'Block', which cannot be imported: No module named 'Block'. Write the path"),
        ("torch.nn.Liner", ValueError, "names 'torch.nn.Liner', which cannot be imported"),
        (["no such path"], ValueError, "names 'no such path', which cannot be imported"),
        ("torch.nn", TypeError, "must name classes of modules, got <module 'torch.nn'"),
        (lambda module, recurse: True, TypeError, "cannot be called with one: missing a required argument: 'recurse'"),
    ],
)
def test_other_policies_are_refused(policy, error, message):
    with pytest.raises(error, match="`activation_checkpointing` ") as raised:
        ActivationCheckpointing(policy)
    assert message in str(raised.value)


def test_a_predicate_must_answer_yes_or_no():
    checkpointing = ActivationCheckpointing(lambda module: SimpleNamespace())
    with pytest.raises(TypeError, match=r"returned namespace\(\) for a Linear. Return True or False"):
        checkpointing.apply(nn.Sequential(nn.Linear(1, 1)))


@pytest.mark.parametrize("policy", [nn.Conv2d, Transformer])
def test_a_policy_that_names_no_module_is_refused_with_what_there_is(policy):
    with pytest.raises(ActivationCheckpointingError) as raised:
        ActivationCheckpointing(policy).apply(Transformer())
    assert str(raised.value) == (
        "`activation_checkpointing` names no module below Transformer, which is never recomputed as a whole; there are:"
        " Embedding (1), Block (3), LayerNorm (3), MultiheadAttention (3), NonDynamicallyQuantizableLinear (3),"
        " Sequential (3), Linear (7), GELU (3), Dropout (3). Name one of these classes."
    )
