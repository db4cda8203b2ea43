"""Steps on global batches, each of which the ranks share."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe, MapDataPipe
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import combination_mode, is_split_by_node, shut_down_workers
from lightning_ddp_ext._compat.torch import has_torchs_iterator, iterate_counting, samples_of, with_sampler
from lightning_ddp_ext._lightning import rank_zero_warn, sized_len
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext.batches.sample_counts import count_drawn, mean_count
from lightning_ddp_ext.batches.splitting import count_samples, split_batch
from lightning_ddp_ext.distributed.exchange import gather_integers
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.loaders.lockstep_source import HasNextBatch, StandInMaker
from lightning_ddp_ext.loaders.predictions import Finished, compare_finished, none_finished
from lightning_ddp_ext.loaders.step_loader import (
    UNLIMITED,
    FetchedBatch,
    StepLoader,
    Steps,
    StepSource,
    combine_part,
    limit_of,
)
from lightning_ddp_ext.resume.rng_state import LoaderRng, capture_states, find_loader_rngs, restore_states
from lightning_ddp_ext.shares.global_batches import (
    GlobalBatches,
    NoSamples,
    ShareCollate,
    SharedSampler,
    compare_batches,
)
from lightning_ddp_ext.shares.iterable_datasets import SharedStreamBatch, StreamCollate, StreamSampler, hash_of_content
from lightning_ddp_ext.shares.share_table import SharedBatch, ShareTable, combine_shares

_SEEDS, _TABLE = "seeds", "table"  # in checkpoints of a Fabric
Taken = tuple[Any, Sequence[tuple[SharedBatch, int | None]]]
"""A batch, and the shares and samples of the loaders that have contributed to it."""


class SharedLoader:
    """Iterates over a loader of global batches on every rank, and yields the share of this rank, or `NoSamples`.

    torch's loaders fetch only the samples of the share; other loaders make whole batches, which are cut. `taken` are
    the batches that have been yielded since `take`, with the samples that this rank has counted.
    """

    def __init__(self, loader: Any, batches: GlobalBatches, batch_dim: int) -> None:
        self.batches = batches
        self.loader = loader
        self._batch_dim = batch_dim
        self._taken: list[tuple[SharedBatch, int | None]] = []
        self._is_fetched_whole = not has_torchs_iterator(loader)
        self._is_iterable = not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)
        self.is_stream = self._is_iterable and not self._is_fetched_whole
        drawn = "sampler" if getattr(loader, "batch_sampler", None) is None else "batch_sampler"
        self.source: object = getattr(loader, "dataset" if self._is_iterable else drawn, loader)
        if self._is_fetched_whole and batches.cost is not None:
            raise UnsupportedFeatureError(
                f"`cost` needs a loader that collates samples, and `{type(loader).__name__}` gives whole batches. Leave"
                " `cost` out, or use a `DataLoader` with a batch size."
            )
        if not isinstance(loader, DataLoader):
            return
        _check(loader)
        collate = loader.collate_fn
        draw = partial(SharedSampler, batches=batches, data=loader.dataset, is_cut=not self._is_fetched_whole)
        if self.is_stream:
            cut = StreamCollate(ShareCollate(collate), batches.rank, batches.cost)
            self.loader = with_sampler(loader, partial(StreamSampler, batches=batches), cut)
        elif not self._is_fetched_whole:
            if batches.cost is not None:
                rank_zero_info(f"`cost` reads every sample of `{type(loader.dataset).__name__}` before training.")
            self.loader = with_sampler(loader, draw, ShareCollate(collate))
        elif not self._is_iterable:
            self.loader = with_sampler(loader, draw, collate)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self._read_alike() if self._is_iterable else self._iterate()

    def _iterate(self) -> Iterator[Any]:
        if self._is_fetched_whole:
            return map(self._cut, iter(self.loader))
        batches = iterate_counting(self.loader, count_drawn)
        return map(self._note_of_stream if self.is_stream else partial(self._note, batches), batches)

    def _read_alike(self) -> Iterator[Any]:
        """Yield shares of batches that every rank reads whole.

        All ranks draw the same random numbers meanwhile, so that a stream may shuffle.
        """
        rng, is_first, end = self.batches.rng(), True, object()
        with rng.drawing():
            shares = self._iterate()  # workers get their seeds here
        has_workers = getattr(self.loader, "num_workers", 0) > 0
        while True:
            with nullcontext() if has_workers else rng.drawing():
                share = next(shares, end)
            if share is end:
                return
            if is_first and not self._taken[-1][0].drawn:
                rank_zero_warn(
                    f"Ranks cannot compare what they read from `{type(self.source).__name__}`, which has no numbers or"
                    " texts beside its arrays. Ensure that it yields the same samples on every rank, or yield a key"
                    " with each sample."
                )
            is_first = False
            yield share

    def _note(self, batches: Iterator[Any], batch: Any) -> Any:
        self._taken.append((self.batches.fetched.popleft(), samples_of(batches)))
        return batch

    def _note_of_stream(self, item: SharedStreamBatch) -> Any:
        sizes, nominal = tuple(item.sizes), tuple(item.nominal)
        shared = SharedBatch(self.batches.table, item.number, sizes, item.content, nominal)
        self._taken.append((shared, item.samples))
        return item.batch

    def take(self) -> list[tuple[SharedBatch, int | None]]:
        """Return and forget the batches that have been yielded."""
        taken, self._taken = self._taken, []
        return taken

    def _cut(self, batch: Any) -> Any:
        total = count_samples(batch, self._batch_dim)
        self.batches.share(total, hash_of_content(batch, most_dimensions=2) if self._is_iterable else 0)
        shared = self.batches.fetched.popleft()
        own = shared.sizes[self.batches.rank]
        self._taken.append((shared, own))
        chunk = split_batch(batch, shared.sizes, self._batch_dim)[self.batches.rank] if total else None
        return NoSamples() if chunk is None else chunk


def agree_on_lead(loaders: Sequence[SharedLoader], group: dist.ProcessGroup) -> int:
    """Return how many batches ahead of their use any rank may have drawn. Communicates."""
    given = [shared.loader for shared in loaders]
    own = [one.num_workers * (one.prefetch_factor or 0) if isinstance(one, DataLoader) else 0 for one in given]
    # All ranks use the largest lead, because a change of shares must not meet a batch that any rank has drawn.
    of_ranks = gather_integers(own, group)
    for shared, numbers in zip(loaders, zip(*of_ranks, strict=True), strict=True):
        if shared.is_stream and len(set(numbers)) > 1:
            raise UnsupportedFeatureError(
                "the loaders of a stream have workers that fetch"
                f" {', '.join(map(str, numbers))} batches ahead on ranks 0 to {len(numbers) - 1}, so that ranks"
                " would have different batches. Use the same `num_workers` and `prefetch_factor` on all ranks."
            )
    # A worker at the end of its stream draws the number of a batch that does not exist.
    streams = [shared.loader.num_workers for shared in loaders if shared.is_stream]
    # Lightning fetches one batch ahead if there is no length, and ranks that compare their batches one more.
    ahead = any(sized_len(one) is None for one in given) + any(shared.batches.asks for shared in loaders)
    return max(max(row, default=0) for row in of_ranks) + max(streams, default=0) + ahead


def _check(loader: DataLoader[Any]) -> None:
    """Refuse loaders that give ranks different samples, or that give batches in the order of completion."""
    # torch deals out data pipes by rank.
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe) or is_split_by_node(loader.dataset):
        raise UnsupportedFeatureError(
            f"`{type(loader.dataset).__name__}` gives each rank samples of its own. Under `balanced_ddp` every rank"
            " reads all samples: use `ddp_join`, or a dataset that does not depend on the rank."
        )
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise UnsupportedFeatureError(
                f"a loader has a `{type(sampler).__name__}` with `num_replicas={sampler.num_replicas}`, so that each"
                " rank draws samples of its own. Leave it out: `balanced_ddp` shares the batches of one sampler."
            )
    if not getattr(loader, "in_order", True):
        raise UnsupportedFeatureError(
            "a loader has `in_order=False`, so that ranks would have batches in different orders. Leave it out."
        )


class SharedSource(StepSource):
    """Steps of ranks that share the batches of their loaders.

    All ranks draw the same batches, so their number, and the position in an epoch, do not depend on the number of
    ranks. `seeds` are numbers for all samplers, and `epoch_seeds` returns further ones for an epoch and the place of a
    loader, all the same on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        table: ShareTable,
        seeds: Sequence[int],
        epoch_seeds: Callable[[int], Sequence[int]],
        batch_dim: int,
        has_next_batch: HasNextBatch | None = None,
        resumed_states: Sequence[Any] = (),
        finished: Finished = none_finished,
        prepare: Callable[[Sequence[Any]], Sequence[Any]] = list,
    ) -> None:
        self._group = group
        self._rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._table = table
        self.seeds = seeds
        self._epoch_seeds = epoch_seeds
        self._batch_dim = batch_dim
        self._has_next_batch = has_next_batch  # None for a new one in each epoch
        # States of the samplers' generators. A resumed run may have other ranks, to which no other states belong.
        self._resumed_states = resumed_states
        self._finished = finished
        self._prepare = prepare  # returns loaders, or copies of them, whose batches are shared
        self._loaders: list[tuple[Any, SharedLoader]] = []  # with the loaders for which they were made
        self._started_with: list[Any] = []
        self._stand_ins: dict[int, list[Any]] = {}

    @override
    def reset(self, loader: StepLoader) -> None:
        super().reset(loader)
        for _, shared in self._loaders:
            shut_down_workers(shared.loader)

    @override
    def prepare(self, loader: StepLoader) -> None:
        self._shared_loaders(loader)

    def _shared_loaders(self, loader: StepLoader) -> list[SharedLoader]:
        """Return the loaders of shares, the same objects as long as Lightning keeps the loaders, for their workers."""
        if [id(given) for given, _ in self._loaders] != [id(one) for one in loader.flattened]:
            is_training = loader.rng is not None
            self._loaders = [
                (given, SharedLoader(one, GlobalBatches(self._table, self._group, is_training, one), self._batch_dim))
                for given, one in zip(loader.flattened, self._prepare(loader.flattened), strict=True)
            ]
            lead = agree_on_lead([shared for _, shared in self._loaders], self._group)
            if is_training:
                self._table.lead = lead
        return [shared for _, shared in self._loaders]

    @override
    def steps(self, loader: StepLoader, skip: int) -> Steps:
        loaders = self._shared_loaders(loader)
        if loader.rng is not None:
            generators = _sampler_rngs(loader)
            restore_states(generators, self._resumed_states)
            self._started_with, self._resumed_states = capture_states(generators), []
        number = self._table.begun if loader.rng is None else self._table.begin_epoch(skip)
        parts = [[one] for one in loaders] if combination_mode(loader) == "sequential" else [loaders]
        for position, shared in enumerate(loaders):
            shared.batches.begin(number, *self.seeds, *self._epoch_seeds(position))
        for dataloader_idx, (part, steps) in enumerate(zip(parts, self.numbers_of_steps(loader), strict=False)):
            done = self._finished(dataloader_idx, 0)
            first = skip + len(done)  # no training has finished predictions
            taken = self._take(loader, part, steps, first, done)
            maker = StandInMaker(self._group, self._stand_ins.setdefault(dataloader_idx, []))
            has_next_batch = self._has_next_batch or HasNextBatch(self._group)
            made = share_steps(maker, taken, part, has_next_batch, first)
            for batch_idx, (batch, fetched) in enumerate(made, first):
                yield (batch, batch_idx, dataloader_idx), fetched

    def _take(
        self, loader: StepLoader, part: list[SharedLoader], steps: float, skip: int, done: Sequence[int]
    ) -> Iterator[Taken]:
        """Yield the batches of loaders that contribute to the same steps; `done` are hashes of predicted batches."""
        batches: Iterable[Any] = combine_part(loader, part)
        if loader.rng is not None:
            looks_ahead = steps == UNLIMITED or any(one.batches.asks for one in part)
            batches = loader.rng.iterate(batches, loader.flattened, skip, looks_ahead)
        for number, (batch, _, _) in enumerate(islice(batches, limit_of(loader, steps))):
            taken = [one for shared in part for one in shared.take()]
            if number >= skip:
                yield batch, taken
            elif done:
                compare_finished(self._rank, done[number : number + 1], [one.drawn for one, _ in taken])

    def indices_of(self, dataloader_idx: int) -> Sequence[Any]:
        """Return the indices of this rank's shares of the batches that have been drawn; empty for streams."""
        return self._loaders[dataloader_idx][1].batches.own_indices

    def sampler_states(self, loader: StepLoader) -> list[Any]:
        """Return the states of the samplers' generators at the beginning of this epoch, or now between epochs."""
        return self._started_with if loader.used else capture_states(_sampler_rngs(loader))

    @override
    def state_dict(self, loader: StepLoader, is_within_epoch: bool) -> dict[str, Any]:
        return {_SEEDS: [*self.seeds], _TABLE: self._table.state_dict(is_within_epoch)}

    @override
    def load_state_dict(self, loader: StepLoader, state: Mapping[str, Any], has_rng: bool) -> None:
        self.seeds = state[_SEEDS]
        if has_rng:
            self._table.load_state_dict(state[_TABLE])
        elif loader.skip and _sampler_rngs(loader):
            raise UnsupportedFeatureError(
                "the checkpoint was saved in the middle of an epoch by another number of ranks, and a sampler has a"
                " `generator` of its own, whose state cannot be restored. Load it on as many ranks, or one that was"
                " saved between epochs."
            )


def _sampler_rngs(loader: StepLoader) -> list[LoaderRng]:
    datasets = [getattr(one, "dataset", None) for one in loader.flattened]
    return find_loader_rngs(loader.flattened, excluded=datasets)


def share_steps(
    maker: StandInMaker, fetched: Iterator[Taken], loaders: Sequence[SharedLoader], has_next: HasNextBatch, first: int
) -> Iterator[tuple[Any, FetchedBatch]]:
    """Yield the steps on this rank's shares of the batches of loaders, or on stand-ins, from the step `first` on.

    If any loader `asks`, ranks compare a batch before its step, which communicates depending on the shares.
    """
    sources = [loader.source for loader in loaders if loader.batches.asks]
    given = ((batch, combine_shares([one for one, _ in taken]), taken) for batch, taken in fetched)
    if sources:
        ahead = has_next.ahead(given, lambda one: one[1].agreement, partial(compare_batches, sources), first)
        given = (one for _, one, _ in ahead if one is not None)
    for batch, shared, taken in given:
        present = [size > 0 for size in shared.sizes]
        is_own = present[maker.rank]
        keeps = is_own and not maker.stand_in and len(present) > 1
        samples = mean_count([count for _, count in taken]) if is_own else None
        step, own = maker.make(present, batch if is_own else None, samples, keeps)
        yield step, own._replace(shares=shared, has_next_batch=has_next if sources else None)
