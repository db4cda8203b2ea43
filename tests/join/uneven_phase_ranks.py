"""Collectives while a rank has run out of data; kept apart because every rank imports it."""

import os
import stat
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from lightning_ddp_ext.errors import RankJoinedError
from lightning_ddp_ext.join.active_ranks import ActiveRankCollectives

ACTIVE = (0, 2)  # of three ranks
CASES: dict[str, Callable[[int], Any]] = {}
ABSENT: set[str] = set()  # cases of functions that the installed torch lacks


def case(function: Callable[[int], Any]) -> Callable[[int], Any]:
    CASES[function.__name__] = function
    return function


def case_if(is_available: bool) -> Callable[[Callable[[int], Any]], Callable[[int], Any]]:
    """Register a case only if the installed torch has what it calls."""

    def register(function: Callable[[int], Any]) -> Callable[[int], Any]:
        if is_available:
            return case(function)
        ABSENT.add(function.__name__)
        return function

    return register


def of(rank: int, *shape: int) -> Tensor:
    return torch.full(shape, rank + 1.0)


@case
def all_reduce(rank: int) -> Any:
    value = of(rank)
    dist.all_reduce(value)
    return value.item()


@case
def all_reduce_of_the_largest(rank: int) -> Any:
    value = -of(rank)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


@case
def all_reduce_async(rank: int) -> Any:
    value = of(rank)
    dist.all_reduce(value, async_op=True).wait()
    return value.item()


@case
def all_reduce_in_a_thread(rank: int) -> Any:
    value = of(rank)
    thread = threading.Thread(target=dist.all_reduce, args=(value,))
    thread.start()
    thread.join()
    return value.item()


@case
def all_reduce_of_a_group_kept_from_before(rank: int) -> Any:
    value = of(rank)
    dist.all_reduce(value, group=_KEPT["world"])
    return value.item()


@case
def all_reduce_of_another_group_of_all(rank: int) -> Any:
    value = of(rank)
    dist.all_reduce(value, group=_KEPT["all"])
    return value.item()


@case
def all_reduce_of_some_that_are_active(rank: int) -> Any:
    value = of(rank)
    dist.all_reduce(value, group=_KEPT["ends"])
    return value.item()


@case
def all_reduce_coalesced(rank: int) -> Any:
    values = [of(rank), -of(rank)]
    dist.all_reduce_coalesced(values)
    return [value.item() for value in values]


@case
def all_gather(rank: int) -> Any:
    parts = [torch.ones(2) for _ in range(3)]
    dist.all_gather(parts, of(rank, 2))
    return [part.tolist() for part in parts]


@case_if(hasattr(dist, "all_gather_single"))
def all_gather_single(rank: int) -> Any:
    output = torch.ones(3, 2)
    dist.all_gather_single(output, of(rank, 1, 2))
    return output.tolist()


@case
def all_gather_into_tensor(rank: int) -> Any:
    output = torch.ones(3, 2)
    dist.all_gather_into_tensor(output, of(rank, 1, 2))
    return output.tolist()


@case
def all_gather_object(rank: int) -> Any:
    objects: list[Any] = [0] * 3
    dist.all_gather_object(objects, {"rank": rank})
    return objects


@case
def broadcast(rank: int) -> Any:
    value = of(rank)
    dist.broadcast(value, 2)
    return value.item()


@case
def broadcast_object(rank: int) -> Any:
    objects = [{"rank": rank}]
    dist.broadcast_object_list(objects, src=2)
    return objects


@case
def reduce(rank: int) -> Any:
    value = of(rank)
    dist.reduce(value, dst=2)
    return value.item() if rank == 2 else None


@case
def reduce_to_the_joined_rank(rank: int) -> Any:
    value = of(rank)
    dist.reduce(value, dst=1)
    return value.item()


@case
def gather(rank: int) -> Any:
    parts = [torch.ones(1) for _ in range(3)] if rank == 2 else None
    dist.gather(of(rank, 1), parts, dst=2)
    return parts and [part.item() for part in parts]


@case
def gather_to_the_joined_rank(rank: int) -> Any:
    dist.gather(of(rank, 1), None, dst=1)
    return "passed"


@case
def gather_object(rank: int) -> Any:
    objects: list[Any] | None = [0] * 3 if rank == 2 else None
    dist.gather_object({"rank": rank}, objects, dst=2)
    return objects


@case
def scatter(rank: int) -> Any:
    value = torch.zeros(1)
    dist.scatter(value, [of(other, 1) for other in range(3)] if rank == 2 else None, src=2)
    return value.item()


@case
def scatter_object(rank: int) -> Any:
    received: list[Any] = [None]
    dist.scatter_object_list(received, [{"for": other} for other in range(3)] if rank == 2 else None, src=2)
    return received


@case
def reduce_scatter(rank: int) -> Any:
    value = torch.zeros(2)
    dist.reduce_scatter(value, [of(rank, 2) * 10**other for other in range(3)])
    return value.tolist()


@case_if(hasattr(dist, "reduce_scatter_single"))
def reduce_scatter_single(rank: int) -> Any:
    value = torch.zeros(2)
    dist.reduce_scatter_single(value, torch.cat([of(rank, 2) * 10**other for other in range(3)]))
    return value.tolist()


@case
def reduce_scatter_tensor(rank: int) -> Any:
    value = torch.zeros(2)
    dist.reduce_scatter_tensor(value, torch.cat([of(rank, 2) * 10**other for other in range(3)]))
    return value.tolist()


@case_if(torch.__version__ >= (2, 12))  # gloo of torch 2.11 has none
def all_to_all(rank: int) -> Any:
    outputs = [torch.ones(1) for _ in range(3)]
    dist.all_to_all(outputs, [of(rank, 1) * 10**other for other in range(3)])
    return [output.item() for output in outputs]


@case
def all_to_all_single(rank: int) -> Any:
    output = torch.ones(3)
    dist.all_to_all_single(output, of(rank, 3) * torch.tensor([1.0, 10.0, 100.0]))
    return output.tolist()


@case
def barrier(rank: int) -> Any:
    dist.barrier()
    return "passed"


@case
def send_and_receive(rank: int) -> Any:
    value = of(rank, 1)
    dist.send(value, 2) if rank == 0 else dist.recv(value, 0)
    return value.item()


@case
def send_and_receive_later(rank: int) -> Any:
    value = of(rank, 1)
    work = dist.isend(value, 2) if rank == 0 else dist.irecv(value, 0)
    work.wait()
    return value.item()


@case
def receive_from_any_rank(rank: int) -> Any:
    value = of(rank, 1)
    return dist.recv(value) if rank == 2 else dist.send(value, 2)


@case
def send_and_receive_in_a_batch(rank: int) -> Any:
    value = of(rank, 1)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if rank == 0 else dist.irecv, value, 2 - rank)]):
        work.wait()
    return value.item()


@case
def send_and_receive_objects(rank: int) -> Any:
    objects = [{"rank": rank}]
    dist.send_object_list(objects, 2) if rank == 0 else dist.recv_object_list(objects, 0)
    return objects


@case
def monitored_barrier(rank: int) -> Any:
    dist.monitored_barrier()
    return "passed"


@case
def device_mesh(rank: int) -> Any:
    return dist.init_device_mesh("cpu", (3,)).size()


@case
def functional_all_reduce(rank: int) -> Any:
    return (functional.all_reduce(of(rank), "sum", dist.group.WORLD) + 0).item()


@case
def functional_all_reduce_of_a_named_group(rank: int) -> Any:
    return (functional.all_reduce(of(rank), "sum", dist.group.WORLD.group_name) + 0).item()


@case
def functional_all_reduce_of_a_mesh(rank: int) -> Any:
    return (functional.all_reduce(of(rank), "sum", _KEPT["mesh"]) + 0).item()


@case
def gradient_through_all_gather(rank: int) -> Any:
    value = of(rank, 1).requires_grad_()
    parts = differentiable.all_gather(value)
    sum((10**position * part).sum() for position, part in enumerate(parts)).backward()
    return [part.item() for part in parts], value.grad.item()


@case
def collective_in_a_backward_pass(rank: int) -> Any:
    value = of(rank).requires_grad_()
    value.register_hook(lambda gradient: dist.all_reduce(gradient))
    (value * (rank + 1)).backward()
    return value.grad.item()


@case
def broadcast_from_the_joined_rank(rank: int) -> Any:
    return dist.broadcast(of(rank), 1)


@case
def send_to_the_joined_rank(rank: int) -> Any:
    return dist.send(of(rank), 1)


@case
def a_new_group(rank: int) -> Any:
    return dist.new_group()


@case
def new_subgroups(rank: int) -> Any:
    return dist.new_subgroups(group_size=3)


@case
def new_subgroups_by_enumeration(rank: int) -> Any:
    return dist.new_subgroups_by_enumeration([[0, 1, 2]])


@case
def shrink_group(rank: int) -> Any:
    return dist.shrink_group([1])


@case
def split_group(rank: int) -> Any:
    return dist.group.WORLD.split_group([0, 1, 2])  # `dist.split_group` refuses gloo before it calls this


@case
def all_gather_coalesced(rank: int) -> Any:
    return dist.all_gather_coalesced([[of(rank, 1) for _ in range(3)]], [of(rank, 1)])


@case_if(hasattr(dist, "gather_single"))
def gather_single(rank: int) -> Any:
    return dist.gather_single(of(rank, 1), torch.zeros(3) if rank == 2 else None, dst=2)


@case_if(hasattr(dist, "gather_into_tensor"))
def gather_into_tensor(rank: int) -> Any:
    return dist.gather_into_tensor(of(rank, 1), torch.zeros(3) if rank == 2 else None, dst=2)


@case_if(hasattr(dist, "get_backend_impl"))
def get_backend_impl(rank: int) -> Any:
    return dist.get_backend_impl()


@case
def a_group_with_the_joined_rank(rank: int) -> Any:
    return dist.all_reduce(of(rank), group=_KEPT["odd"]) if rank == 0 else "not a member"


@case
def a_collective_that_is_not_known(rank: int) -> Any:
    return dist.group.WORLD.reduce_scatter_tensor_coalesced([of(rank, 1)], [of(rank, 3)])


@case
def a_method_of_a_torch_to_come(rank: int) -> Any:
    return dist.group.WORLD.all_shuffle()


_KEPT: dict[str, Any] = {}


def run_cases() -> tuple[dict[str, Any], float]:
    """Issue each collective on the active ranks; returns results or errors, and a sum over all ranks afterwards."""
    dist.ProcessGroup.all_shuffle = lambda group: "shuffled"  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = dist.new_group()
    _KEPT.update(world=dist.group.WORLD, all=dist.new_group(), ends=dist.new_group([0, 2]), odd=dist.new_group([0, 1]))
    _KEPT["mesh"] = dist.init_device_mesh("cpu", (3,))
    tail = ActiveRankCollectives([own])
    tail.prepare(ACTIVE)
    found = {}
    if rank in ACTIVE:
        for name, function in CASES.items():
            with tail.redirect(ACTIVE):
                try:
                    found[name] = function(rank)
                except RankJoinedError as error:
                    found[name] = str(error)
            dist.barrier(group=tail.group(ACTIVE))
        with tail.redirect(ACTIVE):
            dist.all_reduce(of(rank), group=own)  # the joined rank takes part in this one
    else:
        dist.all_reduce(torch.zeros(()), group=own)
    total = of(rank)
    dist.all_reduce(total)
    return found, total.item()


def use_many_groups() -> tuple[list[float], int]:
    """Prepare each set of ranks in turn, ten times; returns what was reduced here, and how many sockets came."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tail = ActiveRankCollectives([], most_members=4)
    before, most, reduced = count_sockets(), 0, []
    for active in [(0, 1), (0, 2), (1, 2), (0,), (1,), (2,)] * 10:
        tail.prepare(active)
        if rank in active:
            total = of(rank)
            with tail.redirect(active):
                dist.all_reduce(total)
            reduced.append(total.item())
        most = max(most, count_sockets())
    tail.close()
    return reduced, most - before


def count_sockets() -> int:
    descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode) for path in descriptors)


def wait_in_vain() -> None:
    """Control: one rank issues a collective, the other has run out of data."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(()))
    else:
        threading.Event().wait()
