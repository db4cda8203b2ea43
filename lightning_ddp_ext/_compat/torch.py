"""Private names of torch's tensors, modules and data loaders, and comparisons of values with them.

Checked on torch 2.6 to 2.14, and torchdata 0.11.0.
"""

import copy
import functools
import importlib
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from typing_extensions import override

# Instance attributes of `nn.Module` that hold the module tree. They differ between replicas.
STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})

# Instance attributes of `nn.Module` that hold the hooks added by `register_*_hook`.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# The base of batch normalisation in every dimension; torch exports only its subclasses.
BatchNorm = _BatchNorm

# The base of every layer with running statistics, including instance normalisation.
Normalisation = _NormBase

_VERSION = attrgetter("_version")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def add_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add many tensors in place in few kernel launches; `torch.optim` relies on the same function."""
    torch._foreach_add_(list(targets), list(sources))


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors in place in few kernel launches; `torch.optim` relies on the same function."""
    torch._foreach_copy_(list(targets), list(sources))


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

    def changed(self, values: Sequence[Any]) -> set[int]:
        """Return the positions of changed values; all positions if there are more or fewer values now."""
        if len(values) != len(self._values):
            return {*range(max(len(values), len(self._values)))}
        versions = versions_of(values)
        if versions == self._versions and -1 not in versions and are_identical(values, self._values):
            return set()
        pairs = enumerate(zip(values, versions, self._values, self._versions, strict=True))
        return {n for n, (new, version, old, before) in pairs if new is not old or version != before or version < 0}


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
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return False
    return all(getattr(type(loader), name).__module__ in _MODULES for name in ("__iter__", "_get_iterator"))


def with_sampler(loader: DataLoader[Any], wrap: Callable[[Any], Any], collate_fn: Callable[[Any], Any]) -> Any:
    """Return a copy of a loader whose indices come from `wrap` of its sampler, with another collate function.

    This is the batch sampler, or the sampler of a loader without one. torch refuses to set either.
    """
    changed = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(changed).update({name: wrap(getattr(loader, name)), "collate_fn": collate_fn, "_iterator": None})
    return changed


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
