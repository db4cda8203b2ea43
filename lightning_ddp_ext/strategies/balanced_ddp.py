"""Distributed training in which all ranks share one global batch."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import active_combined_loader, keep_loaders
from lightning_ddp_ext._lightning import CombinedLoader, Trainer
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext.batches.chunk_sizes import Balance, ChunkRule
from lightning_ddp_ext.distributed.exchange import broadcast_object
from lightning_ddp_ext.loaders.lockstep_source import HasNextBatch
from lightning_ddp_ext.loaders.predictions import PredictionsOn, none_finished
from lightning_ddp_ext.loaders.step_loader import StepLoader, iterables_and_mode
from lightning_ddp_ext.reducer.virtual_reducer import VirtualReducer
from lightning_ddp_ext.shares.costs import Cost, SampleCost
from lightning_ddp_ext.shares.share_table import ShareTable, refuses_single_samples
from lightning_ddp_ext.shares.shared_source import SharedSource
from lightning_ddp_ext.steps.balancer import RankTimes, ShareBalancer, has_own_memory
from lightning_ddp_ext.steps.virtual_ranks import (
    VirtualStepDriver,
    check_ranks,
    check_virtual_ranks,
    compare_environments,
    describe_environment,
)
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy, check_predictions_on


class BalancedDDPStrategy(ExplicitDDPStrategy):
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
        virtual_ranks: Number of parts into which each training batch is cut. A rank computes whole parts, one after
            another; the results are the same bits on any number of ranks up to this one. None for no parts.
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

    channels = 3  # the third for the active ranks
    agrees = True
    shares_batches = True

    def __init__(
        self,
        *args: Any,
        gpu0_batch_size: int | None = None,
        split: Sequence[float] | None = None,
        balance: Balance | None = None,
        cost: Cost | None = None,
        predictions_on: PredictionsOn = "all_ranks",
        virtual_ranks: int | None = None,
        **options: Any,
    ) -> None:
        if options.get("prefetch"):
            raise ValueError(
                f"`prefetch` must be 0 under `balanced_ddp`, got {options['prefetch']!r}: shares of a batch are decided"
                " shortly before it is fetched. Use `num_workers` of the loader."
            )
        self._rule = ChunkRule(gpu0_batch_size, split, balance)
        self._cost = None if cost is None else SampleCost(cost)
        super().__init__(*args, **options)
        self.predictions_on = check_predictions_on(predictions_on)
        self.gpu0_batch_size, self.split, self.balance, self.cost = (
            gpu0_batch_size,
            self._rule.given["split"],
            balance,
            cost,
        )
        self.virtual_ranks = virtual_ranks
        self._training_loader: StepLoader | None = None
        self._sampler_states: list[Any] = []  # of the samplers' generators, in a run that resumes
        check_virtual_ranks(virtual_ranks, cost=cost, ddp_comm_hook=self.comm_hook)
        if virtual_ranks is not None:
            self.reducer_type = partial(VirtualReducer, virtual_ranks)
            self.driver_type = partial(VirtualStepDriver, virtual_ranks)

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        ranks = self.num_nodes * self.num_processes
        self._rule.check_number(ranks, "rank")
        check_ranks(self.virtual_ranks, ranks)

    def take_timed_steps(self) -> list[RankTimes]:
        """Return and forget the optimizer steps whose times have arrived from all ranks, the same on every rank."""
        return [] if self.driver is None or self.driver.balance is None else self.driver.balance.take_timed()

    @override
    def keep_loaders(self, trainer: Trainer) -> None:
        keep_loaders(self._cleanup, trainer)

    @override
    def make_balance(self) -> ShareBalancer | None:
        resumed = {} if self._run is None else self._run.resumed_steps
        rule = None if self._run is None else self._rule
        parts = self.virtual_ranks
        balance = ShareBalancer(
            rule,
            self.world_size,
            self.root_device,
            rank_zero_info,
            parts is None and has_own_memory(self.root_device, self.parallel_devices),
            "samples" if parts is None else "virtual ranks",
        )
        # In evaluation, samplers that shuffle are seeded as the run of rank 0.
        # Without training, ranks have different seeds, and must shuffle alike.
        self._seed = broadcast_object(torch.initial_seed(), None, 0) if self._run is None else self._run.seed
        self._sampler_states = resumed.get("samplers", [])
        self._training_loader = None
        avoids_single = parts is None and refuses_single_samples(self.module)
        self._table = ShareTable(self._rule, self.world_size, avoids_single, self._cost)
        balance.add(self._table)
        if resumed and balance.load_state_dict(resumed["controller"]):
            self._table.load_state_dict(resumed["table"])
        shares = self._rule if balance.controller is None else "by their speed"
        by_cost = "" if self._cost is None else ", in units of `cost`"
        self.division = f"the ranks share each batch of the loader {shares}{by_cost}"
        if parts is not None:
            compare_environments(resumed.get("virtual_ranks", {}), describe_environment(parts, self.root_device))
            self.division = f"{parts} virtual ranks with {torch.get_num_threads()} threads; {self.division}"
        return balance

    @override
    def combine_loaders(self, given: Any, is_training: bool) -> CombinedLoader:
        driver, trainer = self._driver, self.module.trainer
        rng = None if self._run is None or not is_training else self._run.rng
        source = SharedSource(
            driver.group,
            self._table,
            [self._seed],
            lambda place: (trainer.current_epoch, int(rng is None), place),  # other numbers in evaluation
            self.batch_dim,
            HasNextBatch(driver.group) if rng is None else driver.ahead,
            [] if rng is None else self._sampler_states,
            none_finished if driver.predictions is None else driver.predictions.finished,
            partial(driver.cut, self._seed) if isinstance(driver, VirtualStepDriver) and rng is not None else list,
        )
        loader = StepLoader(*iterables_and_mode(given, is_training=rng is not None), source, rng)
        if rng is not None:
            self._training_loader, self._sampler_states = loader, []
            for one in loader.flattened:
                self._table.check_batch_size(getattr(getattr(one, "batch_sampler", None), "batch_size", None))
        self._loaders.add(loader)
        return loader

    @override
    def state_of_steps(self) -> dict[str, Any]:
        """Return the state of a run that resumes on any number of ranks, beside the position in the data."""
        loader, balance = self._training_loader, self._driver.balance
        assert balance is not None
        is_within_epoch, samplers = False, self._sampler_states
        if loader is not None:
            assert isinstance(loader.source, SharedSource)
            is_within_epoch, samplers = bool(loader.used), loader.source.sampler_states(loader)
        state = {
            "table": self._table.state_dict(is_within_epoch),
            "samplers": samplers,
            "controller": balance.state_dict(),
        }
        if self.virtual_ranks is not None:
            state["virtual_ranks"] = describe_environment(self.virtual_ranks, self.root_device)
        return state

    @override
    def load_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **options)
        if self.virtual_ranks is not None and self._resumed is not None and "virtual_ranks" in self._resumed["steps"]:
            # The RNG state between steps is the same on all ranks, so that any number of them restores it.
            self._resumed = {**self._resumed, "of_ranks": self._resumed["of_ranks"][:1] * self.world_size}
        return checkpoint

    @override
    def compared_arguments(self) -> dict[str, object]:
        own = {"cost": self.cost, "virtual_ranks": self.virtual_ranks}
        if self.virtual_ranks is not None:
            own["torch.get_num_threads()"] = torch.get_num_threads()
        return {**super().compared_arguments(), **self._rule.given, **own}

    @override
    def indices_of(self, dataloader_idx: int) -> Sequence[Any] | None:
        combined = active_combined_loader(self.module.trainer)
        assert isinstance(combined, StepLoader)
        assert isinstance(combined.source, SharedSource)
        return combined.source.indices_of(dataloader_idx)
