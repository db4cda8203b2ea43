"""Distributed training on ranks with different amounts of data."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import takes_dataloader_iter
from lightning_ddp_ext._compat.loops import leaves_out_backward
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.join.combined_loader import RankedLoader
from lightning_ddp_ext.join.lockstep_loader import UNEVEN_INPUTS, UnevenInputs
from lightning_ddp_ext.join.samplers import LightningInjectedRank, disable_sampler_padding
from lightning_ddp_ext.join.shadow_steps import Lockstep
from lightning_ddp_ext.join.training_state import StepMirror
from lightning_ddp_ext.reducer.comm_hooks import takes_group
from lightning_ddp_ext.strategies.base import widened
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy


class DDPJoinStrategy(ExplicitDDPStrategy):
    """One process per device, each with any number of batches: in lockstep, nothing repeated, nothing dropped.

    A rank that has run out of data goes on through Lightning's loop with shadow steps: it does not run the module's
    step, adds nothing to the gradient, and steps its optimizer with the same gradient as all others. Global step,
    schedulers, validation, checkpoints and callbacks therefore agree on all ranks at any time, and so do parameters,
    buffers and the state of the optimizer. Each sample counts once, in training and in evaluation.

    Collectives that a step issues while some ranks have run out of data are those of the ranks that still have some,
    see `ActiveRankCollectives`. A sampler without padding and dropping replaces Lightning's; a sampler of your own
    stays.

    Registered as `"ddp_join"`.

    Args:
        uneven_inputs: What to do when a rank runs out of data: `"join"` goes on until the last rank has; `"stop"` ends
            the epoch on all ranks when the first has, and says how many samples that leaves out; `"error"` raises.
        options: Arguments of `ExplicitDDPStrategy`.

    Raises:
        ValueError: If `uneven_inputs` is none of these, or a communication hook has a state of its own.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_ddp_ext import DDPJoinStrategy
        >>> trainer = Trainer(strategy=DDPJoinStrategy(), accelerator="cpu", devices=2, logger=False)
    """

    strategy_name = "ddp_join"

    def __init__(self, *args: Any, uneven_inputs: UnevenInputs = "join", **options: Any) -> None:
        if uneven_inputs not in UNEVEN_INPUTS:
            raise ValueError(
                f"`uneven_inputs` must be one of {', '.join(map(repr, UNEVEN_INPUTS))}, got {uneven_inputs!r}. Use"
                ' "join" to train on all data.'
            )
        super().__init__(*args, **options)
        if self._comm_hook is not None and not (takes_group(self._comm_hook) and self._comm_state is None):
            raise ValueError(
                f"`ddp_comm_hook` must be one of torch's that keep no state, such as `fp16_compress_hook`, and"
                f" `ddp_comm_state` None, got {self._comm_hook!r}: what others send would not reach ranks without data."
                " Leave it out, or use `ddp_checkpoint`."
            )
        self.uneven_inputs = uneven_inputs
        self._lockstep: Lockstep | None = None
        self._allowed_no_batch = False

    @property
    def is_shadow(self) -> bool:
        """Whether this rank has run out of data, while others make a step."""
        return self._lockstep is not None and self._lockstep.is_shadow

    @override
    def setup(self, trainer: Trainer) -> None:
        _refuse_iterators(trainer)
        super().setup(trainer)
        self._begin_lockstep(trainer)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._begin_lockstep(trainer)  # `configure_optimizers` may ask for the number of steps, which loads the data
        super().setup_optimizers(trainer)

    @override
    def _combine(self, given: Any, is_training: bool) -> CombinedLoader:
        if self._lockstep is None:
            return super()._combine(given, is_training)
        return self._lockstep.combine(given, is_training)

    @override
    def _watch_logging(self, trainer: Trainer) -> None:
        """Leave it to the lockstep, which reduces the values of a step together."""

    def _begin_lockstep(self, trainer: Trainer) -> None:
        if self._lockstep is None:
            own = [] if self.reducer is None else [self.reducer.process_group]
            # A rank may have no samples at all.
            self._allowed_no_batch = self._module.allow_zero_length_dataloader_with_multiple_devices
            self._module.allow_zero_length_dataloader_with_multiple_devices = True
            rng = None if self._run is None else self._run.rng
            mirror = None if self.reducer is None else StepMirror(trainer, self._module, self.reducer)
            self._lockstep = Lockstep(
                trainer,
                self._module,
                self.uneven_inputs,
                self._timeout,
                own,
                self._watch,
                rng,
                self._samples,
                mirror,
            )
            if self._step is not None:
                self._step.has_next_batch = self._lockstep.has_next_batch

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        given = super().distributed_sampler_kwargs
        rank, ranks = given["rank"], given["num_replicas"]
        if self._prepares_loader and self._module.trainer.predicting:
            # Lightning's sampler for predictions refuses ranks without samples.
            return {"num_replicas": 1, "rank": LightningInjectedRank(rank, ranks, value=0)}
        return {"num_replicas": ranks, "rank": LightningInjectedRank(rank, ranks)}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        disable_sampler_padding(dataloader)
        if self._lockstep is None or self.world_size == 1 or self._module.trainer.predicting:
            return dataloader
        return RankedLoader(dataloader, self._lockstep.group)

    @override
    def _take_batch(self, batch: Any) -> None:
        super()._take_batch(batch)
        if self._lockstep is not None:
            self._lockstep.begin_step(batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        lockstep, step = self._lockstep, self._step
        assert lockstep is not None
        assert step is not None
        if lockstep.participation is not None:
            step.active = lockstep.participation.active
        if lockstep.is_shadow:
            step.begin_without_data()
        output = lockstep.train(functools.partial(super().training_step, *args, **kwargs), self._synchronize_nothing)
        if not self._module.automatic_optimization or leaves_out_backward(self._module.trainer):
            # Here, and not with the gradient: ranks without data know what has been logged when the step is over.
            lockstep.logged.synchronize(step.batch_weight)
        return output

    def _synchronize_nothing(self) -> None:
        with self._synchronize():
            pass

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self._lockstep is not None
        return self._lockstep.evaluate(functools.partial(super().validation_step, *args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self._lockstep is not None
        return self._lockstep.evaluate(functools.partial(super().test_step, *args, **kwargs))

    @override
    def _run_backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> None:
        assert self._lockstep is not None
        if self._lockstep.is_shadow:
            return
        with self._lockstep.among_active():
            super()._run_backward(closure_loss, optimizer, *args, **kwargs)

    @override
    @contextmanager
    def _synchronize(self) -> Iterator[None]:
        lockstep, step = self._lockstep, self._step
        assert lockstep is not None
        assert step is not None
        if not self._module.automatic_optimization:
            if not step.is_blocked and not lockstep.is_shadow:
                lockstep.announce_backward()
            with step.synchronize():
                yield
            return
        with step.synchronize(lockstep.logged.note):
            yield
        lockstep.logged.synchronize(step.batch_weight, step.notes)

    @override
    def reduce(
        self, tensor: Tensor, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        lockstep = self._lockstep
        if lockstep is None or group is not None:
            return super().reduce(tensor, group, reduce_op)
        reduce = functools.partial(super().reduce, group=lockstep.active_group, reduce_op=reduce_op)
        if not isinstance(reduce_op, str):
            return reduce(tensor)
        return lockstep.logged.reduce(widened(tensor, reduce_op), reduce_op, reduce)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        group = None if self._lockstep is None else self._lockstep.active_group
        if group is None:
            return super().reduce_boolean_decision(decision, all)
        agreeing = int(self.reduce(torch.tensor(int(decision), device=self.root_device), group, "sum"))
        return agreeing == group.size() if all else agreeing > 0

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        gathered = super().all_gather(tensor, group, sync_grads)
        if self._lockstep is None or group not in (None, dist.group.WORLD):
            return gathered
        rows = self._lockstep.gathered_rows
        return gathered if rows is None else gathered[list(rows)]

    @override
    def teardown(self) -> None:
        with ExitStack() as stack:
            stack.callback(super().teardown)
            if self._lockstep is not None:
                self._module.allow_zero_length_dataloader_with_multiple_devices = self._allowed_no_batch
                stack.callback(self._lockstep.close)
            self._lockstep = None

    @override
    def _arguments(self) -> dict[str, object]:
        return {**super()._arguments(), "uneven_inputs": self.uneven_inputs}


def _refuse_iterators(trainer: Trainer) -> None:
    module = trainer.lightning_module
    for step in ("training_step", "validation_step", "test_step"):
        if takes_dataloader_iter(module, step):
            raise UnsupportedFeatureError(
                f"`{step}(self, dataloader_iter)` fetches batches itself, so that ranks cannot agree on who has one."
                " Take the batch instead."
            )
