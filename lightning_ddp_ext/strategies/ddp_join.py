"""Distributed training on ranks with different amounts of data."""

from collections.abc import Sequence
from typing import Any, get_args

from typing_extensions import override

from lightning_ddp_ext._lightning import CombinedLoader
from lightning_ddp_ext._validation import check_choice
from lightning_ddp_ext.loaders.lockstep_source import HasNextBatch, LockstepSource, RankedLoader, UnevenInputs
from lightning_ddp_ext.loaders.predictions import PredictionsOn
from lightning_ddp_ext.loaders.samplers import LightningInjectedRank, disable_sampler_padding
from lightning_ddp_ext.loaders.step_loader import StepLoader, iterables_and_mode
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy, check_predictions_on


class DDPJoinStrategy(ExplicitDDPStrategy):
    """One process per device, each with any number of batches: in lockstep, nothing repeated, nothing dropped.

    A rank that has run out of data stays in Lightning's loop with shadow steps: it does not run the module's step,
    adds nothing to the gradient, and steps its optimizer with the same gradient as all others. Global step,
    schedulers, validation, checkpoints and callbacks therefore agree on all ranks at any time, and so do parameters,
    buffers and the state of the optimizer. Each sample is used once, in training and in evaluation.

    While some ranks have run out of data, collectives that a step issues run among the active ranks, see
    `ActiveRankCollectives`. A sampler without padding and dropping replaces the one that Lightning injects; the user's
    distributed sampler stays.

    Registered as `"ddp_join"`.

    Args:
        uneven_inputs: What to do when a rank runs out of data: `"join"` continues until the last rank has; `"stop"`
            ends the epoch on all ranks when the first has, and logs what this drops; `"error"` raises.
        predictions_on: Which ranks `trainer.predict` returns the predictions of all ranks on: `"all_ranks"`, or
            `"rank_zero"`, with None on the others.
        options: Arguments of `ExplicitDDPStrategy`.

    Raises:
        ValueError: If `uneven_inputs` or `predictions_on` is none of these, or a communication hook has a state.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_ddp_ext import DDPJoinStrategy
        >>> trainer = Trainer(strategy=DDPJoinStrategy(), accelerator="cpu", devices=2, logger=False)
    """

    division = "each rank draws its own batches; ranks may have different numbers of them"
    channels = 3  # the third for the active ranks
    agrees = True

    def __init__(
        self,
        *args: Any,
        uneven_inputs: UnevenInputs = "join",
        predictions_on: PredictionsOn = "all_ranks",
        **options: Any,
    ) -> None:
        check_choice("uneven_inputs", uneven_inputs, get_args(UnevenInputs), 'Use "join" to train on all data.')
        super().__init__(*args, **options)
        self.uneven_inputs = uneven_inputs
        self.predictions_on = check_predictions_on(predictions_on)
        self._injects_sampler = False  # into the loader that Lightning prepares

    @override
    def combine_loaders(self, given: Any, is_training: bool) -> CombinedLoader:
        rng = None if self._run is None or not is_training else self._run.rng
        source = LockstepSource(
            self._driver.group,
            "join" if rng is None else self.uneven_inputs,  # evaluation includes every sample in any case
            HasNextBatch(self._driver.group) if rng is None else self._driver.ahead,
        )
        prefetcher = None if rng is None else self.make_prefetcher()
        loader = StepLoader(*iterables_and_mode(given, is_training=rng is not None), source, rng, prefetcher)
        self._loaders.add(loader)
        return loader

    @override
    def compared_arguments(self) -> dict[str, object]:
        return {**super().compared_arguments(), "uneven_inputs": self.uneven_inputs}

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        given = super().distributed_sampler_kwargs
        rank, ranks = given["rank"], given["num_replicas"]
        if self.is_preparing_loader and self.module.trainer.predicting:
            self._injects_sampler = True
            return {"num_replicas": 1, "rank": 0}  # whole batches are dealt out
        return {"num_replicas": ranks, "rank": LightningInjectedRank(rank)}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        disable_sampler_padding(dataloader)
        if self.module.trainer.predicting:
            is_shared, self._injects_sampler = self._injects_sampler, False
            dataloader = self.predictions.deal(dataloader, is_shared)
        if self.driver is None or self.world_size == 1:
            return dataloader
        return RankedLoader(dataloader, self.driver.group)

    @override
    def indices_of(self, dataloader_idx: int) -> Sequence[Any] | None:
        return () if self.predictions.place is None else self.predictions.indices_of(dataloader_idx)
