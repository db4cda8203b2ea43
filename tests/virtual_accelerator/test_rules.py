"""Each rule of the devices, broken by a wrong program and kept by the right one."""

import pytest
import torch

from tests import virtual_accelerator


def finished(device):
    """Return an event behind the work of the current stream."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def test_tensors_of_two_devices_are_refused_in_the_words_of_cuda(virtual_devices):
    first, second, *_ = virtual_devices
    found = "Expected all tensors to be on the same device, but found at least two devices, virtual:0 and "
    with pytest.raises(RuntimeError, match=f"{found}virtual:1!"):
        torch.ones(3, device=first) + torch.ones(3, device=second)
    with pytest.raises(RuntimeError, match=f"{found}cpu!"):
        torch.ones(3, device=first) + torch.ones(3)
    torch.testing.assert_close((torch.ones(3, device=first) + torch.tensor(2.0)).cpu(), torch.full((3,), 3.0))


@pytest.mark.parametrize("waits", [False, True])
def test_memory_is_read_on_another_stream_only_after_waiting_for_its_writer(virtual_devices, waits):
    device = virtual_devices[0]
    side = torch.Stream(device)
    with side:
        written = torch.ones(3, device=device)
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
        assert (written + 1).sum().item() == 6
    else:
        with pytest.raises(RuntimeError, match=r"race: `aten::add.*reads memory written on stream \d+ of virtual:0"):
            written + 1


def doubled_on_another_stream(device):
    """Return a tensor, its double and the stream that computes it."""
    side = torch.Stream(device)
    tensor = torch.ones(3, device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        double = tensor * 2
    return tensor, double, side


@pytest.mark.parametrize("waits", [False, True])
def test_memory_is_overwritten_on_another_stream_only_after_waiting_for_its_readers(virtual_devices, waits):
    read, double, side = doubled_on_another_stream(virtual_devices[0])
    event = side.record_event()
    if waits:
        event.wait()
        read.zero_()
        assert double.sum().item() == 6
    else:
        with pytest.raises(RuntimeError, match=r"race: `aten::zero_`.* overwrites memory read on"):
            read.zero_()
        torch.accelerator.synchronize()


@pytest.mark.parametrize("protection", [None, "record_stream", "wait"])
def test_memory_stays_allocated_while_another_stream_uses_it(virtual_devices, protection):
    used, double, side = doubled_on_another_stream(virtual_devices[0])
    if protection == "record_stream":
        used.record_stream(side)
    elif protection == "wait":
        torch.accelerator.current_stream().wait_stream(side)
    del used
    if protection is None:
        with pytest.raises(RuntimeError, match="freed in use: memory of stream 0 of virtual:0"):
            virtual_accelerator.check()
    virtual_accelerator.check()
    del double


@pytest.mark.parametrize("wait", [None, "synchronize", "query"])
def test_a_copy_to_the_host_is_read_only_after_waiting_for_it(virtual_devices, wait):
    copy = torch.ones(3, device=virtual_devices[0]).to("cpu", non_blocking=True)
    views = [copy, copy[1:], copy.reshape(1, 3)]
    event = finished(virtual_devices[0])
    assert "host waits" not in virtual_accelerator.counts()
    if wait is None:
        assert copy.numpy().tolist() != [1, 1, 1]  # past torch, which sees no read
        for view in views:
            with pytest.raises(
                RuntimeError, match=r"unread copy: `aten::\w+` reads host memory into which a device is"
            ):
                view.sum()
        torch.accelerator.synchronize()
    elif wait == "synchronize":
        event.synchronize()
    else:
        assert [event.query(), event.query()] == [False, True]  # not finished at once
    assert [view.sum().item() for view in views] == [3, 2, 3]
    assert virtual_accelerator.counts().get("host waits", 0) == (wait != "query")


def test_copies_and_host_waits_are_counted(virtual_devices):
    first, second, *_ = virtual_devices
    value = torch.ones(2, dtype=torch.float64)
    for copy, expected in (
        (lambda: value.to(first), {"copies to the device": 1, "bytes to the device": 16, "host waits": 1}),
        (lambda: value.to(first, non_blocking=True), {"copies to the device": 1, "host waits": 0}),
        (lambda: value.to(first).cpu(), {"copies to the host": 1, "bytes to the host": 16, "host waits": 2}),
        (lambda: value.to(first).to(second), {"copies between devices": 1, "bytes between devices": 16}),
        (lambda: value.to(first)[0].item(), {"host waits": 2, "host waits: item": 1}),
        (lambda: value.to(first).nonzero(), {"host waits": 2}),
        (lambda: torch.accelerator.synchronize(), {"host waits": 1}),
    ):
        virtual_accelerator.reset()
        copy()
        assert {name: virtual_accelerator.counts().get(name, 0) for name in expected} == expected
    with (
        virtual_accelerator.forbid_host_waits(),
        pytest.raises(RuntimeError, match=r"host waits for a device \(item\)"),
    ):
        torch.ones(1, device=first).item()


def test_times_of_events_need_a_host_that_has_waited(virtual_devices):
    events = [torch.Event("virtual", enable_timing=True) for _ in range(2)]
    for event in events:
        event.record()
        torch.ones(3, device=virtual_devices[0])
    with pytest.raises(RuntimeError, match="Both events must be completed"):
        events[0].elapsed_time(events[1])
    events[1].synchronize()
    assert events[0].elapsed_time(events[1]) > 0


def test_each_device_has_a_generator(virtual_devices):
    torch.manual_seed(3)
    drawn = [torch.rand(4, device=device).tolist() for device in (*virtual_devices, "cpu")]
    assert all(values == drawn[0] for values in drawn)
    module = torch.get_device_module("virtual")
    state = module.get_rng_state(virtual_devices[1])
    second = torch.nn.functional.dropout(torch.ones(99, device=virtual_devices[1]), 0.5)
    assert torch.equal(torch.rand(4), torch.rand(4, device=virtual_devices[0]).cpu())  # the others did not draw
    module.set_rng_state(state, virtual_devices[1])
    assert torch.equal(torch.nn.functional.dropout(torch.ones(99, device=virtual_devices[1]), 0.5), second)


def test_memory_is_measured_and_ends(virtual_devices):
    device = virtual_devices[3]
    before = torch.accelerator.memory_allocated(device)
    kept, other = torch.ones(256, device=device), torch.ones(256, device=device)
    del other
    assert torch.accelerator.memory_allocated(device) == before + 1024
    assert torch.accelerator.max_memory_allocated(device) >= before + 2048
    torch.accelerator.reset_peak_memory_stats(device)
    assert torch.accelerator.max_memory_allocated(device) == before + 1024
    with pytest.raises(torch.OutOfMemoryError, match="virtual out of memory"):
        torch.empty(2**30, device=device)
    del kept
