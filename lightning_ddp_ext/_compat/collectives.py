"""Private names of torch behind collectives. Checked on torch 2.13.0; `tests/compat` fails when one moves."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

# The methods of a process group that communicate: all of `torch.distributed` goes through them, whatever the back-end.
COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "_start_coalescing", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "merge_remote_group",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send", "split_group",
)  # fmt: skip

_METHODS = {name: vars(dist.ProcessGroup)[name] for name in COLLECTIVES}


@contextmanager
def replaced_collectives(
    find: Callable[[dist.ProcessGroup, str], Callable[..., Any] | None],
    resolve: Callable[[dist.ProcessGroup], dist.ProcessGroup],
    new_group: Callable[[], None],
) -> Iterator[None]:
    """Replace what process groups do, in every thread, at no cost outside of the block.

    A dispatch mode would slow every operation down and miss the threads of a backward pass on GPUs; a back-end of our
    own would stand between the user and NCCL all the time. Collectives of compiled code are not seen.

    Args:
        find: Maps a process group and the name of a method to what stands in for it, called as
            `stand_in(original, group, *args, **kwargs)`, or to None.
        resolve: Maps the group of a functional collective to the one that is used.
        new_group: Called where a process group is about to be made.
    """
    make_group = c10d._new_group_with_tag
    resolve_group = functional_collectives._resolve_group
    read_object: Callable[..., Any] = c10d._tensor_to_object

    def make(*args: Any, **kwargs: Any) -> Any:
        new_group()
        return make_group(*args, **kwargs)

    def find_group(group: Any, tag: str = "") -> Any:
        resolved = resolve_group(group, tag)
        return resolve(resolved) if isinstance(resolved, dist.ProcessGroup) else resolved

    def read(tensor: Tensor, size: int, group: Any) -> Any:
        # Who has sent nothing has sent None; torch would unpickle what is empty.
        return read_object(tensor, size, group) if size else None

    try:
        for name in COLLECTIVES:
            setattr(dist.ProcessGroup, name, _replaced(name, getattr(dist.ProcessGroup, name), find))
        c10d._new_group_with_tag = make
        functional_collectives._resolve_group = find_group
        c10d._tensor_to_object = read
        yield
    finally:
        for name, method in _METHODS.items():
            setattr(dist.ProcessGroup, name, method)
        c10d._new_group_with_tag = make_group
        functional_collectives._resolve_group = resolve_group
        c10d._tensor_to_object = read_object


def _replaced(
    name: str,
    original: Callable[..., Any],
    find: Callable[[dist.ProcessGroup, str], Callable[..., Any] | None],
) -> Callable[..., Any]:
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        stand_in = find(group, name)
        return original(group, *args, **kwargs) if stand_in is None else stand_in(original, group, *args, **kwargs)

    return method


def cloned_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the store of a process group over a connection of its own; torch's stubs know of no `clone`."""
    store: Any = group.get_group_store()
    cloned: dist.Store = store.clone()
    return cloned


def keeps_store_in_file(store: dist.Store) -> bool:
    """Tell whether a store is a file, below the prefixes; torch has no public way to ask a group's store."""
    return isinstance(_underlying(store), dist.FileStore)


def port_of_store(store: dist.Store) -> int | None:
    """Return the port of a store, below the prefixes; None if it is a file."""
    store = _underlying(store)
    return store.port if isinstance(store, dist.TCPStore) else None


def _underlying(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def abort_groups() -> None:
    """Abort the collectives of NCCL in every process group; torch's own function is private and forgets the groups.

    gloo takes no notice, see `parallel.messages.connections`.
    """
    for group in list(c10d._world.pg_names):
        group.abort()


# What torch says of a connection that is gone or a rank that does not come, beside its own `DistError`. Errors of gloo
# are plain `RuntimeError`s, which begin with a file of its sources.
_LOST = re.compile(
    r"gloo/|Connection (closed|reset) by peer|Broken pipe|Timed out waiting|NCCL|ProcessGroup\w* .*(abort|timed? ?out)"
)


def is_lost_connection(error: BaseException) -> bool:
    """Tell whether an error comes from communication, which means that another rank is what to look at."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_LOST.search(str(error))))
