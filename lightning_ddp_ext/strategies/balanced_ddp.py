"""Distributed training in which all ranks share one global batch."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import active_combined_loader, keep_loaders
from lightning_ddp_ext.batches.chunk_sizes import Balance, ChunkRule
from lightning_ddp_ext.distributed.exchange import broadcast_object
from lightning_ddp_ext.join.predictions import PredictionsOn
from lightning_ddp_ext.loaders.step_loader import StepLoader
from lightning_ddp_ext.ranks.steps import RankGradient, RankSteps
from lightning_ddp_ext.shares.balancer import TimedStep
from lightning_ddp_ext.shares.costs import Cost, SampleCost
from lightning_ddp_ext.shares.shared_source import SharedSource
from lightning_ddp_ext.shares.steps import SharedBatchSteps
from lightning_ddp_ext.shares.table import ShareTable, refuses_single_samples
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy


class BalancedDDPStrategy(DDPJoinStrategy):
    """One process per device; the loader's batch is the global batch, of which each rank fetches and computes a share.

    Any number of ranks sees the same samples in the same optimizer step, and computes the gradient of the whole batch.
    A rank without a sample of a batch makes a shadow step, see `DDPJoinStrategy`.

    Registered as `"balanced_ddp"`.

    Args:
        gpu0_batch_size: Most samples of a batch that rank 0 gets, also with `cost`, and at most an even share; the
            others divide the rest evenly. 0 gives it none.
        split: Proportion of the batch for each rank, such as `[2, 3, 3]`.
        balance: `"auto"`, the default, measures the ranks and moves samples towards the fastest ones; `"even"` divides
            batches evenly. `Trainer(deterministic=True)` turns `"auto"` into `"even"`, because shares that follow
            measured times change the order of floating-point additions.
        cost: Cost of a sample, to which its time is proportional: shares of training batches then have equal costs, or
            costs in the proportions above, instead of numbers of samples. A function of a sample of the dataset;
            `"length"` for the length of its longest array, text or list of numbers; or `"padded_length"` if the
            loader pads samples to the longest one, so that samples of similar length come together.
        predictions_on: As for `DDPJoinStrategy`.
        options: Arguments of `ExplicitDDPStrategy`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, if more than one of `gpu0_batch_size`, `split` and `balance` is
            given, if `prefetch` is not 0, or, when ranks have been started, if `split` has not as many entries as there
            are ranks.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_ddp_ext import BalancedDDPStrategy
        >>> trainer = Trainer(strategy=BalancedDDPStrategy(split=[1, 3]), accelerator="cpu", devices=2, logger=False)
    """

    shares_batches = True
    rank_steps: SharedBatchSteps | None

    def __init__(
        self,
        *args: Any,
        gpu0_batch_size: int | None = None,
        split: Sequence[float] | None = None,
        balance: Balance | None = None,
        cost: Cost | None = None,
        predictions_on: PredictionsOn = "all_ranks",
        **options: Any,
    ) -> None:
        if options.get("uneven_inputs", "join") != "join":  # LightningCLI fills in defaults of the base class
            raise TypeError("`uneven_inputs` is not needed: all ranks share the same batches. Delete the argument.")
        if options.get("prefetch"):
            raise ValueError(
                f"`prefetch` must be 0 under `balanced_ddp`, got {options['prefetch']!r}: shares of a batch are decided"
                " shortly before it is fetched. Use `num_workers` of the loader."
            )
        self._rule = ChunkRule(gpu0_batch_size, split, balance)
        self._cost = None if cost is None else SampleCost(cost)
        super().__init__(*args, predictions_on=predictions_on, **options)
        self.gpu0_batch_size = gpu0_batch_size
        self.split = None if split is None else list(split)
        self.balance = balance
        self.cost = cost

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._rule.check_number(self.num_nodes * self.num_processes, "rank")

    def take_timed_steps(self) -> list[TimedStep]:
        """Return and forget the optimizer steps whose times have arrived from all ranks, the same on every rank."""
        return [] if self.rank_steps is None else self.rank_steps.balancer.take_timed()

    @override
    def keep_loaders(self, trainer: Trainer) -> None:
        keep_loaders(self._cleanup, trainer)

    @override
    def make_rank_steps(self, gradient: RankGradient | None) -> RankSteps:
        # In evaluation, samplers that shuffle are seeded as the run of rank 0.
        seed = broadcast_object(torch.initial_seed(), None, 0) if self._run is None else self._run.seed
        steps = SharedBatchSteps(
            self._cleanup,
            self.module.trainer,
            self._samples,
            gradient,
            self._connection.timeout,
            self._watch,
            ShareTable(self._rule, self.world_size, refuses_single_samples(self.module), self._cost),
            seed,
            {} if self._run is None else self._run.resumed_steps,
        )
        rule = self._rule if steps.balancer.controller is None else "by their speed"
        by_cost = "" if self._cost is None else ", in units of `cost`"
        self.division = f"the ranks share each batch of the loader {rule}{by_cost}"
        return steps

    @override
    def compared_arguments(self) -> dict[str, object]:
        return {
            **super().compared_arguments(),
            "gpu0_batch_size": self.gpu0_batch_size,
            "split": self.split,
            "balance": self.balance,
            "cost": self.cost,
        }

    @override
    def indices_of(self, dataloader_idx: int) -> Sequence[Any] | None:
        combined = active_combined_loader(self.module.trainer)
        assert isinstance(combined, StepLoader)
        assert isinstance(combined.source, SharedSource)
        return combined.source.indices_of(dataloader_idx)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return ExplicitDDPStrategy.process_dataloader(self, dataloader)
