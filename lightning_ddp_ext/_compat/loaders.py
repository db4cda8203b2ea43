"""Private names of the data that Lightning's loops run on, each with its reason; see `_compat.lightning`.

Private methods of `CombinedLoader` that are overridden: `_state_dicts` and `_load_state_dicts`, which the training loop
calls to save and load its position.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler


class _GivenBatchSampler(BatchSampler):
    """A batch sampler that Lightning makes anew with another sampler, because it is not torch's class itself."""


def keep_batch_samplers(trainer: Trainer, preparing: Callable[[], AbstractContextManager[None]]) -> None:
    """Let loaders that were given a batch sampler keep the size of their batches and the sampler inside.

    Lightning 2.6.6 makes such a loader anew. If the batch sampler is one of torch's class itself, it puts a sampler in
    its place, so that a batch is one sample. And it does not look for a sampler in any batch sampler: a user's
    `DistributedSampler` there is replaced, and what a weighted one would draw is not.

    Args:
        trainer: The Trainer.
        preparing: Makes a context that is put around Lightning's own work on a loader.
    """
    replace_preparation(trainer, _show_samplers, preparing)


def _show_samplers(loader: DataLoader[Any]) -> DataLoader[Any]:
    given: Any = loader.batch_sampler
    if given is None or loader.batch_size is not None:  # which torch makes from the size
        return loader
    shown = copy.copy(loader)  # torch refuses to set what follows
    if getattr(given, "sampler", None) is not None:
        vars(shown)["sampler"] = given.sampler
    if type(given) is BatchSampler:
        given = vars(shown)["batch_sampler"] = copy.copy(given)
        given.__class__ = _GivenBatchSampler
    return shown


def is_list_of_batches(trainer: Trainer, batch: Any) -> bool:
    """Tell whether a batch is a list with one batch of each of several loaders, rather than a list of samples."""
    loop = trainer._active_loop
    combined = None if loop is None else loop._combined_loader
    return (
        combined is not None
        and combined._mode != "sequential"
        and isinstance(combined.iterables, list | tuple)
        and type(batch) is type(combined.iterables)
        and len(batch) == len(combined.iterables)
    )


def training_loader(trainer: Trainer) -> CombinedLoader | None:
    """Return the loader of the training loop; `trainer.train_dataloader` is only what it combines."""
    return trainer.fit_loop._combined_loader


def has_state(loader: object) -> bool:
    """Tell whether Lightning saves and loads the state of a loader."""
    return isinstance(loader, _Stateful)


def combination_mode(combined: CombinedLoader) -> str:
    """Return the mode of a combined loader; there is no public way to read it."""
    mode: str = combined._mode
    return mode


def is_sampler_wrapper(sampler: object) -> bool:
    """Tell whether Lightning has wrapped a user's sampler, to deal out what that one draws."""
    return isinstance(sampler, DistributedSamplerWrapper | UnrepeatedDistributedSamplerWrapper)


def wrapped_sampler(sampler: DistributedSampler[Any]) -> Any:
    """Return the user's sampler in one that Lightning has wrapped around it."""
    return sampler.dataset._sampler  # type: ignore[attr-defined]


def replace_preparation(
    trainer: Trainer,
    show: Callable[[DataLoader[Any]], DataLoader[Any]],
    preparing: Callable[[], AbstractContextManager[None]],
) -> None:
    """Replace the loaders that Lightning looks at when it injects samplers; there is no hook before that.

    Args:
        trainer: The Trainer.
        show: Returns the loader that is looked at; one that gets no sampler stays the user's.
        preparing: Makes a context that is put around what Lightning does with the loader.
    """
    connector = trainer._data_connector

    def prepare(loader: Any, *args: Any, **kwargs: Any) -> Any:
        shown = show(loader) if isinstance(loader, DataLoader) else loader
        with preparing():
            prepared = type(connector)._prepare_dataloader(connector, shown, *args, **kwargs)
        return loader if prepared is shown else prepared

    vars(connector)["_prepare_dataloader"] = prepare


def restore_preparation(trainer: Trainer) -> None:
    """Undo `replace_preparation`."""
    vars(trainer._data_connector).pop("_prepare_dataloader", None)


def replace_loaders(trainer: Trainer, replace: Callable[[Any, bool], Any]) -> None:
    """Replace what the loops that train and evaluate get when they ask for their loaders.

    Lightning makes a `CombinedLoader` of anything that is none, so this is where another one can be given to it.

    Args:
        trainer: The Trainer.
        replace: Maps what was asked for, and whether it is for training, to a `CombinedLoader`.
    """
    for source, is_training in _loader_sources(trainer):
        original = type(source).dataloader.__get__(source)

        def dataloader(original: Callable[[], Any] = original, is_training: bool = is_training) -> Any:
            return replace(original(), is_training)

        source.dataloader = dataloader


def restore_loaders(trainer: Trainer) -> None:
    """Undo `replace_loaders`."""
    for source, _ in _loader_sources(trainer):
        source.__dict__.pop("dataloader", None)


def _loader_sources(trainer: Trainer) -> Iterator[tuple[Any, bool]]:
    yield trainer.fit_loop._data_source, True
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        yield loop._data_source, False


def active_combined_loader(trainer: Trainer) -> CombinedLoader | None:
    """Return the loader of the loop that runs; `trainer.train_dataloader` is only what it combines."""
    loop = trainer._active_loop
    return None if loop is None else loop._combined_loader
