"""`balanced_ddp` for Fabric: ranks share the batches of their loaders."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import allows_other_backward_passes
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext.batches.chunk_sizes import Balance, ChunkRule
from lightning_ddp_ext.distributed.exchange import broadcast_object
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.fabric.loaders import RNG, USED, FabricLoader, LoopBatch
from lightning_ddp_ext.fabric.strategies import DDPJoinStrategy
from lightning_ddp_ext.join.lockstep_loader import HasNextBatch, StepMaker
from lightning_ddp_ext.ranks.loaders import FetchedBatch
from lightning_ddp_ext.resume.rng_state import find_loader_rngs
from lightning_ddp_ext.shares.combined_loader import SharedLoader, agree_on_lead, share_steps
from lightning_ddp_ext.shares.costs import Cost, SampleCost
from lightning_ddp_ext.shares.samplers import GlobalBatches
from lightning_ddp_ext.shares.table import ShareTable, combine_shares, refuses_single_samples
from lightning_ddp_ext.steps.balancer import ShareBalancer

_SHARES, _TABLE, _SEEDS = "shares", "table", "seeds"


class SharedFabricLoader(FabricLoader):
    """A loader of global batches, which yields the share of this rank."""

    def __init__(self, loader: Any, strategy: "BalancedDDPStrategy", table: ShareTable, index: int) -> None:
        super().__init__(loader, strategy)
        self.table = table
        self._group = strategy.steps_group
        self._seeds = broadcast_object(torch.initial_seed(), self._group, 0), index
        self._shared = SharedLoader(loader, GlobalBatches(table, self._group, True, loader), strategy.batch_dim)
        table.lead = agree_on_lead([self._shared], self._group)
        strategy.balancer.add(table)
        self._stand_in: list[Any] = []

    @override
    def _make_steps(self, skip: int, current: LoopBatch) -> Iterator[tuple[Any, FetchedBatch]]:
        batches, has_next_batch = self._shared.batches, HasNextBatch(self._group)
        current.has_next_batch = has_next_batch if batches.asks else None
        batches.begin(self.table.begin_epoch(skip), *self._seeds, self._epoch)
        self.table.avoids_single_samples = any(map(refuses_single_samples, self._strategy.modules))
        maker = StepMaker(self._group, self._stand_in)
        fetched = self._rng.iterate(self._shared, [self._loader], skip, looks_ahead=batches.asks)
        taken = ((batch, self._shared.take()) for batch in fetched)
        return share_steps(maker, islice(taken, skip, None), [self._shared], has_next_batch, skip)

    @override
    def state(self) -> dict[str, Any]:
        given = super().state()
        is_within_epoch = self._used is not None
        return {**given, _SEEDS: list(self._seeds), _TABLE: self.table.state_dict(is_within_epoch)}

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._seeds = tuple(state[_SEEDS])
        generators = find_loader_rngs([self._loader], excluded=[getattr(self._loader, "dataset", None)])
        if RNG in state:
            self.table.load_state_dict(state[_TABLE])
        elif state[USED] and generators:
            raise UnsupportedFeatureError(
                "the checkpoint was saved in the middle of an epoch by another number of ranks, and a sampler has a"
                " `generator` of its own, whose state cannot be restored. Load it on as many ranks, or one that was"
                " saved between epochs."
            )


class BalancedDDPStrategy(DDPJoinStrategy):
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
        options: Arguments of `DDPCheckpointStrategy`.

    Raises:
        TypeError: If `uneven_inputs` is given.
        ValueError: If more than one of `gpu0_batch_size`, `split` and `balance` is given or if one is out of range.
    """

    strategy_name = "balanced_ddp"
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
        if "uneven_inputs" in options:
            raise TypeError("`uneven_inputs` is not needed: all ranks share the same batches. Delete the argument.")
        self._chunk_rule = ChunkRule(gpu0_batch_size, split, balance)
        self._cost = None if cost is None else SampleCost(cost)
        super().__init__(*args, **options)
        self.cost = cost

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._chunk_rule.check_number(self.world_size, "rank")
        self.balancer = ShareBalancer(self._chunk_rule, self.world_size, self.root_device, rank_zero_info)

    @override
    def compared_arguments(self) -> dict[str, object]:
        return {**super().compared_arguments(), **self._chunk_rule.given, "cost": self.cost}

    @property
    @override
    def distributed_sampler_kwargs(self) -> None:  # type: ignore[override]
        """None: every rank draws all samples."""
        return None

    @override
    def make_loader(self, dataloader: Any) -> FabricLoader:
        table = ShareTable(self._chunk_rule, self.world_size, cost=self._cost)
        return SharedFabricLoader(dataloader, self, table, len(self._loaders))

    @override
    def number_of_steps(self, length: int | None) -> int | None:
        return length

    @contextmanager
    @override
    def iterating(self) -> Generator[LoopBatch, None, None]:
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
