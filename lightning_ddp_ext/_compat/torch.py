"""Private names of torch's `DataLoader`, each with its reason. Checked on torch 2.13.0 and torchdata 0.11.0.

    DataLoader._get_iterator   a class that overrides it may look at batches before the caller does
    _BaseDataLoaderIter        what `iter(loader)` returns, also of torchdata's loader
      _collate_fn              what it hands samples to, here or in workers
      _next_data               returns the next batch as workers have sent it, and memory has been pinned

`tests/compat` fails when one moves.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

# Instance attributes of `nn.Module` that hold the module tree rather than the user's attributes. A replica has its own.
STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})

# Instance attributes of `nn.Module` that hold the hooks which `register_*_hook` has added.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# The base of batch normalisation of every dimension; torch exports only the classes below it.
BatchNorm = _BatchNorm

# The base of every layer with running statistics, those of instances among them.
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
    """Tell whether `register_hook` or `register_post_accumulate_grad_hook` was used; torch has no public question."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def parametrization_cache() -> object:
    """Return the cache of `parametrize.cached()`; the end of its outermost use in the process puts a new one there."""
    return parametrize._cache


def post_accumulate_hooks(parameter: nn.Parameter) -> dict[int, Any]:
    """Return what `register_post_accumulate_grad_hook` has added, to be changed in place; torch has no public list."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    return hooks


def steps_in_backward(parameter: nn.Parameter) -> bool:
    """Tell whether `torch.distributed.optim._apply_optimizer_in_backward` was used; it leaves this mark."""
    return hasattr(parameter, "_in_backward_optimizers")


def ignored_by_ddp(module: nn.Module) -> list[str]:
    """Return what `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` was told for a module.

    It is the only way to tell torch's own data parallelism to leave something out, and people's models use it; names
    are relative to the module, those of the module itself with a leading dot or without.
    """
    return list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of one type in a row, all in one call from Python; a single one is not copied."""
    flat: Tensor = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def views_of(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """View consecutive parts of a flat tensor in the shapes of others, all in one call from Python."""
    views: Sequence[Tensor] = torch._utils._unflatten_dense_tensors(flat, tensors)  # type: ignore[no-untyped-call]
    return list(views)


def version_of(tensor: Tensor) -> int:
    """Return a number that every change in place increases; tensors made in inference mode have none."""
    return -1 if tensor.is_inference() else tensor._version


def versions_of(values: Sequence[Any]) -> list[int]:
    """Return `version_of` each tensor, in one call where all of them are ordinary ones; 0 for what is no tensor."""
    try:
        return [*map(_VERSION, values)]
    except (AttributeError, RuntimeError):
        return [version_of(value) if isinstance(value, Tensor) else 0 for value in values]


def never_compiled(function: _Function) -> _Function:
    """Run a function as it is when compiled code calls it; `torch.compiler.disable` says so too, without types."""
    disabled: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` wraps, or the module itself; torch has no public way back."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def called_attribute(module: nn.Module) -> str:
    """Name the instance attribute that a call of a module runs: `module.compile()` puts another before `forward`."""
    return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"


CountSamples = Callable[[Any, Any, int | None], int | None]

_MODULES = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")


class _CountedBatch(NamedTuple):
    """A batch on its way from a worker; torch pins the memory of both fields of a named tuple."""

    batch: Any
    samples: int | None


class _CountingCollate:
    """Adds the number of samples to the batch that a collate function makes of them; picklable if the function is."""

    def __init__(self, collate: Callable[[Any], Any], count: CountSamples, batch_size: int | None) -> None:
        self._collate = collate
        self._count = count
        self._batch_size = batch_size

    def __call__(self, samples: Any) -> _CountedBatch:
        batch = self._collate(samples)
        return _CountedBatch(batch, self._count(samples, batch, self._batch_size))


class _CountingIterator:
    """Mixed into an iterator of torch: takes the number of samples off each batch."""

    samples: int | None = None

    def _next_data(self) -> Any:
        batch, self.samples = super()._next_data()  # type: ignore[misc]
        return batch


@functools.cache
def _counting_class(kind: type) -> type:
    return type(kind.__name__, (_CountingIterator, kind), {})


def iterate_counting(loader: Any, count: CountSamples) -> Iterator[Any]:
    """Iterate over a loader so that `samples_of` knows how many samples were drawn for each batch.

    The count comes from the place where samples are handed to the collate function, in a worker if there are any, and
    travels with the batch. It is therefore right in any order, with workers that persist and batches fetched ahead.

    Args:
        loader: The loader.
        count: Picklable function that counts samples, from the argument and the result of the collate function and the
            size of the sampler's batches; None if it cannot.
    """
    given = vars(loader).get("collate_fn") if _has_torchs_iterator(loader) else None
    if given is None:
        return iter(loader)
    batch_size = getattr(loader.batch_sampler, "batch_size", None)
    loader.collate_fn = _CountingCollate(given, count, batch_size)  # read when an iterator is made, and never again
    try:
        batches: Any = iter(loader)
    finally:
        loader.collate_fn = given
    # Workers that persist keep their iterator, which may be from before.
    if isinstance(batches._collate_fn, _CountingCollate) and not isinstance(batches, _CountingIterator):
        batches.__class__ = _counting_class(type(batches))  # type: ignore[arg-type]
    return cast(Iterator[Any], batches)


def samples_of(batches: Iterator[Any]) -> int | None:
    """Return how many samples were drawn for the last batch of an iterator; None if that is not known."""
    return batches.samples if isinstance(batches, _CountingIterator) else None


def _has_torchs_iterator(loader: Any) -> bool:
    """Return True if a loader collates samples, and torch's own iterator hands batches to the caller."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return False
    return all(getattr(type(loader), name).__module__ in _MODULES for name in ("__iter__", "_get_iterator"))
