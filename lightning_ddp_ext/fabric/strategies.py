"""The strategies for `lightning.fabric.Fabric`."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import allows_other_backward_passes
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext._validation import check_choice
from lightning_ddp_ext.batches.chunk_sizes import Balance, ChunkRule
from lightning_ddp_ext.distributed.exchange import broadcast_object
from lightning_ddp_ext.fabric.loaders import LoopBatch
from lightning_ddp_ext.fabric.loop_strategy import LoopStrategy
from lightning_ddp_ext.loaders.lockstep_source import LockstepSource, UnevenInputs
from lightning_ddp_ext.loaders.samplers import LightningInjectedRank
from lightning_ddp_ext.loaders.step_loader import EvenSource, FetchedBatch, StepSource
from lightning_ddp_ext.shares.costs import Cost, SampleCost
from lightning_ddp_ext.shares.share_table import ShareTable, combine_shares, refuses_single_samples
from lightning_ddp_ext.shares.shared_source import SharedSource
from lightning_ddp_ext.steps.balancer import ShareBalancer

_SHARES = "shares"


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
        options: Arguments of `LoopStrategy`.

    Raises:
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
        **options: Any,
    ) -> None:
        self._rule = ChunkRule(gpu0_batch_size, split, balance)
        self._cost = None if cost is None else SampleCost(cost)
        super().__init__(*args, **options)
        self.cost = cost
        self._tables: list[ShareTable] = []

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._rule.check_number(self.world_size, "rank")
        self.balancer = ShareBalancer(self._rule, self.world_size, self.root_device, rank_zero_info)

    @override
    def compared_arguments(self) -> dict[str, object]:
        return {**super().compared_arguments(), **self._rule.given, "cost": self.cost}

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
        return SharedSource(
            self.steps_group, table, seeds, lambda _: [self._loaders[index].epochs_begun], self.batch_dim
        )

    @contextmanager
    @override
    def iterating(self) -> Generator[LoopBatch, None, None]:
        for table in self._tables:
            table.avoids_single_samples = any(map(refuses_single_samples, self.modules))
        with self.balancer.interrupted(), super().iterating() as current:
            yield current

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

    @override
    def own_state(self) -> dict[str, Any]:
        return {_SHARES: self.balancer.state_dict()}

    @override
    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.balancer.load_state_dict(state[_SHARES])
