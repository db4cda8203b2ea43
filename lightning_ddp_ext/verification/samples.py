"""Batches of a loader, and parts of them that its collate function makes of fewer samples."""

import copy
from collections.abc import Mapping, Sequence
from itertools import chain, islice, pairwise
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext._lightning import LightningDataModule, LightningModule, is_overridden, sized_len
from lightning_ddp_ext.batches.containers import walk
from lightning_ddp_ext.batches.splitting import count_samples, split_batch
from lightning_ddp_ext.consistency import value_to_text
from lightning_ddp_ext.errors import BatchSplitError, ImpossibleError, describe_error
from lightning_ddp_ext.resume.rng_state import SeededRng, drawing_alike

MOST = 12  # samples of a batch that is checked
_LEAST = 4
_SEEDS = 3  # with which a collate function is tried


class Samples:
    """Some samples of a loader: batches of any of them are made as the loader makes its own.

    There is one finished batch, which the `scatter_batch` of the module cuts if it has one, of a loader that does not
    collate samples, of any other iterable, and of a collate function that draws random numbers: parts have the draws
    of the batch.
    """

    def __init__(self, loader: Any, module: Any) -> None:
        self._scatter = getattr(module, "scatter_batch", None)
        dataset = getattr(loader, "dataset", None)
        self.is_stream = isinstance(dataset, IterableDataset)
        self.length = None if self.is_stream else sized_len(dataset)  # of the dataset, if that is known
        self._samples: list[Any] = []
        self.are_collated = isinstance(loader, DataLoader) and loader.batch_sampler is not None
        if self.are_collated:
            self._samples, self._collate = _take(loader), loader.collate_fn
            batches = [self._collate_seeded(seed) for seed in range(_SEEDS) if self._samples]
            is_random = len({value_to_text([*walk(one)]) for one in batches}) > 1
            self._batch = batches[0] if is_random else None
        else:
            self._batch = next(iter(loader), None)
        self.number = len(self._samples) if self._batch is None else self._count()
        if self.number < _LEAST:
            raise ImpossibleError(
                f"the first batch has {self.number} samples, too few to be cut into unequal parts. Give a batch of at"
                f" least {_LEAST}"
            )

    def _count(self) -> int:
        if self._scatter is not None:
            found: dict[str, int] = {}
            self._scatter(self._batch, lambda number: [found.setdefault("samples", number)])
            return found["samples"]
        try:
            return count_samples(self._batch)
        except BatchSplitError as error:
            raise ImpossibleError(
                f"the batch cannot be cut: {describe_error(error)}. Give a `DataLoader` that collates samples, or"
                " define `scatter_batch` on the module"
            ) from error

    def sizes(self) -> list[int]:
        """Return unequal sizes of two or three parts, of at least two samples each, an even number together."""
        number = min(self.number, MOST) // 2 * 2
        if number < 9:
            half = number // 2 - (number > _LEAST)
            return [half, number - half]
        return [number // 4, number // 3, number - number // 4 - number // 3]

    def cut(self, sizes: Sequence[int]) -> tuple[Any, list[Any]]:
        """Return the batch of the first samples, and its parts of these sizes."""
        bounds = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
        return self._make(range(bounds[-1])), [self._make(range(*one)) for one in pairwise(bounds)]

    def loader(self, sizes: Sequence[int], place: int | None, steps: int) -> DataLoader[Any]:
        """Return a loader that gives the batch, or one of its parts, a number of times."""
        number, begin = sum(sizes), 0 if place is None else sum(sizes[:place])
        indices: Any = [[*range(begin, number if place is None else begin + sizes[place])]] * steps
        dataset: Any = range(self.number)
        return DataLoader(dataset, batch_sampler=indices, collate_fn=self._make)

    def _make(self, indices: Sequence[int]) -> Any:
        """Return a batch of consecutive samples."""
        begin, end = indices[0], indices[-1] + 1
        if self._batch is None:
            return self._collate(copy.deepcopy(self._samples[begin:end]))
        sizes, batch = [size for size in (begin, end - begin, self.number - end) if size], copy.deepcopy(self._batch)
        scattered = split_batch(batch, sizes) if self._scatter is None else self._scatter(batch, lambda number: sizes)
        return [*scattered][begin > 0]

    def _collate_seeded(self, seed: int) -> Any:
        with SeededRng(seed).drawing():
            return self._collate(copy.deepcopy(self._samples))


def _take(loader: Any) -> list[Any]:
    """Return the first samples of a loader, in its order."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return list(islice(iter(dataset), MOST))
    indices = list(islice(chain.from_iterable(loader.batch_sampler), MOST))
    return list(dataset.__getitems__(indices)) if hasattr(dataset, "__getitems__") else [dataset[i] for i in indices]


def draw_samples(module: LightningModule, data: Any) -> tuple[Samples, list[Samples], str | None]:
    """Return samples of the training loader, the same each time, and what `_draw_validation` returns."""
    hooks = data if isinstance(data, LightningDataModule) else module
    with drawing_alike(0, data):
        return _draw_training(module, data, hooks), *_draw_validation(module, hooks)


def _draw_training(module: LightningModule, data: Any, hooks: Any) -> Samples:
    try:
        if isinstance(data, LightningDataModule):
            data.prepare_data()
            data.setup("fit")
        if data is None and not is_overridden("train_dataloader", module):
            raise ImpossibleError(
                "there is no data: the module has no `train_dataloader`. Give `--data` or `--batch` to the command, or"
                " `data` to `verify`"
            )
        training = hooks.train_dataloader() if data is None or data is hooks else data
        if isinstance(training, Mapping | list | tuple):
            raise ImpossibleError("there are several training loaders. Give one, or a list of batches in a loader")
        return Samples(training, module)
    except ImpossibleError:
        raise
    except Exception as error:
        raise ImpossibleError(f"no batch could be made: {describe_error(error)}") from error


def _draw_validation(module: LightningModule, hooks: Any) -> tuple[list[Samples], str | None]:
    """Return samples of the validation loaders, and the reason if they cannot be read."""
    if not (is_overridden("val_dataloader", hooks) and is_overridden("validation_step", module)):
        return [], None
    try:
        loaders = hooks.val_dataloader()
        return [Samples(one, module) for one in (loaders if isinstance(loaders, list | tuple) else [loaders])], None
    except Exception as error:
        return [], str(error) if isinstance(error, ImpossibleError) else describe_error(error)
