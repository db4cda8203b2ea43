"""Activation checkpointing of compiled modules and of models of HuggingFace."""

import copy

import pytest
import torch
from torch import nn

from lightning_ddp_ext.activation_checkpointing import ActivationCheckpointing
from lightning_ddp_ext.errors import ActivationCheckpointingError
from tests.activation_checkpointing.test_modules import (
    Normalised,
    checkpointed_names,
    difference,
    tokens,
    train,
    vectors,
    with_checkpointing,
)
from tests.support.devices import device


class Moving(nn.Module):
    """Computes with a buffer that it then replaces. One changed in place differs by compilation alone (torch 2.13)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.ones(4, dtype=torch.float64))

    def forward(self, inputs):
        torch._dynamo.graph_break()  # ends the compilation of the code around the module
        outputs = inputs.square() * self.codes
        self.codes = 0.5 * self.codes + inputs.detach().mean(0)
        return outputs


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's, hidden by itself
@pytest.mark.parametrize("how", ["wrapped", "in place", "around"])
@pytest.mark.parametrize("layer", [lambda: nn.BatchNorm1d(4), Moving], ids=["batch normalisation", "replaced buffer"])
def test_compiled_modules_give_the_same_gradients_and_buffers(how, layer):
    torch.compiler.reset()
    torch.ones(1, device=device())  # torch refuses to initialise a device within a checkpointed forward pass
    model = Normalised(layer(), layer()).double()
    reference = copy.deepcopy(model)
    if how == "wrapped":
        model.parts = nn.ModuleList(torch.compile(part, backend="aot_eager") for part in model.parts)
    elif how == "in place":
        for part in model.parts:
            part.compile(backend="aot_eager")
    checkpointing = ActivationCheckpointing(nn.Sequential)
    checkpointing.apply(model)
    assert list(checkpointing.modules.values()) == ["Sequential"] * 2
    run = torch.compile(model, backend="aot_eager") if how == "around" else model
    assert difference(train(run, vectors), train(reference, vectors)) < 1e-12
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    checkpointing.remove(model)
    assert not checkpointed_names(model)


def gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config), "transformers.models.gpt2.modeling_gpt2.GPT2Block"


def t5():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), "transformers.models.t5.modeling_t5.T5Block"


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(input_ids=batch, labels=batch).loss


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize(("make", "own"), [(gpt2, False), (gpt2, True), (t5, False)])
def test_models_of_huggingface_keep_their_gradients(make, own):
    network, path = make()
    model = Loss(network.double())
    checkpointed, checkpointing = with_checkpointing(model, path)
    if own:
        checkpointed.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert difference(train(checkpointed, tokens), train(model, tokens)) < 1e-12
    assert len(checkpointing.modules) >= 2
    assert list(checkpointed.state_dict()) == list(model.state_dict())


def test_a_cache_that_holds_something_is_refused():
    network, path = gpt2()
    ActivationCheckpointing(path).apply(network)
    with torch.no_grad():
        cache = network(tokens(), use_cache=True).past_key_values
    with pytest.raises(ActivationCheckpointingError, match="DynamicCache that holds keys and values of 5 tokens"):
        network(tokens(), past_key_values=cache)
