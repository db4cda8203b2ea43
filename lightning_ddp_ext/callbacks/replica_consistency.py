"""A callback that compares the replicas of all ranks bit by bit."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_ext._lightning import (
    Callback,
    DDPStrategy,
    DeepSpeedStrategy,
    LightningModule,
    Trainer,
    rank_zero_warn,
)
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext._validation import check_choice, check_flag, check_integer
from lightning_ddp_ext.consistency import (
    ReplicaDifference,
    find_difference,
    hash_training_state,
    name_training_state,
)
from lightning_ddp_ext.errors import ReplicaMismatchError

_REACTIONS = ("raise", "warn")


class ReplicaConsistency(Callback):
    """Compares parameters, buffers and optimizer states of all ranks after optimizer steps and when training ends.

    The number of steps and the settings of the optimizers, such as learning rates, are compared too. Equal replicas
    are read once and cost a collective of 8 bytes per rank. After a difference, every rank names the first tensor that
    differs, the ranks, and the size of the difference. When training ends, the SHA-256 of the training state is logged,
    also on a single process, to compare runs.

    The callback works with `ddp` and strategies derived from it, which keep a whole replica on every rank. With other
    strategies and with a single process it compares nothing, and prints the reason once. The state of optimizers that
    are sharded over ranks is skipped.

    Args:
        every_n_steps: Compare after this many optimizer steps (`trainer.global_step`); under manual optimization,
            after this many batches.
        on_difference: `"raise"` stops training with an error, `"warn"` only warns.
        buffers: Whether to compare buffers. With None, buffers are compared unless torch's DistributedDataParallel
            wraps the module, which lets the statistics of batch normalisation differ until the next forward pass.
        ignore: Names of parameters and buffers that may differ; `*` matches any characters.

    Attributes:
        comparisons: Number of comparisons since training started.
        seconds: Total time of the comparisons. On an accelerator it includes waiting for the end of the step.
        training_seconds: Time from the start of training to the last comparison.

    Raises:
        TypeError: If an argument has the wrong type, such as a single string for `ignore`.
        ValueError: If `every_n_steps` is below 1, or `on_difference` is unknown.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        on_difference: str = "raise",
        buffers: bool | None = None,
        ignore: Sequence[str] = (),
    ) -> None:
        check_integer("every_n_steps", every_n_steps, least=1, remedy="Remove the callback to compare nothing.")
        check_choice("on_difference", on_difference, _REACTIONS, 'Use "raise" if unsure.')
        if buffers is not None:
            check_flag("buffers", buffers)
        if isinstance(ignore, str):
            raise TypeError(f"`ignore` must be a list of names, got {ignore!r}. Use [{ignore!r}].")
        if not isinstance(ignore, Sequence) or not all(isinstance(name, str) for name in ignore):
            raise TypeError(f"`ignore` must be a list of names, got {ignore!r}. Leave it out to compare everything.")
        self.every_n_steps = every_n_steps
        self.on_difference = on_difference
        self.buffers = buffers
        self.ignore = tuple(ignore)
        self._reset(0)

    def _reset(self, step: int) -> None:
        self.comparisons = 0
        self.seconds = 0.0
        self.training_seconds = 0.0
        self._active = self._with_buffers = False
        self._started = time.perf_counter()
        self._batches = self._compared_batches = 0
        self._count = step
        self._equal_after: int | None = None
        self._differed = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reset(0 if not pl_module.automatic_optimization else trainer.global_step)
        reason = _why_not(trainer, pl_module)
        self._active = reason is None
        if reason is not None:
            rank_zero_info(f"ReplicaConsistency compares nothing: {reason}.")
            return
        wrapped = isinstance(trainer.strategy.model, DistributedDataParallel)
        self._with_buffers = not wrapped if self.buffers is None else self.buffers
        if not self._with_buffers and any(True for _ in pl_module.buffers()):
            because = "" if self.buffers is not None else ", which DistributedDataParallel lets differ between steps"
            rank_zero_info(f"ReplicaConsistency does not compare buffers{because}.")
        if any(_is_sharded(optimizer) for optimizer in trainer.optimizers):
            rank_zero_info("ReplicaConsistency does not compare the state of optimizers that are sharded over ranks.")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._active:
            return
        self._batches += 1
        # All ranks have to compare after the same batch, even if they have stepped differently by mistake.
        count = trainer.global_step if pl_module.automatic_optimization else self._batches
        due = count // self.every_n_steps > self._count // self.every_n_steps
        self._count = count
        if due:
            self._compare(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = hash_of_training(trainer, pl_module)
        if state is not None:
            rank_zero_info(f"The training state after {trainer.global_step} optimizer steps has the SHA-256 {state}.")
        if not self._active:
            return
        if self._batches > self._compared_batches:
            self._compare(trainer, pl_module)
        if not self._differed:
            share = self.seconds / self.training_seconds if self.training_seconds else 0.0
            rank_zero_info(
                f"Replicas were identical in {self.comparisons} of {self.comparisons} comparisons, which took"
                f" {self.seconds:.2f} s, {share:.1%} of training."
            )

    def _compare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        started = time.perf_counter()
        optimizers = [optimizer for optimizer in trainer.optimizers if not _is_sharded(optimizer)]
        state = name_training_state(pl_module, optimizers, buffers=self._with_buffers, ignore=self.ignore)
        reducer = getattr(trainer.strategy, "reducer", None)
        if self._with_buffers and reducer is not None:  # integers become equal after all hooks
            kept = {f"buffer `{name}`": one for name, one in reducer.buffers.settled().items()}
            state |= {name: one for name, one in kept.items() if name in state}
        state["`trainer.global_step`"] = torch.tensor(trainer.global_step)
        difference = find_difference(state)
        now = time.perf_counter()
        self.seconds += now - started
        self.training_seconds = now - self._started
        self.comparisons += 1
        self._compared_batches = self._batches
        if difference is None:
            self._equal_after = trainer.global_step
            return
        self._differed = True
        message = self._describe(difference, trainer.global_step)
        if self.on_difference == "raise":
            raise ReplicaMismatchError(message)
        rank_zero_warn(message, category=UserWarning)

    def _describe(self, difference: ReplicaDifference, step: int) -> str:
        equal = "" if self._equal_after is None else f", unlike after step {self._equal_after}"
        if difference.name.startswith("buffer"):
            name = difference.name.split("`")[1]
            remedy = f"If that buffer may differ, exclude it with `ignore=[{name!r}]`."
        elif self.every_n_steps > 1:
            remedy = "Set `every_n_steps=1` to find the step of the first difference."
        else:
            remedy = "Look for code that runs on one rank only in that step, such as under `if rank == 0`."
        return f"replicas differ after step {step}{equal}: {difference.text}. {remedy}"


def _why_not(trainer: Trainer, module: LightningModule) -> str | None:
    """Return the reason why replicas cannot be compared, or None."""
    strategy = trainer.strategy
    if trainer.world_size == 1:
        return "there is one process"
    # DeepSpeed shards parameters, although its strategy is a subclass of DDPStrategy.
    if not isinstance(strategy, DDPStrategy) or isinstance(strategy, DeepSpeedStrategy):
        return f"{type(strategy).__name__} keeps no whole replica on every rank"
    if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):  # a DTensor
        return "parameters are sharded over ranks"
    return None


def hash_of_training(trainer: Trainer, module: LightningModule) -> str | None:
    """Return the SHA-256 of the training state without sharded optimizers; None if parameters are sharded."""
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in module.parameters())
    if is_sharded or (trainer.world_size > 1 and _why_not(trainer, module) is not None):
        return None
    return hash_training_state(module, [one for one in trainer.optimizers if not _is_sharded(one)])


def _is_sharded(optimizer: Optimizer) -> bool:
    # Lightning recognises torch's ZeroRedundancyOptimizer by this method.
    return hasattr(optimizer, "consolidate_state_dict")
