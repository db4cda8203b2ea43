"""Training steps that run again on copies of the module and the batch, beside a training run that does not change."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_ddp_ext._compat.lightning import takes_batch_idx
from lightning_ddp_ext._compat.torch import BatchNorm, replaced_collectives
from lightning_ddp_ext._lightning import DummyLogger, LightningModule, MixedPrecision, Trainer
from lightning_ddp_ext.errors import ImpossibleError, describe_error
from lightning_ddp_ext.replicas.replicated_step import transfer
from lightning_ddp_ext.resume.rng_state import capture_rng_state, preserved_rng_state
from lightning_ddp_ext.verification.operations import Operation, Recording

Gradients = list[tuple[str, Tensor]]
"""Gradients of parameters with their names, as vectors in float64."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step that has run again."""

    gradients: Gradients  # under manual optimization, the gradients that each optimizer step has seen
    losses: list[Tensor]  # of which it has run the backward pass
    module: Any  # the copy on which it has run
    recording: Recording | None = None

    @property
    def operations(self) -> list[Operation]:
        """The recorded operations."""
        return [] if self.recording is None else self.recording.operations

    @property
    def leading(self) -> set[int]:
        """Positions of the operations that lead to a loss."""
        return set() if self.recording is None else self.recording.leading_to(self.losses)


def find_batch_norms(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of batch normalisation that use the statistics of the batch, by their names."""
    return {name: part for name, part in module.named_modules() if isinstance(part, BatchNorm) and part.training}


class BatchReplay:
    """Copy of a batch and of the module before the batch, on which the training step can run again."""

    def __init__(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.module = module
        self.draws = False  # whether a step drew random numbers
        self.foreign_draws = ""  # what draws random numbers that the parts of a batch and ranks cannot repeat
        self._loss_dtypes: set[torch.dtype] = set()
        self._trainer = trainer
        self._batch_idx = batch_idx
        self._problem: Exception | None = None
        with preserved_rng_state(module.device):
            try:
                self._batch = copy.deepcopy(batch)
                self._copy = self._copied(module)
            except Exception as error:
                self._problem = error

    @property
    def batch(self) -> Any:
        """The copied batch, if there are copies."""
        if self._problem is not None:
            raise ImpossibleError(f"batch or module cannot be copied: {describe_error(self._problem)}")
        return self._batch

    @property
    def tolerance(self) -> float:
        """Largest relative difference that rounding explains."""
        kinds = self._loss_dtypes | {p.dtype for p in self._copy.parameters() if p.requires_grad}
        return float(min(max(torch.finfo(kind).eps for kind in kinds) ** 0.5, 0.01))

    @contextmanager
    def training_unaffected(self) -> Iterator[None]:
        """Restore the RNG state, and keep gradients from the module, which a lambda of a copy may call."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            with preserved_rng_state(self.module.device):
                yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)

    def run(
        self,
        batch: Any,
        *,
        transferred: bool = True,
        record: Callable[[Any], Recording] | None = None,
        refuses_collectives: bool = True,
        ends: bool = False,
        prepare: Callable[[nn.Module], Any] = lambda module: None,
    ) -> ReplayedStep:
        """Run the step on a batch and return its gradient; `record` makes a recording of its operations.

        `prepare` changes the module before, and `on_train_batch_end` after the step if it `ends`.
        """
        device, plugin = self.module.device, self._trainer.precision_plugin
        # No autocast, because its rounding would hide differences.
        precision = nullcontext() if isinstance(plugin, MixedPrecision) else plugin.train_step_context()
        alone: AbstractContextManager[Any] = nullcontext()
        if refuses_collectives:
            alone = replaced_collectives(lambda group, name: _refuse_collective, lambda group: group, lambda: None)
        try:
            with preserved_rng_state(device) as states, torch.enable_grad(), precision, alone, NoDropout(self._copy):
                module = self._copied(self._copy)
                batch = plugin.convert_input(copy.deepcopy(batch))
                recording = None if record is None else record(batch)
                losses: list[Tensor] = []

                def run_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
                    losses.append(loss)
                    self._loss_dtypes.add(loss.dtype)
                    if recording is not None:
                        recording.is_backward = True
                    module.backward(loss, *args, **kwargs)
                    if recording is not None:
                        recording.is_backward = False

                steps: Gradients = []
                if not module.automatic_optimization:
                    self._hold_optimizers(module, steps)
                    module.manual_backward = run_backward
                with nullcontext() if recording is None else recording:
                    if not transferred:
                        batch = transfer(batch, self.module, module, device, dataloader_idx=0)
                        if states != capture_rng_state(device):
                            self.foreign_draws = "the transfer of a batch draws random numbers"
                    prepare(module)
                    module.on_train_batch_start(batch, self._batch_idx)
                    output = module.training_step(*(batch, self._batch_idx)[: 1 + takes_batch_idx(module)])
                    if module.automatic_optimization:
                        loss = output.get("loss") if isinstance(output, Mapping) else output
                        if loss is None:
                            raise ImpossibleError("`training_step` returned None")
                        run_backward(loss)
                if ends:
                    module.on_train_batch_end(output, batch, self._batch_idx)
                now = capture_rng_state(device)
                self.draws |= states != now
                if any(states[one] != now[one] for one in ("python", "numpy")):
                    self.foreign_draws = "the step draws random numbers of Python or numpy"
        except ImpossibleError:
            raise
        except Exception as error:
            raise ImpossibleError(f"`training_step` failed on a copy of the module: {describe_error(error)}") from error
        gradients = [(name, flat_gradient(parameter)) for name, parameter in module.named_parameters()]
        return ReplayedStep(steps or gradients, losses, module, recording)

    def _hold_optimizers(self, module: Any, steps: Gradients) -> None:
        """Give a copy of the module optimizers that add the gradients they are given to `steps`, and change nothing.

        All backward passes of a step see the same parameters.
        """
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        parameters = dict(module.named_parameters())

        def hold(optimizer: Any) -> Any:
            held: Any = copy.copy(optimizer)
            own = [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
            held.param_groups = [
                {**group, "params": [parameters[name] for name in part]}
                for group, part in zip(optimizer.param_groups, own, strict=True)
            ]

            def step(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
                result = None if closure is None else closure()
                steps.extend((name, flat_gradient(parameters[name])) for part in own for name in part)
                return result

            @contextmanager
            def toggle(sync_grad: bool = True) -> Iterator[None]:
                module.toggle_optimizer(held)
                yield
                module.untoggle_optimizer(held)

            held.step, held.toggle_model, held.optimizer, held.state = step, toggle, held, {}
            return held

        optimizers = [hold(one) for one in self._trainer.optimizers]
        schedulers = copy.deepcopy(module.lr_schedulers())  # with separate optimizers
        module.trainer.optimizers = optimizers
        module.optimizers = lambda use_pl_optimizer=True: optimizers[0] if len(optimizers) == 1 else optimizers
        module.lr_schedulers = lambda: schedulers

    def _copied(self, module: LightningModule) -> Any:
        view = _TrainerView(self._trainer)
        copied: Any = copy.deepcopy(module, {id(self._trainer): view})
        copied.trainer = view
        copied.log = lambda *_, **__: None
        return copied


class _TrainerView:
    """The Trainer for a copy of the module: reads pass through, writes and logged values are dropped."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.logger = None if trainer.logger is None else DummyLogger()
        self.loggers = [DummyLogger() for _ in trainer.loggers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_trainer"], name)

    def __deepcopy__(self, memo: Any) -> "_TrainerView":
        return self


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class NoDropout(TorchFunctionMode):
    """Switches dropout off in the layers of a module for ever, and in functions, while it stays in training mode."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for part in module.modules():  # the mode sees neither kernels that apply it, nor recomputed activations
            if isinstance(part, nn.RNNBase | nn.MultiheadAttention):
                part.dropout = 0.0
            elif isinstance(part, _DROPOUT):
                part.p = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "training" in kwargs and ("dropout" in name or name == "multi_head_attention_forward"):
            kwargs["training"] = False
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def flat_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter as a vector in float64; zeros if it has none."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1).cpu().double()


def _refuse_collective(*_: Any, **__: Any) -> Any:
    raise ImpossibleError("`training_step` communicates between ranks, which the whole batch on one rank cannot do")
