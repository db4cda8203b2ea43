"""Collectives of a backward pass and of the reducer are issued in one order, which NCCL demands."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ddp_ext._compat.torch import count_collectives
from lightning_ddp_ext.reducer import bucket_transport
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests import virtual_accelerator
from tests.support import devices
from tests.support.processes import RankError, run_processes

BACKENDS = "cpu:gloo,virtual:virtual_ccl"


class _Communicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, issued):
        ctx.issued = issued
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.issued.append("step")
        dist.all_reduce(gradient)
        return gradient, None


class Net(nn.Module):
    """Three layers; the backward pass communicates between them."""

    def __init__(self, communicates):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.communicates, self.issued, self.skipped = communicates, [], None

    def forward(self, values):
        for number, layer in enumerate(self.layers):
            values = _Communicate.apply(values, self.issued) if self.communicates else values
            values = values if number == self.skipped else layer(values)
        return values.sum()


@pytest.fixture
def orders(group, monkeypatch):
    """Return a function that makes three steps: their collectives in order, and the end of each backward pass."""

    def run(communicates):
        net, found = Net(communicates), []
        reducer = GradientReducer(net, bucket_cap_mb=1e-6)
        scheduler, transport = reducer._scheduler, reducer._transport
        # As on a device: on the CPU any order will do.
        scheduler._count_collectives = lambda: count_collectives(torch.device("cpu"), reducer.process_group)
        send = transport.send
        monkeypatch.setattr(transport, "send", lambda bucket: net.issued.append("bucket") or send(bucket))
        for _ in range(4):
            net.issued.clear()
            with reducer.synchronize():
                net(torch.ones(2, 4, requires_grad=True)).backward()
                net.issued.append("end")
            found.append("".join(name[0] for name in net.issued))
        reducer.close()
        return found[1:]  # the first synchronisation makes the buckets

    return run


def test_buckets_follow_a_backward_pass_that_communicates(orders):
    assert orders(communicates=True) == ["sss" + "e" + "b" * 6] * 3


def test_buckets_overlap_with_a_backward_pass_that_does_not(orders):
    assert all("b" in order.split("e")[0] for order in orders(communicates=False))


def test_collectives_of_other_groups_are_counted(group):
    own = dist.new_group()
    before = count_collectives(torch.device("cpu"), own)
    dist.all_reduce(torch.zeros(1), group=own)
    assert count_collectives(torch.device("cpu"), own) == before
    dist.all_reduce(torch.zeros(1))
    assert count_collectives(torch.device("cpu"), own) > before
    assert count_collectives(torch.device("meta"), own) == 0


def test_buckets_of_a_module_that_communicates_are_held_from_the_start(virtual_devices, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_transport, "count_collectives", lambda *args: 0)  # as before the first backward pass
    dist.init_process_group(BACKENDS, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    held = []
    for layer in (nn.BatchNorm1d(4), nn.SyncBatchNorm(4)):
        reducer = GradientReducer(nn.Sequential(nn.Linear(4, 4), layer).to(virtual_devices[0]))
        held.append(reducer._scheduler.is_held)
        reducer.close()
    assert held == [False, True]


def synchronize_on_devices(is_held):
    """Make steps in which rank 1 skips a layer, while the backward pass communicates; return the gradients."""
    device = devices.init_process_group(BACKENDS)
    torch.manual_seed(0)
    net = Net(communicates=True).to(device)
    reducer = GradientReducer(net, bucket_cap_mb=1e-6)
    for step in range(4):
        if not is_held:
            reducer._scheduler.is_held = False
        net.skipped = 1 if device.index == 1 and step == 3 else None
        net.zero_grad()
        with reducer.synchronize():
            net(torch.ones(2, 4, device=device, requires_grad=True)).backward()
    gradients = [parameter.grad.tolist() for parameter in net.parameters()]
    virtual_accelerator.check()
    return gradients


def test_a_rank_that_skips_a_layer_keeps_the_order_on_devices(virtual_devices):
    first, second = run_processes(synchronize_on_devices, 2, True)
    assert first == second
    with pytest.raises(RankError, match="in different orders"):
        run_processes(synchronize_on_devices, 2, False)


def count_messages():
    """Return the messages on the CPU and the host waits of each synchronisation on a device, after the first."""
    device = devices.init_process_group(BACKENDS)
    reducer = GradientReducer(net := nn.Linear(4, 4).to(device))
    found = []
    for _ in range(4):
        before = count_collectives(torch.device("cpu"), dist.group.WORLD)
        virtual_accelerator.reset()
        with reducer.synchronize():
            net(torch.ones(2, 4, device=device)).sum().backward()
        after = count_collectives(torch.device("cpu"), dist.group.WORLD)
        found.append((after - before, virtual_accelerator.counts().get("host waits", 0)))
    virtual_accelerator.check()
    return found[1:]


def test_a_synchronisation_on_devices_waits_for_one_message_of_the_hosts_and_for_no_device(virtual_devices):
    assert run_processes(count_messages, 2) == [[(1, 0)] * 3] * 2
