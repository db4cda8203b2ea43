"""Private names of Lightning behind the loaders of its loops. Checked on lightning 2.6.6.

`StepLoader` also overrides `CombinedLoader._state_dicts` and `_load_state_dicts`, with which the training loop saves
and loads its position.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_ddp_ext._compat.lightning import replace_attributes
from lightning_ddp_ext._compat.lightning_names import _IndexBatchSamplerWrapper, _shutdown_workers_and_reset_iterator
from lightning_ddp_ext._compat.torch import has_torchs_methods
from lightning_ddp_ext._import_names import PACKAGE
from lightning_ddp_ext._lightning import (
    CombinedLoader,
    DistributedSamplerWrapper,
    MisconfigurationException,
    Trainer,
    UnrepeatedDistributedSamplerWrapper,
)
from lightning_ddp_ext.errors import DDPExtError, UnsupportedFeatureError


class _GivenBatchSampler(BatchSampler):
    """A batch sampler that Lightning rebuilds with its size of batches, because it is not exactly torch's class."""


def keep_batch_samplers(
    cleanup: ExitStack, trainer: Trainer, preparing: Callable[[], AbstractContextManager[None]]
) -> None:
    """Have rebuilt loaders keep the batch size and the sampler of their batch sampler.

    Lightning 2.6.6 replaces a batch sampler of exactly torch's class by a sampler, so that a batch is one sample. It
    also ignores the sampler inside of a batch sampler, even a `DistributedSampler` or a weighted one. There is no hook
    for this, so Lightning is shown another loader. Its own work on a loader runs within the context that `preparing`
    makes. If it injects no sampler, the user's loader stays.
    """
    connector = trainer._data_connector

    def prepare(loader: Any, *args: Any, **kwargs: Any) -> Any:
        shown = _show_samplers(loader) if isinstance(loader, DataLoader) else loader
        with preparing():
            try:
                prepared = type(connector)._prepare_dataloader(connector, shown, *args, **kwargs)
            except Exception as error:
                # Lightning explains other arguments by a TypeError; other errors come from the class of the user.
                if shown is loader or isinstance(error, TypeError | MisconfigurationException | DDPExtError):
                    raise
                raise UnsupportedFeatureError(
                    f"the batch sampler `{type(loader.batch_sampler).__name__}` cannot be made again with the sampler"
                    f" of one rank ({type(error).__name__}: {error}). Make it for each rank and set"
                    " `use_distributed_sampler=False`, or use `balanced_ddp`, whose ranks share its batches."
                ) from error
        return loader if prepared is shown else prepared

    replace_attributes(cleanup, connector, _prepare_dataloader=prepare)


def shut_down_workers(loader: object) -> None:
    """End the workers of a loader, as `CombinedLoader.reset` does."""
    _shutdown_workers_and_reset_iterator(loader)


def keep_loaders(cleanup: ExitStack, trainer: Trainer) -> None:
    """Have Lightning leave all loaders as they are, without a distributed sampler."""
    replace_attributes(cleanup, trainer._data_connector, _prepare_dataloader=lambda loader, *_, **__: loader)


def _show_samplers(loader: DataLoader[Any]) -> DataLoader[Any]:
    given: Any = loader.batch_sampler
    if given is None or loader.batch_size is not None:  # torch made the batch sampler from the size
        return loader
    shown = copy.copy(loader)  # attributes are set through `vars`, because torch refuses to set them
    if getattr(given, "sampler", None) is not None:
        vars(shown)["sampler"] = given.sampler
    if type(given) is BatchSampler:
        given = vars(shown)["batch_sampler"] = copy.copy(given)
        given.__class__ = _GivenBatchSampler
    return shown


def is_list_of_batches(trainer: Trainer, batch: Any) -> bool:
    """Return True if a batch is a list with one batch of each of several loaders."""
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
    """Return the combined loader of the training loop; `trainer.train_dataloader` returns its parts."""
    return trainer.fit_loop._combined_loader


def combination_mode(combined: CombinedLoader) -> str:
    """Return the mode of a combined loader."""
    mode: str = combined._mode
    return mode


def is_split_by_node(dataset: object) -> bool:
    """Return True if `datasets.distributed.split_dataset_by_node` of Hugging Face has made this stream."""
    return getattr(dataset, "_distributed", None) is not None


def is_sampler_wrapper(sampler: object) -> bool:
    """Return True if Lightning made this sampler around a user's sampler."""
    return isinstance(sampler, DistributedSamplerWrapper | UnrepeatedDistributedSamplerWrapper)


def wrapped_sampler(sampler: DistributedSampler[Any]) -> Any:
    """Return the user's sampler inside of a sampler that Lightning made."""
    return sampler.dataset._sampler  # type: ignore[attr-defined]


def replace_loaders(cleanup: ExitStack, trainer: Trainer, replace: Callable[[Any, bool], Any]) -> None:
    """Replace the loaders of training and evaluation by the `CombinedLoader` of `replace(loaders, is_training)`."""
    # Lightning builds its own `CombinedLoader` from anything else, so this is the place to pass another one.
    fit_loop = trainer.fit_loop
    fit_loop._combined_loader = None  # `trainer.estimated_stepping_batches` in `setup` of the module has made one
    for loop in (fit_loop, fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        source, is_training = loop._data_source, loop is fit_loop
        original = type(source).dataloader.__get__(source)

        def dataloader(original: Callable[[], Any] = original, is_training: bool = is_training) -> Any:
            return replace(original(), is_training)

        replace_attributes(cleanup, source, dataloader=dataloader)


_EXACT = ("torch.utils.data.", "torchdata.stateful_dataloader.", f"{PACKAGE}.", "builtins")  # modules of samplers


def has_exact_length(loader: Any) -> bool:
    """Return True if a loader surely has as many batches as it announces: if no class of a user counts or draws them.

    The length of a stream is an estimate, because each worker makes batches from one part.
    """
    if not isinstance(loader, DataLoader):
        return type(loader) in (list, tuple)
    batches: Any = getattr(loader.batch_sampler, "_batch_sampler", loader.batch_sampler)  # Lightning's, in predictions
    samplers = [batches, getattr(batches, "sampler", loader.sampler)]
    samplers += [getattr(getattr(one, "dataset", None), "_sampler", None) for one in samplers]  # see `wrapped_sampler`
    is_drawn = all(type(one).__module__.startswith(_EXACT) for one in samplers)
    return is_drawn and not isinstance(loader.dataset, IterableDataset) and has_torchs_methods(loader, "__len__")


class _SampledBatches:
    """The batches of indices, or single indices, that a loader of predictions draws."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader: Any = loader

    def get(self) -> Any:
        """Return the batch sampler, or the sampler of a loader without one."""
        given = self._loader.batch_sampler
        return self._loader.sampler if given is None else given._batch_sampler

    def set(self, drawn: list[Any]) -> None:
        """Let the loader draw these."""
        if self._loader.batch_sampler is not None:
            self._loader.batch_sampler._batch_sampler = drawn
        else:
            vars(self._loader)["sampler"] = drawn  # torch refuses to set it


def batches_to_predict(loader: object) -> _SampledBatches | None:
    """Return what a loader draws after Lightning has prepared it for predictions; None for streams and iterables."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    is_known = loader.batch_sampler is None or isinstance(loader.batch_sampler, _IndexBatchSamplerWrapper)
    return _SampledBatches(loader) if is_known else None


def replace_prediction(
    cleanup: ExitStack,
    trainer: Trainer,
    replace: Callable[[Any], CombinedLoader],
    find_indices: Callable[[int], Sequence[Any] | None],
    end_batch: Callable[[], None],
    is_prediction: Callable[[Any], bool],
    merge: Callable[[list[list[Any]]], list[list[Any]] | None],
) -> None:
    """Replace the loaders of predictions, and the predictions that the Trainer returns: of each loader, each batch.

    `find_indices` returns the indices of the batches of a loader, by its number, or None if Lightning has to find them.
    `end_batch` runs after the last hook of a batch. Only outputs that are predictions are kept.
    """
    loop = trainer.predict_loop
    source: Any = loop._data_source

    def get_batch_indices(loader: Any) -> Any:
        loop.current_batch_indices = []  # Lightning would keep the ones from another loader
        combined = loop._combined_loader
        assert combined is not None
        found = find_indices([id(one) for one in combined.flattened].index(id(loader)))
        return type(loop)._get_batch_indices(loop, loader) if found is None else found

    def predict_step(*args: Any) -> None:
        type(loop)._predict_step(loop, *args)
        end_batch()

    def on_run_end() -> Any:
        loop._predictions = [[one for one in part if is_prediction(one)] for part in loop._predictions]
        results = type(loop).on_run_end(loop)
        if not loop.return_predictions:
            return results
        merged = merge(loop._predictions)
        return merged[0] if merged and loop.num_dataloaders == 1 else merged

    replace_attributes(cleanup, source, dataloader=lambda: replace(type(source).dataloader(source)))
    replace_attributes(
        cleanup, loop, _predict_step=predict_step, on_run_end=on_run_end, _get_batch_indices=get_batch_indices
    )


def active_combined_loader(trainer: Trainer) -> CombinedLoader | None:
    """Return the combined loader of the running loop."""
    loop = trainer._active_loop
    return None if loop is None else loop._combined_loader


def loader_of_moving_batch(trainer: Trainer) -> CombinedLoader | None:
    """Return the combined loader of the loop that is moving a batch to the device; None if the user moves one."""
    is_hook_of_loop = trainer.lightning_module._current_fx_name == "batch_to_device"
    return active_combined_loader(trainer) if is_hook_of_loop else None
