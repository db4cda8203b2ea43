"""What recomputation is said to save is what it saves."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_ddp_ext.activation_checkpointing.policy import ActivationCheckpointing
from tests.activation_checkpointing.recomputed_models import (
    Block,
    Normalised,
    Transformer,
    tokens,
    train,
    with_segments,
)


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


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch before 2.13
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
