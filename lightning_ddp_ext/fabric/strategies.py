"""The strategies for `lightning.fabric.Fabric`."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import allows_other_backward_passes
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext._validation import check_choice
from lightning_ddp_ext.batches.chunk_sizes import Balance, ChunkRule, even_chunks
from lightning_ddp_ext.distributed.exchange import broadcast_object
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.fabric.loaders import LoopBatch
from lightning_ddp_ext.fabric.loop_strategy import LoopStrategy
from lightning_ddp_ext.fabric.virtual_window import VirtualWindow
from lightning_ddp_ext.loaders.lockstep_source import LockstepSource, UnevenInputs
from lightning_ddp_ext.loaders.samplers import LightningInjectedRank
from lightning_ddp_ext.loaders.step_loader import EvenSource, FetchedBatch, StepSource
from lightning_ddp_ext.reducer.virtual_reducer import VirtualReducer
from lightning_ddp_ext.resume.rng_state import load_state
from lightning_ddp_ext.shares.costs import Cost, SampleCost
from lightning_ddp_ext.shares.parts import PartSampler, cut_loader, seed_process
from lightning_ddp_ext.shares.share_table import SharedBatch, ShareTable, combine_shares, refuses_single_samples
from lightning_ddp_ext.shares.shared_source import SharedSource
from lightning_ddp_ext.steps.balancer import ShareBalancer
from lightning_ddp_ext.steps.virtual_ranks import (
    check_ranks,
    check_virtual_ranks,
    compare_environments,
    describe_environment,
    refuse_calls,
)

_SHARES, _ENVIRONMENT = "shares", "environment"
_AFTER_PARTS = (
    "all_reduce", "all_gather", "broadcast", "barrier", "save_checkpoint", "clip_gradients_norm",
    "clip_gradients_value", "optimizer_step"
)  # fmt: skip


class DDPCheckpointStrategy(LoopStrategy):
    """`ddp_checkpoint` for Fabric: ranks make equally many steps.

    Registered with Fabric as `"ddp_checkpoint"`. It has the arguments of `LoopStrategy`.
    """

    remedy = 'use `strategy="ddp_join"`, whose loops end together on ranks with different numbers of batches'
    agrees = False
    channels = 2

    @override
    def make_source(self) -> StepSource:
        return EvenSource()


class DDPJoinStrategy(LoopStrategy):
    """`ddp_join` for Fabric: ranks with different amounts of data make the same number of steps.

    A loop over a loader of `fabric.setup_dataloaders` ends on all ranks at the same step. A rank that has run out of
    data gets a copy of its last batch, or of another rank's first one; then `fabric.strategy.is_shadow` is True. The
    loop body runs as usual, so that optimizers, schedulers, counters, evaluations and checkpoints agree on all ranks.
    `fabric.backward` gives such a batch no weight, and `fabric.all_reduce` and `fabric.all_gather` leave out the ranks
    that have run out of data.

    Registered with Fabric as `"ddp_join"`.

    Args:
        uneven_inputs: What to do when a rank runs out of data: `"join"` continues until the last rank has; `"stop"`
            ends the loop on all ranks when the first has; `"error"` raises.
        options: Arguments of `LoopStrategy`.

    Raises:
        ValueError: If `uneven_inputs` is none of these.
    """

    def __init__(self, *args: Any, uneven_inputs: UnevenInputs = "join", **options: Any) -> None:
        check_choice("uneven_inputs", uneven_inputs, get_args(UnevenInputs), 'Use "join" to train on all data.')
        super().__init__(*args, **options)
        self.uneven_inputs = uneven_inputs

    @override
    def compared_arguments(self) -> dict[str, object]:
        return {**super().compared_arguments(), "uneven_inputs": self.uneven_inputs}

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        given = super().distributed_sampler_kwargs
        return {**given, "rank": LightningInjectedRank(given["rank"])}

    @override
    def make_source(self) -> StepSource:
        return LockstepSource(self.steps_group, self.uneven_inputs)


class BalancedDDPStrategy(LoopStrategy):
    """`balanced_ddp` for Fabric: the loader's batch is the batch of all ranks, of which each computes a share.

    A rank without a sample of a batch gets a copy of one of its shares, as a rank without data of `DDPJoinStrategy`.
    Every rank draws the same batches, and fetches the samples of its share only.

    Registered with Fabric as `"balanced_ddp"`.

    Args:
        gpu0_batch_size: As for `lightning_ddp_ext.BalancedDDPStrategy`, also the arguments that follow.
        split: Proportion of the batch for each rank.
        balance: `"auto"`, the default, follows the time from the batch to the end of `fabric.backward` on each rank;
            `"even"` divides batches evenly.
        cost: Cost of a sample, by which the batches of all loaders are shared.
        virtual_ranks: Number of parts into which each batch is cut, of evaluation too: loaders give lists with the
            parts of this rank, and a training loop iterates over them with `parts`. None for no parts.
        options: Arguments of `LoopStrategy`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If more than one of `gpu0_batch_size`, `split` and `balance` is given or if one is out of range.
    """

    shares_batches = True
    balancer: ShareBalancer  # from the set-up of the environment on

    def __init__(
        self,
        *args: Any,
        gpu0_batch_size: int | None = None,
        split: Sequence[float] | None = None,
        balance: Balance | None = None,
        cost: Cost | None = None,
        virtual_ranks: int | None = None,
        **options: Any,
    ) -> None:
        self._rule = ChunkRule(gpu0_batch_size, split, balance)
        self._cost = None if cost is None else SampleCost(cost)
        check_virtual_ranks(virtual_ranks, cost=cost)
        super().__init__(*args, **options)
        self.cost = cost
        self.virtual_ranks = virtual_ranks
        self._tables: list[ShareTable] = []
        self._samplers: dict[ShareTable, PartSampler] = {}  # of loaders that are cut into parts
        if virtual_ranks is not None:
            self.reducer_type = partial(VirtualReducer, virtual_ranks, keeps_older=True)
            self._window = VirtualWindow(self._weight_rule.is_sum)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._rule.check_number(self.world_size, "rank")
        check_ranks(self.virtual_ranks, self.world_size)
        unit = "samples" if self.virtual_ranks is None else "virtual ranks"
        self.balancer = ShareBalancer(self._rule, self.world_size, self.root_device, rank_zero_info, unit=unit)

    @override
    def compared_arguments(self) -> dict[str, object]:
        return {**super().compared_arguments(), **self._rule.given, "cost": self.cost, **self._environment()}

    def _environment(self) -> dict[str, Any]:
        return {} if self.virtual_ranks is None else describe_environment(self.virtual_ranks, self.root_device)

    @property
    @override
    def distributed_sampler_kwargs(self) -> None:  # type: ignore[override]
        """None: every rank draws all samples."""
        return None

    @override
    def make_source(self) -> StepSource:
        table, index = ShareTable(self._rule, self.world_size, cost=self._cost), len(self._loaders)
        self._tables.append(table)
        self.balancer.add(table)
        # Rank 0 decides, because ranks may have drawn different numbers before they set up this loader.
        seeds = broadcast_object(torch.initial_seed(), self.steps_group, 0), index
        cut = partial(self._cut, table, lambda: (*source.seeds, self._loaders[index].epochs_begun))
        source: SharedSource = SharedSource(
            self.steps_group,
            table,
            seeds,
            lambda _: [self._loaders[index].epochs_begun],
            self.batch_dim,
            prepare=list if self.virtual_ranks is None else cut,
        )
        return source

    def _cut(self, table: ShareTable, seeds: Callable[[], tuple[int, ...]], loaders: Sequence[Any]) -> list[Any]:
        """Return a loader with batches of parts."""
        assert self.virtual_ranks is not None
        loader = cut_loader(loaders, self.virtual_ranks, seeds)
        self._samplers[table] = loader.batch_sampler
        return [loader]

    @contextmanager
    @override
    def iterating(self) -> Generator[LoopBatch, None, None]:
        for table in self._tables if self.virtual_ranks is None else ():
            table.avoids_single_samples = any(map(refuses_single_samples, self.modules))
        with self.balancer.interrupted(), super().iterating() as current:
            yield current
        if isinstance(self._window, VirtualWindow) and self._window.batch is current:
            self._window.check_has_ended()

    @override
    def begin_batch(self, current: LoopBatch, batch: Any, fetched: FetchedBatch) -> None:
        super().begin_batch(current, batch, fetched)
        self.balancer.begin_batch(current.shares)
        if not self.is_shadow:
            self.balancer.start()  # an evaluation, which has no backward pass, never stops it

    @override
    @allows_other_backward_passes
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        shares = [one.shares for one in self._new_batches() if one.shares is not None]
        if shares and self._reducer is not None:
            shared = combine_shares(shares[::-1], checks=not self._batches[-1].has_given_weight)
            self.balancer.count_batch(shared)
        super().backward(tensor, module, *args, **kwargs)
        self.balancer.stop()

    def parts(self, batch: Sequence[Any]) -> Generator[Any, None, None]:
        """Iterate over the parts of the batch that a loader has given last, for training; without parts, it is the one.

        Each part needs one `fabric.backward`, and is one virtual rank, with random numbers and buffers of its own. The
        gradient of the whole batch is there after the loop. On a rank without a part, the only one is a copy, see
        `is_shadow`.

        Raises:
            RanksOutOfStepError: If a part has no backward pass or several, or if the last loop has ended early.
            UnsynchronizedGradientsError: If gradients are dropped between parts, or are not of `fabric.backward`.
            UnsupportedFeatureError: If the batch is not the last one of a loader that was set up, or of several, or if
                `batch_weight` is set before the loop.
        """
        if self.virtual_ranks is None:
            yield batch
            return
        current, window, reducer = self._batches[-1], self._window, self._reducer
        assert isinstance(window, VirtualWindow)
        shared = self._find_shares(current, batch)
        if current.has_given_weight:
            raise UnsupportedFeatureError(
                "`fabric.strategy.batch_weight` was set outside of the loop over the parts of the batch, each of which"
                " has a weight of its own. Set it in this loop, before `fabric.backward`."
            )
        assert isinstance(reducer, VirtualReducer)
        current.loops += 1
        sampler, index = self._samplers[shared.table], shared.number - shared.table.first
        seeds, device = (*sampler.seeds(), index), self.root_device
        sizes = even_chunks(sampler.sizes[index], self.virtual_ranks)
        own = window.begin_batch(current, reducer, shared.sizes, sizes) or [-1]
        with ExitStack() as stack:
            refuse_calls(stack, self, *_AFTER_PARTS)
            for part, one in zip(own, batch, strict=False):
                current.weight = self._weigh(one, sizes[part])
                seed_process(*seeds, part, current.loops, device=device)  # the loader has used the other numbers
                window.begin_part(part, is_last=part == own[-1])
                yield one
                window.end_part(current.weight)
                if part != own[-1]:
                    self.balancer.start()
        current.has_given_weight = False
        seed_process(*seeds, self.virtual_ranks, current.loops, device=device)

    def _find_shares(self, current: LoopBatch, batch: Sequence[Any]) -> SharedBatch:
        """Return the shares of a batch of parts, if the only loop at a new batch has given it last."""
        shared: SharedBatch | None = current.shares
        if (
            self._reducer is None
            or shared is None
            or shared.number < shared.table.first  # another loop over the loader has begun
            or len(batch) != shared.sizes[self.global_rank] > 0
            or len(self._new_batches()) > 1
        ):
            raise UnsupportedFeatureError(
                "`fabric.strategy.parts` needs a module of `fabric.setup`, and the batch that a loop over a loader of"
                " `fabric.setup_dataloaders` has given last. Iterate over the parts of one loader before the next one"
                " gives a batch."
            )
        return shared

    @override
    def _loss_weight(self) -> float:
        if self.virtual_ranks is not None:
            raise UnsupportedFeatureError(
                "`virtual_ranks` does not support steps that depend on the loss of a closure, such as those of L-BFGS,"
                " as ranks know the losses of some parts. Call `step` without a closure, or let it return None."
            )
        return super()._loss_weight()

    @override
    def own_state(self) -> dict[str, Any]:
        return {_SHARES: self.balancer.state_dict(), _ENVIRONMENT: self._environment()}

    @override
    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.balancer.load_state_dict(state[_SHARES])

    @override
    def _resume(self, saved: Mapping[str, Any]) -> None:
        of_ranks = saved["of_ranks"]
        environment = load_state(of_ranks[0]).get(_ENVIRONMENT)
        if self.virtual_ranks is not None and environment:
            compare_environments(environment, self._environment())
            # The state between steps is the same on all ranks, so that any number of them restores it.
            saved = {**saved, "of_ranks": of_ranks[:1] * self.world_size}
        super()._resume(saved)
