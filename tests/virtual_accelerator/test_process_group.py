"""`virtual_ccl` on two ranks: wrong programs that NCCL would let hang or read rubbish raise, right ones do not."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests import virtual_accelerator
from tests.support.processes import RankError, run_processes

pytestmark = pytest.mark.usefixtures("virtual_devices")


def start(program, *arguments):
    """Run a program on the device of this rank."""
    virtual_accelerator.load()
    device = torch.device("virtual", int(os.environ["RANK"]))
    torch.accelerator.set_device_index(device)
    dist.init_process_group("virtual_ccl", device_id=device)
    return program(device, *arguments)


def collectives(device):
    rank, size = dist.get_rank(), dist.get_world_size()
    own, parts = torch.full((2,), float(rank), device=device), torch.arange(2.0 * size, device=device)
    total, mean, copy, reduced, chunk, received = (own.clone() for _ in range(6))
    gathered, flat = [torch.empty_like(own) for _ in range(size)], torch.empty_like(parts)
    works = [
        dist.all_reduce(total, async_op=True),
        dist.all_reduce(mean, dist.ReduceOp.AVG, async_op=True),
        dist.broadcast(copy, 1, async_op=True),
        dist.reduce(reduced, 0, async_op=True),
        dist.all_gather(gathered, own, async_op=True),
        dist.all_gather_into_tensor(flat, own, async_op=True),
        dist.reduce_scatter_tensor(chunk, parts, async_op=True),
    ]
    for work in works:
        work.wait()
    dist.recv(received, 0) if rank else dist.send(total, 1)
    future = dist.all_reduce(own.clone(), async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    assert "host waits" not in virtual_accelerator.counts()
    dist.barrier()
    assert virtual_accelerator.counts()["host waits: barrier"] == 1
    values = {"total": total, "mean": mean, "copy": copy, "gathered": torch.cat(gathered), "flat": flat}
    values |= {"chunk": chunk, "doubled": doubled}
    values["received" if rank else "reduced"] = received if rank else reduced
    result = {name: value.tolist() for name, value in values.items()}
    virtual_accelerator.check()
    return result


def right_programs(device):
    """Return the results of programs whose wrong variants raise."""
    return collectives(device), read_result(device, True), reduce_in_two_groups(device, True)


def test_collectives_have_their_results_and_the_host_does_not_wait_for_them():
    both = {"total": [1, 1], "mean": [0.5, 0.5], "copy": [1, 1], "gathered": [0, 0, 1, 1], "flat": [0, 0, 1, 1]}
    both |= {"doubled": [2, 2]}
    assert run_processes(start, 2, right_programs) == [
        ({**both, "chunk": [0, 2], "reduced": [1, 1]}, 4, 6),
        ({**both, "chunk": [4, 6], "received": [1, 1]}, 4, 6),
    ]


def read_result(device, waits):
    tensor = torch.ones(2, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    if waits:
        work.wait()
    return tensor.sum().item()


def test_a_result_is_read_only_after_wait():
    with pytest.raises(
        RankError, match=r"race: `aten::sum` on stream 0 .*written last by `ALLREDUCE of 2 Float in group 0"
    ):
        run_processes(start, 2, read_result, False)


def reduce_in_two_groups(device, same_order):
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    if not same_order and dist.get_rank() == 1:
        groups.reverse()
    tensors = {group.group_name: torch.ones(index + 1, device=device) for index, group in enumerate(groups)}
    works = [dist.all_reduce(tensors[group.group_name], group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()
    return sum(tensor.sum().item() for tensor in tensors.values())


def test_ranks_call_the_collectives_of_all_groups_in_one_order():
    names = r"`ALLREDUCE of \d Float in group \d`"
    with pytest.raises(
        RankError,
        match=rf"ranks \[0, 1\] call collectives in different orders: rank \d calls {names} .*; rank \d calls {names}",
    ):
        run_processes(start, 2, reduce_in_two_groups, False)


def refused(device):
    found = []
    for tensor in (torch.ones(1), torch.ones(1, device="virtual:3"), torch.ones(1, device=device, dtype=torch.int16)):
        dist.all_reduce(torch.ones(1, device=device))
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(tensor)
        found.append(str(error.value).splitlines()[0])
    return found


def test_tensors_that_nccl_refuses_are_refused():
    assert run_processes(start, 2, refused)[1] == [
        "No backend type associated with device type cpu",
        "virtual_ccl: group 0 is not on virtual:3",
        "virtual_ccl: tensors must be virtual, dense and of a type that NCCL has, got virtualShortType",
    ]


def wait_for_absent_rank(device):
    if dist.get_rank() == 1:
        time.sleep(2)  # its end would end the other's wait with an error
        return True
    tensor = torch.ones(1, device=device)
    dist.all_reduce(tensor)
    threading.Timer(0.5, dist.group.WORLD.abort).start()
    tensor.item()  # without a result, as on a GPU
    return True


def test_abort_ends_the_wait_for_an_absent_rank():
    assert run_processes(start, 2, wait_for_absent_rank) == [True, True]
