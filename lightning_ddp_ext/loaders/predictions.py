"""Predictions of all ranks in the order in which one process makes them."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from lightning_ddp_ext._compat.lightning_loaders import batches_to_predict
from lightning_ddp_ext._lightning import Trainer, sized_len
from lightning_ddp_ext.batches.sample_counts import as_indices, hash_of
from lightning_ddp_ext.batches.splitting import gather
from lightning_ddp_ext.batches.token_batches import TokenBudgetBatchSampler
from lightning_ddp_ext.distributed.exchange import gather_integer, gather_objects
from lightning_ddp_ext.distributed.serialization import name_skipped, pack
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.loaders.step_loader import FetchedBatch
from lightning_ddp_ext.resume.rng_state import drawing_alike

_CPU = torch.device("cpu")
T = TypeVar("T")
PredictionsOn = Literal["all_ranks", "rank_zero"]
Finished = Callable[[int, int], Sequence[int]]
"""`finished(dataloader_idx, source)` returns hashes of the first batches, which an interrupted run has predicted."""


class NoPrediction:
    """The output of a rank without a sample of a batch."""


class PredictionPlace(NamedTuple):
    """Where the prediction of one rank for a batch belongs: predictions are sorted by these numbers."""

    source: int  # 0 if all ranks have the same data, else 1 + the rank whose loader made the batch
    number: int  # of the batch
    rank: int
    samples: int = 1  # in this part of a batch that ranks share
    parts: int = 1


@dataclass(eq=False)
class Predictions:
    """The predictions of this rank in the Trainer's loop, and their places among the predictions of all ranks."""

    trainer: Trainer
    group: dist.ProcessGroup
    batch_dim: int
    predictions_on: PredictionsOn
    finished: Finished

    def __post_init__(self) -> None:
        self.place: PredictionPlace | None = None  # of the current prediction; None on a rank without a sample
        self.content: int | None = None  # hash of the indices of the whole batch, if ranks share it
        self._dealt: list[_Dealt] = []
        self._places: dict[int, list[PredictionPlace]] = {}  # by the index of the loader

    def deal(self, loader: Any, is_shared: bool) -> Any:
        """Return the loader of the batches that this rank predicts. Call on every rank, for each loader.

        If all ranks have the same data, `is_shared`, the batches that one process would make are dealt out whole, so
        that any prediction is the one of that process. Other loaders have data of this rank. Finished batches are left
        out.
        """
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        batches = batches_to_predict(loader)
        is_dealt = batches is not None and isinstance(batches.get(), TokenBudgetBatchSampler)
        source, start, step = (0, rank, world_size) if is_shared or is_dealt else (1 + rank, 0, 1)
        done = list(self.finished(len(self._dealt), source))[start::step]
        indices: list[list[Any]] | None = None
        if batches is None or (step == 1 and not done):
            loader = _Rest(loader, len(done)) if done else loader
        else:
            with drawing_alike(int(os.environ.get("PL_GLOBAL_SEED", 0)), batches.get()):
                drawn = list(batches.get())
            indices = [*map(as_indices, drawn)]
            if is_shared and not is_dealt:
                # Compared before batches are dealt out: other orders would leave samples out without an error.
                hashes = gather_integer(hash_of(indices), self.group)
                different = next((rank for rank, other in enumerate(hashes) if other != hashes[0]), None)
                if different is not None:
                    raise UnsupportedFeatureError(
                        f"rank {different} draws other samples to predict than rank 0, so that some would be missing."
                        " Use a sampler that draws the same on all ranks, or `use_distributed_sampler=False` for ranks"
                        " with data of their own."
                    )
                drawn, indices = drawn[start::step], indices[start::step]
            compare_finished(rank, done, [*map(hash_of, indices[: len(done)])])
            batches.set(drawn[len(done) :])
            indices = indices[len(done) :]
        self._dealt.append(_Dealt(source, start + len(done) * step, step, indices))
        return loader

    def indices_of(self, dataloader_idx: int) -> Sequence[Any] | None:
        """Return the indices of the batches that this rank predicts; None if Lightning has to find them."""
        return self._dealt[dataloader_idx].indices

    def begin(self, fetched: FetchedBatch) -> None:
        """Begin with a batch."""
        batch_idx, dataloader_idx = fetched.position
        rank, shares = self.trainer.global_rank, fetched.shares
        self.content = None if shares is None else shares.drawn
        if fetched.participation is not None and fetched.participation.is_shadow:
            self.place = None
        elif shares is not None:
            self.place = PredictionPlace(0, batch_idx, rank, shares.sizes[rank], sum(size > 0 for size in shares.sizes))
        else:
            dealt = self._dealt[dataloader_idx]
            self.place = PredictionPlace(dealt.source, dealt.first + batch_idx * dealt.step, rank)
        if self.place is not None:
            self._places.setdefault(dataloader_idx, []).append(self.place)

    def run(self, step: Callable[[], Any]) -> Any:
        """Return the output of `predict_step`, which `step` calls on a rank with samples."""
        if self.place is None:
            return NoPrediction()
        output = step()
        is_first = sum(map(len, self._places.values())) == 1
        if is_first and self.trainer.predict_loop.return_predictions and dist.get_world_size(self.group) > 1:
            skipped = pack(output).skipped  # an error now, and not when everything has been predicted
            if skipped:
                raise TypeError(
                    f"rank {self.trainer.global_rank}: `predict_step` returns {name_skipped(skipped)}, which cannot be"
                    " sent to other ranks. Return tensors, plain values and containers of these, or use"
                    " `return_predictions=False` and keep predictions in a callback."
                )
        return output

    def merge(self, predictions: Sequence[Sequence[Any]]) -> list[list[Any]] | None:
        """Merge the predictions of all ranks for the batches of each loader; None if this rank does not get them."""
        own = [list(zip(self._places.get(n, []), part, strict=True)) for n, part in enumerate(predictions)]
        if dist.get_world_size(self.group) == 1:
            return [[*part] for part in predictions]
        # After the loop, since ranks make different numbers of predictions.
        of_ranks = gather_objects(own, self.group, None if self.predictions_on == "all_ranks" else 0)
        return [[*merge_parts(chain(*parts), self.batch_dim)] for parts in zip(*of_ranks, strict=True)] or None


class _Rest:
    """A loader without its first batches, which have been predicted already; it has the loader's attributes."""

    def __init__(self, loader: Any, skip: int) -> None:
        self._loader = loader
        self._skip = skip

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        length = sized_len(self._loader)
        if length is None:
            raise TypeError("the number of batches is not known")
        return max(0, length - self._skip)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), self._skip, None)


class _Dealt(NamedTuple):
    """The batches of a loader that a rank predicts, with the numbers `first`, `first + step` and so on."""

    source: int  # of their places
    first: int
    step: int
    indices: Sequence[list[Any]] | None  # of each batch; None if the loader draws them later, or never


def none_finished(dataloader_idx: int, source: int) -> Sequence[int]:
    """Return no batches: `Finished` of a run that has not been interrupted."""
    return ()


def compare_finished(rank: int, done: Sequence[int], drawn: Sequence[int]) -> None:
    """Raise an error if a loader does not make the batches that have been predicted already, given their hashes."""
    if [*drawn] != [*done]:
        raise UnsupportedFeatureError(
            f"rank {rank}: the loader makes batches other than the ones that have been predicted already. Use the"
            " dataset, the sampler and the batch size of the interrupted run, or write into an empty folder."
        )


def merge_parts(
    parts: Iterable[tuple[PredictionPlace, T]], batch_dim: int, read: Callable[[T], Any] = lambda value: value
) -> Iterator[Any]:
    """Yield the predictions of batches in order; the parts of a batch, which `read` returns, are joined."""
    for _, of_batch in groupby(sorted(parts, key=lambda part: part[0]), key=lambda part: part[0][:2]):
        places, outputs = zip(*of_batch, strict=True)
        yield gather([*map(read, outputs)], [place.samples for place in places], _CPU, batch_dim)
