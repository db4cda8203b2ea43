"""Private names of torch's tensors, modules, data loaders and collectives, and comparisons of values with them.

Checked on torch 2.6 to 2.15, and torchdata 0.11.0.
"""

import copy
import dis
import functools
import hashlib
import importlib
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ddp_ext.errors import text_of

# Instance attributes of `nn.Module` that hold the module tree. They differ between replicas.
STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})

# Instance attributes of `nn.Module` that hold the hooks added by `register_*_hook`.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# The base of batch normalisation in every dimension; torch exports only its subclasses.
BatchNorm = _BatchNorm

# The base of every layer with running statistics, including instance normalisation.
Normalisation = _NormBase

# Sees each operation of torch in a block, with its results.
OperationMode: Any = TorchDispatchMode

_VERSION = attrgetter("_version")

_WORDS = 1 << 16  # of a block, so that intermediate results stay in the cache of a core
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd number, which tells blocks in another order apart

_Function = TypeVar("_Function", bound=Callable[..., Any])


def add_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add many tensors in place in few kernel launches; `torch.optim` relies on the same function."""
    torch._foreach_add_(list(targets), list(sources))


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors in place in few kernel launches; `torch.optim` relies on the same function."""
    torch._foreach_copy_(list(targets), list(sources))


def copy_mixed_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of several types in place; torch would launch a kernel for each of them if they were in one list."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        own, theirs = groups.setdefault(target.dtype, ([], []))
        own.append(target)
        theirs.append(source)
    for own, theirs in groups.values():
        copy_all_(own, theirs)


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return True if a parameter has hooks of `register_hook` or `register_post_accumulate_grad_hook`."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def parametrization_cache() -> object:
    """Return the cache of `parametrize.cached()`, which becomes a new object when the outermost block ends."""
    return parametrize._cache


def post_accumulate_hooks(parameter: nn.Parameter) -> dict[int, Any]:
    """Return the dictionary of hooks of `register_post_accumulate_grad_hook`, which may be changed in place."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    return hooks


def steps_in_backward(parameter: nn.Parameter) -> bool:
    """Return True if `torch.distributed.optim._apply_optimizer_in_backward` was used on a parameter."""
    return hasattr(parameter, "_in_backward_optimizers")


def is_persistent(module: nn.Module, name: str) -> bool:
    """Return True if a buffer of a module is part of its state dict."""
    return name not in module._non_persistent_buffers_set


def ignore_in_ddp(module: nn.Module, names: Sequence[str]) -> None:
    """Leave further parameters or buffers, by their names relative to the module, to each rank."""
    module._ddp_params_and_buffers_to_ignore = [*ignored_by_ddp(module), *names]  # type: ignore[assignment]


def ignored_by_ddp(module: nn.Module) -> list[str]:
    """Return the names given to DDP's `_set_params_and_buffers_to_ignore_for_model`, relative to the module."""
    return list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def find_ignored(module: nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers that each rank has for itself (`ignored_by_ddp`), such as queues."""
    return frozenset(
        f"{prefix}.{name.strip('.')}".strip(".")
        for prefix, part in module.named_modules()
        for name in ignored_by_ddp(part)
    )


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the elements of tensors of one dtype in one call; a single tensor is not copied."""
    flat: Tensor = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def views_of(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of consecutive parts of a flat tensor, in the shapes of `tensors`, in one call."""
    views: Sequence[Tensor] = torch._utils._unflatten_dense_tensors(flat, tensors)  # type: ignore[no-untyped-call]
    return list(views)


def version_of(tensor: Tensor) -> int:
    """Return a number that every change in place increases; -1 for tensors made in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def versions_of(values: Sequence[Any]) -> list[int]:
    """Return `version_of` each value, 0 for values that are not tensors; fast if all are ordinary tensors."""
    try:
        return [*map(_VERSION, values)]
    except (AttributeError, RuntimeError):
        return [version_of(value) if isinstance(value, Tensor) else 0 for value in values]


def are_identical(values: Collection[Any], others: Collection[Any]) -> bool:
    """Return True if two collections hold the same objects in the same order; fast, because it runs in every step."""
    return len(values) == len(others) and all(map(operator.is_, values, others))


def equal_or_nan(one: Any, other: Any) -> Any:
    """Compare numbers, or tensors or arrays element by element, where nan equals nan."""
    return (one == other) | ((one != one) & (other != other))


class TensorVersions:
    """The versions of values at one time, to find tensors that have been replaced or changed in place since then.

    Tensors made in inference mode have no versions and are always found. Neither `.data` nor the running statistics of
    torch's normalisation layers increase a version.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = list(values)
        self._versions = versions_of(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorVersions) and not self.changed(other._values)

    def changed(self, values: Sequence[Any]) -> set[int]:
        """Return the positions of changed values; all positions if there are more or fewer values now."""
        if len(values) != len(self._values):
            return {*range(max(len(values), len(self._values)))}
        versions = versions_of(values)
        if versions == self._versions and -1 not in versions and are_identical(values, self._values):
            return set()
        pairs = enumerate(zip(values, versions, self._values, self._versions, strict=True))
        return {n for n, (new, version, old, before) in pairs if new is not old or version != before or version < 0}


def bits_of(flat: Tensor) -> Tensor:
    """Return a flat tensor as integers of up to 32 bits, which are equal if all bits are."""
    return flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))


@torch.no_grad()
def checksums(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return an integer on the device of each dense tensor that depends on every bit; the host does not wait.

    Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014), modulo 2^64, of words of
    up to 32 bits: of larger words, products would lose the upper bits.
    """
    sums = []
    for tensor in tensors:
        # A conjugated or negated tensor may have a flag instead of other values in memory.
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        words = bits_of(flat)
        multipliers = _multipliers(flat.device)
        blocks = [words] if words.numel() <= _WORDS else torch.split(words, _WORDS)  # fast if tensors are small
        of_blocks = [(block * multipliers[: block.numel()]).sum() for block in blocks]
        sums.append(functools.reduce(lambda total, one: total * _FACTOR + one, of_blocks))
    return sums


def read_all(numbers: Sequence[Tensor]) -> list[int]:
    """Return the values of tensors without dimensions; the host waits once per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for number in numbers:
        by_device.setdefault(number.device, []).append(number)
    read = {device: iter(torch.stack(own).tolist()) for device, own in by_device.items()}
    return [next(read[number.device]) for number in numbers]


@functools.lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> Tensor:
    """Return an odd multiplier for each word of a block, so that no change of one word is missed."""
    numbers = bytearray(hashlib.shake_128(b"fingerprints of tensors").digest(8 * _WORDS))  # the same in every process
    return torch.frombuffer(numbers, dtype=torch.int64).bitwise_or(1).to(device)


def never_compiled(function: _Function) -> _Function:
    """Apply `torch.compiler.disable`, which has no types."""
    disabled: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` wraps, or the module itself."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def called_attribute(module: nn.Module) -> str:
    """Return the instance attribute that a call of the module runs; `module.compile()` adds one."""
    return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"


def _recompile_setting() -> tuple[Any, str]:
    if hasattr(torch.compiler.config, "recompile_limit"):
        return torch.compiler.config, "recompile_limit"
    return importlib.import_module("torch._dynamo.config"), "cache_size_limit"  # torch 2.6


def recompile_limit() -> int:
    """Return how often torch compiles a function for other arguments."""
    config, name = _recompile_setting()
    limit: int = getattr(config, name)
    return limit


def recompile_limit_of(limit: int) -> AbstractContextManager[None]:
    """Replace `recompile_limit` in a context, in every thread."""
    config, name = _recompile_setting()
    context: AbstractContextManager[None] = config.patch(**{name: limit})
    return context


CountSamples = Callable[[Any, Any, int | None], int | None]

# A loader of another class that overrides `__iter__` or `_get_iterator` may handle batches before the caller does.
_MODULES = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")


class _CountedBatch(NamedTuple):
    """A batch with its number of samples; a named tuple, because torch pins the memory of its fields."""

    batch: Any
    samples: int | None


class _CountingCollate:
    """Adds the number of samples to the batch that a collate function makes; picklable if the function is."""

    def __init__(self, collate: Callable[[Any], Any], count: CountSamples, batch_size: int | None) -> None:
        self._collate = collate
        self._count = count
        self._batch_size = batch_size

    def __call__(self, samples: Any) -> _CountedBatch:
        batch = self._collate(samples)
        return _CountedBatch(batch, self._count(samples, batch, self._batch_size))


class _CountingIterator:
    """Mixin for an iterator of torch that removes the number of samples from each batch."""

    samples: int | None = None

    def _next_data(self) -> Any:
        batch, self.samples = super()._next_data()  # type: ignore[misc]
        return batch


@functools.cache
def _counting_class(kind: type) -> type:
    return type(kind.__name__, (_CountingIterator, kind), {})


def iterate_counting(loader: Any, count: CountSamples) -> Iterator[Any]:
    """Iterate over a loader so that `samples_of` returns the number of samples drawn for each batch.

    `count` gets the argument and the result of the collate function and the batch size of the sampler, in the worker if
    there is one. The number travels with the batch, so it is right for prefetched batches and persistent workers.
    """
    given = vars(loader).get("collate_fn") if has_torchs_iterator(loader) else None
    if given is None:
        return iter(loader)
    batch_size = getattr(loader.batch_sampler, "batch_size", None)
    loader.collate_fn = _CountingCollate(given, count, batch_size)  # iterators read it once
    try:
        batches: Any = iter(loader)
    finally:
        loader.collate_fn = given
    # With persistent workers, the iterator may be an earlier one.
    if isinstance(batches._collate_fn, _CountingCollate) and not isinstance(batches, _CountingIterator):
        batches.__class__ = _counting_class(type(batches))  # type: ignore[arg-type]
    return cast(Iterator[Any], batches)


def samples_of(batches: Iterator[Any]) -> int | None:
    """Return the number of samples drawn for the last batch of an iterator, or None."""
    return batches.samples if isinstance(batches, _CountingIterator) else None


def has_torchs_iterator(loader: Any) -> bool:
    """Return True if a loader collates samples and uses torch's own iterator."""
    return isinstance(loader, DataLoader) and loader.batch_sampler is not None and has_torchs_methods(loader)


def has_torchs_methods(loader: DataLoader[Any], *others: str) -> bool:
    """Return True if the methods that iterate over a loader, and these other ones, are torch's own."""
    names = ("__iter__", "_get_iterator", *others)
    return all(getattr(type(loader), name).__module__ in _MODULES for name in names)


def with_sampler(
    loader: DataLoader[Any], wrap: Callable[[Any], Any], collate_fn: Callable[[Any], Any], dataset: Any = None
) -> Any:
    """Return a copy of a loader whose indices come from `wrap` of its sampler, with another collate function.

    This is the batch sampler, or the sampler of a loader without one. torch refuses to set either, or the dataset.
    """
    changed = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(changed).update({name: wrap(getattr(loader, name)), "collate_fn": collate_fn, "_iterator": None})
    if dataset is None and getattr(loader.dataset, "__getitems__", None):
        dataset = DatasetProxy(loader.dataset)
    vars(changed).update(dataset=loader.dataset if dataset is None else dataset)
    return changed


class DatasetProxy:
    """A dataset with `__getitems__`, which torch would call for a batch without samples too."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # not set yet, while the object is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: Any) -> Any:
        return self._dataset.__getitems__(indices) if len(indices) else []


class _RandomNumberWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and (kwargs or {}).get("generator") is None:
            self._before()
        return func(*args, **(kwargs or {}))


def before_random_numbers(function: Callable[[], None]) -> AbstractContextManager[Any]:
    """Call a function before each use of torch's default generators in this thread."""
    watch: AbstractContextManager[Any] = _RandomNumberWatch(function)
    return watch


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
) -> Iterator[None]:
    """Replace methods of process groups, in every thread, without a cost outside of the block.

    `find` maps a group and the public name of a method to a replacement, called as `replacement(original, group, *args,
    **kwargs)`, or to None; `resolve` maps the group of a functional collective to the group to use; `new_group` is
    called before a group is made. Collectives of compiled code are not replaced.
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
    """Abort the collectives of every process group, as NCCL can; gloo cannot, see `distributed.backends`."""
    # torch's own function is private and forgets the groups.
    for group in list(c10d._world.pg_names):
        for entry in dist.get_backend_config(group).split(","):
            with suppress(AttributeError, RuntimeError):  # the backend cannot, or was never used
                backend: Any = group._get_backend(torch.device(entry.partition(":")[0]))
                backend.abort()


# Messages about a lost connection or a missing rank that torch raises as plain `RuntimeError`. Messages of gloo contain
# the path of a source file.
_LOST = re.compile(r"gloo/|monitoredBarrier|NCCL|ProcessGroup\w* .*(abort|timed? ?out)")
_RAISE = dis.opmap["RAISE_VARARGS"]


def is_lost_connection(error: BaseException) -> bool:
    """Return True if an error, or one that led to it, comes from communication, so that the cause is on another rank.

    Only native code and `torch.distributed` raise these; what a `raise` in other Python code says is its own error.
    """
    origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if origin is not None and is_lost_connection(origin):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, RuntimeError):
        return False
    is_raised = trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE
    if is_raised and not str(trace.tb_frame.f_globals.get("__name__")).startswith("torch.distributed"):
        return False
    return isinstance(error, dist.DistError) or bool(_LOST.search(text_of(error)))
