"""Private names of `torch.distributed`. Checked on torch 2.6 to 2.14."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

# Methods of a process group that need no other rank, or any one rank that sends, as `recv_anysource` does. Every other
# method may need all ranks, including methods that a later version of torch adds.
_LOCAL_METHODS = frozenset({
    "_add_ephemeral_timeout", "_backend_id", "_enable_collectives_timing", "_end_coalescing", "_get_backend",
    "_get_backend_name", "_get_sequence_number_for_group", "_has_hooks", "_id", "_pybind11_conduit_v1_",
    "_register_backend", "_register_on_completion_hook", "_set_default_backend", "_set_group_desc", "_set_group_name",
    "_wait_for_pending_works", "abort", "boxed", "get_group_store", "get_reconfigure_handle", "name", "rank",
    "recv_anysource", "register_abort_hook", "register_post_hook", "register_pre_hook", "set_timeout", "shutdown",
    "size", "unbox", "unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook",
})  # fmt: skip

# Methods under their private names; torch 2.13 has both.
_PUBLIC_NAMES = {"_allgather_base": "all_gather_single", "_reduce_scatter_base": "reduce_scatter_single"}

# Functions that `new_group`, everything built on it, and `shrink_group` of torch 2.9 call before anything else.
_GROUP_MAKERS = tuple(name for name in ("_new_group_with_tag", "_validate_shrink_inputs") if hasattr(c10d, name))


# The functions of `torch.distributed` that tests try in the uneven phase, on every version.
KNOWN_FUNCTIONS = frozenset({
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "breakpoint", "broadcast", "broadcast_object_list", "destroy_process_group", "gather", "gather_into_tensor",
    "gather_object", "gather_single", "get_backend", "get_backend_config", "get_backend_impl",
    "get_default_backend_for_device", "get_global_rank", "get_group_rank", "get_node_local_rank", "get_pg_count",
    "get_process_group_ranks", "get_rank", "get_world_size", "init_device_mesh", "init_process_group", "irecv",
    "is_available", "is_backend_available", "is_gloo_available", "is_initialized", "is_mpi_available",
    "is_nccl_available", "is_torchelastic_launched", "is_ucc_available", "is_xccl_available", "isend",
    "monitored_barrier", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "record_comm", "recv",
    "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
    "register_rendezvous_handler", "rendezvous", "scatter", "scatter_object_list", "send", "send_object_list",
    "set_timeout", "shrink_group", "split_group", "supports_complex",
})  # fmt: skip


@functools.cache
def find_unknown_functions() -> tuple[str, ...]:
    """Return the public functions of `torch.distributed` that a later version of torch has added."""
    public = {name for name, value in vars(dist).items() if type(value) is FunctionType and name[0] != "_"}
    return tuple(sorted(public - KNOWN_FUNCTIONS))


@functools.cache
def find_collectives() -> tuple[str, ...]:
    """Return the methods of a process group that may need other ranks; all of `torch.distributed` calls these."""
    return tuple(
        name
        for name, method in vars(dist.ProcessGroup).items()
        if callable(method)
        and not isinstance(method, type)
        and not name.startswith("__")
        and name not in _LOCAL_METHODS
    )


@contextmanager
def replaced_collectives(
    find: Callable[[dist.ProcessGroup, str], Callable[..., Any] | None],
    resolve: Callable[[dist.ProcessGroup], dist.ProcessGroup],
    new_group: Callable[[], None],
    unknown: Callable[[str], None],
) -> Iterator[None]:
    """Replace methods of process groups, in every thread, without a cost outside of the block.

    `find` maps a group and the public name of a method to a replacement, called as `replacement(original, group, *args,
    **kwargs)`, or to None; `resolve` maps the group of a functional collective to the group to use; `new_group` is
    called before a group is made, and `unknown` before a function of `torch.distributed` that no test has tried.
    Collectives of compiled code are not replaced.
    """
    # A dispatch mode would slow down every operation and miss the threads of a backward pass on GPUs. A backend of our
    # own would stand between the user and NCCL all the time.
    # In torch 2.11 this returns the name of a group, in later versions the group itself if it is at hand.
    resolver = "_resolve_group" if hasattr(functional_collectives, "_resolve_group") else "_resolve_group_name"
    resolve_group = getattr(functional_collectives, resolver)
    read_object: Callable[..., Any] = c10d._tensor_to_object

    def find_group(group: Any, tag: str = "") -> Any:
        resolved = resolve_group(group, tag)
        if isinstance(resolved, str):
            return resolve(_resolve_process_group(cast(Any, resolved))).group_name
        return resolve(resolved) if isinstance(resolved, dist.ProcessGroup) else resolved

    def read(tensor: Tensor, size: int, *args: Any, **kwargs: Any) -> Any:
        # A rank that sends nothing has size 0, for which torch would unpickle an empty buffer.
        return read_object(tensor, size, *args, **kwargs) if size else None

    methods = vars(dist.ProcessGroup)
    replacements: list[tuple[Any, str, Any, Callable[..., Any]]] = [
        (dist.ProcessGroup, name, methods[name], _replaced(name, getattr(dist.ProcessGroup, name), find))
        for name in find_collectives()
    ]
    replacements += [(c10d, name, maker := getattr(c10d, name), _preceded(maker, new_group)) for name in _GROUP_MAKERS]
    replacements.append((functional_collectives, resolver, resolve_group, find_group))
    replacements.append((c10d, "_tensor_to_object", read_object, read))
    for name in find_unknown_functions():
        function = getattr(dist, name)
        replacements.append((dist, name, function, _preceded(function, functools.partial(unknown, name))))
    try:
        for owner, name, _, replacement in replacements:
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original, _ in replacements:
            setattr(owner, name, original)


def _preceded(function: Callable[..., Any], first: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        first()
        return function(*args, **kwargs)

    return call


def _replaced(
    name: str,
    original: Callable[..., Any],
    find: Callable[[dist.ProcessGroup, str], Callable[..., Any] | None],
) -> Callable[..., Any]:
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        stand_in = find(group, _PUBLIC_NAMES.get(name, name))
        return original(group, *args, **kwargs) if stand_in is None else stand_in(original, group, *args, **kwargs)

    return method


def cloned_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the store of a process group over a new connection; torch's stubs lack `clone`."""
    # Process groups of torch 2.10 return their store themselves.
    has_store = hasattr(group, "get_group_store")
    store: Any = group.get_group_store() if has_store else c10d._get_process_group_store(group)
    if hasattr(store, "clone"):
        cloned: dist.Store = store.clone()
        return cloned
    # Stores of torch 2.8 clone themselves; the prefix of a group cannot be read.
    store = _underlying(store)
    if isinstance(store, dist.TCPStore):
        timeout = cast(Any, store).timeout  # torch's stubs lack it
        again = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)
        return dist.PrefixStore(group.group_name, again)
    return dist.PrefixStore(group.group_name, dist.FileStore(store.path))


def keeps_store_in_file(store: dist.Store) -> bool:
    """Return True if a store, without its prefixes, is a file."""
    return isinstance(_underlying(store), dist.FileStore)


def port_of_store(store: dist.Store) -> int | None:
    """Return the port of a store, without its prefixes; None for a file."""
    store = _underlying(store)
    return store.port if isinstance(store, dist.TCPStore) else None


def _underlying(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def count_collectives(device: torch.device, own: dist.ProcessGroup) -> int | None:
    """Return the number of collectives for a kind of device, but for one group; None if a backend does not count."""
    number = 0
    for group in c10d._world.pg_names:
        if group is not own and device.type in dist.get_backend_config(group):
            try:
                backend: Any = group._get_backend(device)  # torch's stubs lack the method
                number += backend._get_sequence_number_for_group()
            except RuntimeError:
                return None
    return number


def abort_groups() -> None:
    """Abort the collectives of every process group, as NCCL can; gloo cannot, see `distributed.connections`."""
    # torch's own function is private and forgets the groups.
    for group in list(c10d._world.pg_names):
        for entry in dist.get_backend_config(group).split(","):
            with suppress(AttributeError, RuntimeError):  # the backend cannot, or was never used
                backend: Any = group._get_backend(torch.device(entry.partition(":")[0]))
                backend.abort()


# Messages about a lost connection or a missing rank that torch raises as plain `RuntimeError`. Messages of gloo begin
# with the path of a source file.
_LOST = re.compile(
    r"gloo/|Connection (closed|reset) by peer|Broken pipe|Timed out waiting|NCCL|ProcessGroup\w* .*(abort|timed? ?out)"
)


def is_lost_connection(error: BaseException) -> bool:
    """Return True if an error comes from communication, so that the cause is on another rank."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_LOST.search(str(error))))
