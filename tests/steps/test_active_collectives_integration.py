"""Collectives of a step run on the ranks that have data. One launch for all."""

import threading
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from lightning_ddp_ext.distributed.exchange import scatter_objects
from lightning_ddp_ext.errors import RankJoinedError
from lightning_ddp_ext.steps.active_collectives import ActiveRankCollectives
from tests.support.processes import run_processes

ACTIVE = (0, 2)  # of three ranks, which give 1 and 3; rank 1 has run out of data
GROUPS: dict[str, Any] = {}
POWERS = torch.tensor([1.0, 10.0, 100.0])


def of(rank: int, *shape: int) -> Tensor:
    return torch.full(shape, rank + 1.0)


def parts(rank: int, *shape: int) -> list[Tensor]:
    """For rank r the r-th power of ten times the number of this rank."""
    return [of(rank, *shape) * 10**other for other in range(3)]


def outputs(number: int) -> list[Tensor]:
    return [torch.ones(number) for _ in range(3)]


def after(collective: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the first argument of a collective after the call, as lists."""
    collective(value, *args, **kwargs)
    return [part.tolist() if isinstance(part, Tensor) else part for part in value] if type(value) is list else value


def in_a_thread(value: Tensor) -> None:
    thread = threading.Thread(target=dist.all_reduce, args=(value,))
    thread.start()
    thread.join()


def sent(rank: int, send: Callable[..., Any], receive: Callable[..., Any], value: Any) -> Any:
    """Send a value from rank 0 to rank 2."""
    work = send(value, 2) if rank == 0 else receive(value, 0)
    if hasattr(work, "wait"):
        work.wait()
    return value


def sent_in_a_batch(rank: int, value: Tensor) -> Tensor:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if rank == 0 else dist.irecv, value, 2 - rank)]):
        work.wait()
    return value


def gathered(gather: Callable[..., Any], rank: int, value: Any, own: list[Any], dst: int) -> Any:
    received = own if rank == dst else None
    gather(value, received, dst=dst)
    return received and [part.item() if isinstance(part, Tensor) else part for part in received]


def gradient_through_all_gather(rank: int) -> Any:
    value = of(rank, 1).requires_grad_()
    received = differentiable.all_gather(value)
    sum((10**position * part).sum() for position, part in enumerate(received)).backward()
    return [part.item() for part in received], value.grad.item()


def collective_in_a_backward_pass(rank: int) -> Any:
    value = of(rank).requires_grad_()
    value.register_hook(lambda gradient: dist.all_reduce(gradient))
    (value * (rank + 1)).backward()
    return value.grad


ROWS = ([[1, 1], [0, 0], [3, 3]],) * 2
OBJECTS = [{"rank": 0}, None, {"rank": 2}]
# The collective, and its results on ranks 0 and 2.
CASES: dict[str, tuple[Callable[[int], Any], tuple[Any, Any]]] = {
    "all_reduce": (lambda rank: after(dist.all_reduce, of(rank)), (4, 4)),
    "a function of a later torch": (lambda rank: dist.all_shuffle(of(rank)), (4, 4)),
    "largest": (lambda rank: after(dist.all_reduce, -of(rank), dist.ReduceOp.MAX), (-1, -1)),
    "async": (lambda rank: after(lambda value: dist.all_reduce(value, async_op=True).wait(), of(rank)), (4, 4)),
    "in a thread": (lambda rank: after(in_a_thread, of(rank)), (4, 4)),
    "group from before": (lambda rank: after(dist.all_reduce, of(rank), group=GROUPS["world"]), (4, 4)),
    "another group of all": (lambda rank: after(dist.all_reduce, of(rank), group=GROUPS["all"]), (4, 4)),
    "group of active ranks": (lambda rank: after(dist.all_reduce, of(rank), group=GROUPS["ends"]), (4, 4)),
    "coalesced": (lambda rank: after(dist.all_reduce_coalesced, [of(rank), -of(rank)]), ([4, -4], [4, -4])),
    "all_gather": (lambda rank: after(dist.all_gather, outputs(2), of(rank, 2)), ROWS),
    "all_gather_single": (lambda rank: after(dist.all_gather_single, torch.ones(3, 2), of(rank, 1, 2)), ROWS),
    "into tensor": (lambda rank: after(dist.all_gather_into_tensor, torch.ones(3, 2), of(rank, 1, 2)), ROWS),
    "all_gather_object": (lambda rank: after(dist.all_gather_object, [0] * 3, {"rank": rank}), (OBJECTS, OBJECTS)),
    "broadcast": (lambda rank: after(dist.broadcast, of(rank), 2), (3, 3)),
    "broadcast objects": (lambda rank: after(dist.broadcast_object_list, [rank], src=2), ([2], [2])),
    "reduce": (lambda rank: after(dist.reduce, of(rank), dst=2) if rank == 2 else dist.reduce(of(rank), 2), (None, 4)),
    "reduce to joined": (lambda rank: after(dist.reduce, of(rank), dst=1), (1, 3)),
    "gather": (lambda rank: gathered(dist.gather, rank, of(rank, 1), outputs(1), 2), (None, [1, 0, 3])),
    "gather to joined": (lambda rank: gathered(dist.gather, rank, of(rank, 1), outputs(1), 1), (None, None)),
    "gather objects": (
        lambda rank: gathered(dist.gather_object, rank, {"rank": rank}, [0] * 3, 2), (None, OBJECTS),
    ),
    "scatter": (lambda rank: after(dist.scatter, torch.zeros(1), parts(0, 1) if rank == 2 else None, 2), ([1], [100])),
    "scatter objects": (
        lambda rank: after(dist.scatter_object_list, [None], [5, 6, 7] if rank == 2 else None, 2), ([5], [7]),
    ),
    "our scatter of objects": (lambda rank: scatter_objects([5, 6, "7"] if rank == 2 else None, 2), (5, "7")),
    "reduce_scatter": (lambda rank: after(dist.reduce_scatter, torch.zeros(2), parts(rank, 2)), ([4, 4], [400, 400])),
    "reduce_scatter_single": (
        lambda rank: after(dist.reduce_scatter_single, torch.zeros(2), torch.cat(parts(rank, 2))),
        ([4, 4], [400, 400]),
    ),
    "reduce_scatter_tensor": (
        lambda rank: after(dist.reduce_scatter_tensor, torch.zeros(2), torch.cat(parts(rank, 2))),
        ([4, 4], [400, 400]),
    ),
    "all_to_all": (
        lambda rank: after(dist.all_to_all, outputs(1), parts(rank, 1)), ([[1], [0], [3]], [[100], [0], [300]]),
    ),
    "all_to_all_single": (
        lambda rank: after(dist.all_to_all_single, torch.ones(3), of(rank, 3) * POWERS), ([1, 0, 3], [100, 0, 300]),
    ),
    "barrier": (lambda rank: dist.barrier(), (None, None)),
    "monitored_barrier": (lambda rank: dist.monitored_barrier(), (None, None)),
    "send": (lambda rank: sent(rank, dist.send, dist.recv, of(rank)), (1, 1)),
    "send later": (lambda rank: sent(rank, dist.isend, dist.irecv, of(rank)), (1, 1)),
    "send in a batch": (lambda rank: sent_in_a_batch(rank, of(rank)), (1, 1)),
    "send objects": (lambda rank: sent(rank, dist.send_object_list, dist.recv_object_list, [rank]), ([0], [0])),
    "from any rank": (lambda rank: dist.recv(of(rank)) if rank == 2 else dist.send(of(rank), 2), (None, 0)),
    "device mesh": (lambda rank: dist.init_device_mesh("cpu", (3,)).size(), (3, 3)),
    "functional": (lambda rank: functional.all_reduce(of(rank), "sum", dist.group.WORLD) + 0, (4, 4)),
    "functional, by name": (
        lambda rank: functional.all_reduce(of(rank), "sum", dist.group.WORLD.group_name) + 0, (4, 4),
    ),
    "functional, of a mesh": (lambda rank: functional.all_reduce(of(rank), "sum", GROUPS["mesh"]) + 0, (4, 4)),
    "gradient through all_gather": (gradient_through_all_gather, (([1, 0, 3], 2), ([1, 0, 3], 200))),
    "collective in a backward pass": (collective_in_a_backward_pass, (4, 4)),
}  # fmt: skip
# The collective, and a part of the error on both active ranks.
REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "broadcast": (lambda rank: dist.broadcast(of(rank), 1), "sends from rank 1, but rank 1 has run out of data"),
    "send": (
        lambda rank: dist.send(of(rank), 1),
        "a message to or from rank 1 cannot arrive, but rank 1 has run out of data",
    ),
    "new_group": (lambda rank: dist.new_group(), "a new process group needs every rank"),
    "new_subgroups": (lambda rank: dist.new_subgroups(group_size=3), "a new process group needs every rank"),
    "by enumeration": (
        lambda rank: dist.new_subgroups_by_enumeration([[0, 1, 2]]), "a new process group needs every rank",
    ),
    "shrink_group": (lambda rank: dist.shrink_group([1]), "a new process group needs every rank"),
    # `dist.split_group` refuses gloo before it calls this.
    "split_group": (lambda rank: dist.group.WORLD.split_group([0, 1, 2]), "`ProcessGroup.split_group` is not known to"),
    "all_gather_coalesced": (
        lambda rank: dist.all_gather_coalesced([outputs(1)], [of(rank, 1)]), "`ProcessGroup.allgather_coalesced`",
    ),
    "gather_single": (
        lambda rank: dist.gather_single(of(rank, 1), torch.zeros(3) if rank == 2 else None, dst=2), "gather_single` is",
    ),
    "gather_into_tensor": (
        lambda rank: dist.gather_into_tensor(of(rank, 1), torch.zeros(3) if rank == 2 else None, dst=2),
        "`ProcessGroup.gather_single` is not known",
    ),
    "get_backend_impl": (lambda rank: dist.get_backend_impl(), "`ProcessGroup.get_backend` is not known"),
    "unknown": (
        lambda rank: dist.group.WORLD.reduce_scatter_tensor_coalesced([of(rank, 1)], [of(rank, 3)]),
        "`ProcessGroup.reduce_scatter_tensor_coalesced` is not known",
    ),
    "a method of a later torch": (
        lambda rank: dist.group.WORLD.all_shuffle(), "`ProcessGroup.all_shuffle` is not known",
    ),
}  # fmt: skip
# Cases of functions that the installed torch lacks. On a machine with CUDA, a mesh over a group of gloo gets a group of
# its own.
UNSUPPORTED = "the backend has no such collective"  # gloo before torch 2.12
NEWER = {
    "all_gather_single": dist, "reduce_scatter_single": dist, "gather_single": dist, "gather_into_tensor": dist,
    "get_backend_impl": dist, "shrink_group": dist, "split_group": dist.ProcessGroup,
}  # fmt: skip
ABSENT = {name for name, owner in NEWER.items() if not hasattr(owner, name)}
ABSENT |= {"device mesh"} if torch.cuda.is_available() else set()
# Public functions of `torch.distributed` that need no other rank, or are no part of a step.
LOCAL = {
    "breakpoint", "destroy_process_group", "get_backend", "get_backend_config", "get_default_backend_for_device",
    "get_global_rank", "get_group_rank", "get_node_local_rank", "get_pg_count", "get_process_group_ranks", "get_rank",
    "get_world_size", "init_process_group", "is_available", "is_backend_available", "is_gloo_available",
    "is_initialized", "is_mpi_available", "is_nccl_available", "is_torchelastic_launched", "is_ucc_available",
    "is_xccl_available", "record_comm", "register_rendezvous_handler", "rendezvous", "set_timeout", "supports_complex",
}  # fmt: skip


def run_cases() -> tuple[list[dict[str, Any]], tuple[float, float], tuple[list[float], int, int]]:
    """Run each case on the active ranks; returns results and errors, and sums over all ranks and groups afterwards."""
    dist.ProcessGroup.all_shuffle = lambda group: "shuffled"  # type: ignore[attr-defined]
    dist.all_shuffle = lambda value: after(dist.all_reduce, value)  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = dist.new_group()
    GROUPS.update(world=dist.group.WORLD, all=dist.new_group(), ends=dist.new_group([0, 2]), odd=dist.new_group([0, 1]))
    GROUPS["mesh"] = dist.init_device_mesh("cpu", (3,))
    collectives = ActiveRankCollectives(own)
    collectives.prepare(ACTIVE, torch.nn.Module())
    found: list[dict[str, Any]] = []
    if rank in ACTIVE:
        odd = {"odd group": (lambda rank: rank or dist.all_reduce(of(rank), group=GROUPS["odd"]), "")}
        for cases in (CASES, REFUSED, odd):
            found.append({})
            for name in sorted(cases.keys() - ABSENT):
                with collectives.redirect():
                    try:
                        value = cases[name][0](rank)
                        found[-1][name] = value.tolist() if isinstance(value, Tensor) else value
                    except RankJoinedError as error:
                        found[-1][name] = str(error)
                    except RuntimeError as error:  # the backend's own, with and without a joined rank
                        if "does not support" not in str(error):
                            raise
                        found[-1][name] = UNSUPPORTED
                dist.barrier(group=collectives._group)
        with collectives.redirect():
            dist.all_reduce(of(rank), group=own)  # the joined rank takes part in this one
    else:
        dist.all_reduce(torch.zeros(()), group=own)
    totals = after(dist.all_reduce, of(rank)).item(), dist.all_shuffle(of(rank)).item()
    return found, totals, use_many_groups(rank)


@pytest.fixture(scope="module")
def found():
    return run_processes(run_cases, 3, timeout=60)


def test_collectives_run_on_the_active_ranks(found):
    results = {name: (found[0][0][0][name], found[2][0][0][name]) for name in CASES.keys() - ABSENT}
    unsupported = {name for name, result in results.items() if result == (UNSUPPORTED, UNSUPPORTED)}
    assert unsupported == set() or torch.__version__ < (2, 12)
    for name in results.keys() - unsupported:
        assert (name, results[name]) == (name, CASES[name][1])


def test_a_collective_that_needs_a_joined_rank_raises_on_every_active_rank(found):
    for rank in ACTIVE:
        for name in REFUSED.keys() - ABSENT:
            error = found[rank][0][1][name]
            assert error.startswith(f"rank {rank}: "), name
            assert REFUSED[name][1] in error, name
    assert "a process group of ranks 0, 1 has only some of the active ranks" in found[0][0][2]["odd group"]
    assert found[2][0][2]["odd group"] == 2


def test_without_redirection_the_same_collective_is_among_all_ranks(found):
    assert [totals for _, totals, _ in found] == [(6, 6)] * 3


def test_every_public_function_of_torch_has_a_case_or_needs_no_other_rank():
    public = {name for name, value in vars(dist).items() if type(value) is FunctionType and not name.startswith("_")}
    functions = [function for function, _ in (*CASES.values(), *REFUSED.values())]
    called = {name for function in (*functions, sent_in_a_batch) for name in names_in(function.__code__)}
    assert len(public) > 50
    assert public - called - ABSENT - LOCAL == set()


def names_in(code: Any) -> set[str]:
    nested = [names_in(constant) for constant in code.co_consts if hasattr(constant, "co_names")]
    return set(code.co_names).union(*nested)


def use_many_groups(rank: int) -> tuple[list[float], int, int]:
    """Prepare sets of ranks in turn as on a device; returns sums, the most groups at a time, and waits for a device."""
    waits: list[torch.device] = []
    torch.accelerator.synchronize = waits.append  # type: ignore[assignment]
    collectives = ActiveRankCollectives(dist.new_group(), device=torch.device("meta"))
    groups = dist.distributed_c10d._world.pg_names
    before, most, reduced = len(groups), 0, []
    for active in [(0, 1), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)] * 5:
        collectives.prepare(active, torch.nn.Module())
        most = max(most, len(groups) - before)
        if rank in active:
            with collectives.redirect():
                reduced.append(after(dist.all_reduce, of(rank)).item())
    collectives.close()
    return reduced, most, len(waits)


def test_one_further_group_exists_at_a_time_and_is_made_when_the_device_is_idle(found):
    groups = [of_rank for _, _, of_rank in found]
    assert [reduced for reduced, _, _ in groups] == [[3, 3, 4, 1] * 5, [3, 3, 5, 2] * 5, [4, 5, 3] * 5]
    assert [numbers for _, *numbers in groups] == [[1, 6 * 5]] * 3
