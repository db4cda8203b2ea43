"""Distributed training on ranks with different amounts of data."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import takes_dataloader_iter
from lightning_ddp_ext._compat.lightning_loaders import replace_prediction
from lightning_ddp_ext._validation import check_choice
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.join.combined_loader import RankedLoader
from lightning_ddp_ext.join.lockstep_loader import UnevenInputs
from lightning_ddp_ext.join.predictions import Finished, NoPrediction, Predictions, PredictionsOn, none_finished
from lightning_ddp_ext.join.samplers import LightningInjectedRank, disable_sampler_padding
from lightning_ddp_ext.join.shadow_steps import LockstepSteps
from lightning_ddp_ext.ranks.steps import RankGradient, RankSteps
from lightning_ddp_ext.reducer.all_reduce import takes_group
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy


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
    rank_steps: LockstepSteps | None

    channels = 3  # the third for the active ranks, and for messages

    def __init__(
        self,
        *args: Any,
        uneven_inputs: UnevenInputs = "join",
        predictions_on: PredictionsOn = "all_ranks",
        **options: Any,
    ) -> None:
        check_choice("uneven_inputs", uneven_inputs, get_args(UnevenInputs), 'Use "join" to train on all data.')
        check_choice("predictions_on", predictions_on, get_args(PredictionsOn), 'Use "rank_zero" to save memory.')
        super().__init__(*args, **options)
        if self.comm_hook is not None and not (takes_group(self.comm_hook) and self.comm_state is None):
            raise ValueError(
                f"`ddp_comm_hook` must be one of torch's that keep no state, such as `fp16_compress_hook`, and"
                f" `ddp_comm_state` None, got {self.comm_hook!r}: a hook with state communicates on a group without"
                " the ranks that have run out of data. Leave it out, or use `ddp_checkpoint`."
            )
        self.uneven_inputs = uneven_inputs
        self.predictions_on = predictions_on
        # `PredictionWriter` sets it: returns the batches that an interrupted run has predicted.
        self.find_finished: Callable[[], Finished] | None = None
        self._injects_sampler = False  # into the loader that Lightning prepares

    @property
    def is_shadow(self) -> bool:
        """Whether this rank has run out of data, while others make a step."""
        return self.rank_steps is not None and self.rank_steps.participation.is_shadow

    @override
    def setup(self, trainer: Trainer) -> None:
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            if takes_dataloader_iter(trainer.lightning_module, step):
                raise UnsupportedFeatureError(
                    f"`{step}(self, dataloader_iter)` fetches batches itself, so that ranks cannot agree on who has"
                    " one. Take the batch instead."
                )
        super().setup(trainer)
        if trainer.predicting:
            replace_prediction(
                self._cleanup, trainer, self._combine_predicted, self.indices_of, self._steps.end_batch,
                lambda output: not isinstance(output, NoPrediction),
                lambda outputs: self.predictions.merge(outputs),
            )  # fmt: skip

    @property
    def _steps(self) -> LockstepSteps:
        assert self.rank_steps is not None
        return self.rank_steps

    @property
    def predictions(self) -> Predictions:
        """The predictions of this rank, while the Trainer predicts."""
        assert self._steps.predictions is not None
        return self._steps.predictions

    def _combine_predicted(self, given: Any) -> CombinedLoader:
        finished = none_finished if self.find_finished is None else self.find_finished()
        self._steps.predictions = Predictions(
            self.module.trainer, self._steps.group, self.batch_dim, self.predictions_on, finished
        )
        return self.combine_loaders(given, is_training=False)

    def indices_of(self, dataloader_idx: int) -> Sequence[Any] | None:
        """Return the indices of batches of a loader of predictions; None if Lightning has to find them."""
        return () if self.predictions.place is None else self.predictions.indices_of(dataloader_idx)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.predictions.run(partial(super().predict_step, *args, **kwargs))

    @override
    def make_rank_steps(self, gradient: RankGradient | None) -> RankSteps:
        trainer = self.module.trainer
        return LockstepSteps(
            self._cleanup, trainer, self._samples, gradient, self.uneven_inputs, self._connection.timeout, self._watch
        )

    @override
    def combine_loaders(self, given: Any, is_training: bool) -> CombinedLoader:
        if not is_training or self._run is None:
            return self._steps.combine_loaders(given, None)
        return self._steps.combine_loaders(given, self._run.rng, self.make_prefetcher())

    @override
    def compared_arguments(self) -> dict[str, object]:
        own = {"uneven_inputs": self.uneven_inputs, "predictions_on": self.predictions_on}
        return {**super().compared_arguments(), **own}

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
        if self.rank_steps is None or self.world_size == 1:
            return dataloader
        return RankedLoader(dataloader, self.rank_steps.group)

    @override
    def teardown(self) -> None:
        self.find_finished = None
        super().teardown()

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        group = None if self.rank_steps is None else self.rank_steps.active_group
        if group is None:
            return super().reduce_boolean_decision(decision, all)
        agreeing = int(self.reduce(torch.tensor(int(decision), device=self.root_device), group, "sum"))
        return agreeing == group.size() if all else agreeing > 0

    @override
    def sizes_group(self) -> dist.ProcessGroup | None:
        return (self.rank_steps and self.rank_steps.active_group) or super().sizes_group()
