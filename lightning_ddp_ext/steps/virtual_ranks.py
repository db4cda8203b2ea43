"""Steps of a rank that runs its virtual ranks, the parts of a batch, one after another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import LBFGS
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import replace_attributes
from lightning_ddp_ext._compat.lightning_logging import logged_in_step, set_latest, set_logged_batch
from lightning_ddp_ext._compat.lightning_loops import leaves_out_backward
from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext._lightning import (
    STEP_OUTPUT,
    DDPStrategy,
    MixedPrecision,
    StochasticWeightAveraging,
    Trainer,
    is_overridden,
    rank_zero_warn,
)
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext._validation import check_integer
from lightning_ddp_ext.batches.chunk_sizes import even_chunks
from lightning_ddp_ext.batches.weights import BatchWeights
from lightning_ddp_ext.consistency import hash_training_state
from lightning_ddp_ext.distributed.exchange import gather_different
from lightning_ddp_ext.errors import ReplicaMismatchError, UnsupportedFeatureError
from lightning_ddp_ext.loaders.step_loader import FetchedBatch
from lightning_ddp_ext.reducer.virtual_reducer import VirtualReducer
from lightning_ddp_ext.shares.parts import PartSampler, cut_loader, seed_process
from lightning_ddp_ext.steps.balancer import ShareBalancer
from lightning_ddp_ext.steps.driver import StepDriver


class VirtualStepDriver(StepDriver):
    """Drives the steps of a rank that computes several virtual ranks, in parts of a batch."""

    balance: ShareBalancer
    weights: BatchWeights
    _reducer: VirtualReducer
    _factor = 1.0  # on the loss of the last part
    _unit = 0.0  # weight of a part whose loss has the factor 1; 0 before the first batch

    def __init__(self, virtual_ranks: int, cleanup: ExitStack, trainer: Trainer, *args: Any) -> None:
        super().__init__(cleanup, trainer, *args)
        self._parts = virtual_ranks
        if self.gradient is not None:
            assert isinstance(self.gradient.reducer, VirtualReducer)
            self._reducer = self.gradient.reducer
            self._refuse_unsupported()

    def _refuse_unsupported(self) -> None:
        hooks = (self._module, self._trainer.datamodule)  # type: ignore[attr-defined]
        moves = any(one is not None and is_overridden("on_before_batch_transfer", one) for one in hooks)
        swa = any(isinstance(one, StochasticWeightAveraging) for one in self._trainer.callbacks)  # type: ignore[attr-defined]
        for is_present, problem in (
            (
                swa,
                "`StochasticWeightAveraging`, which changes statistics of layers after training. Use `WeightAveraging`",
            ),
            (not self._module.automatic_optimization, "manual optimization. Leave one of them out"),
            (moves, "`on_before_batch_transfer`, which would get several parts. Use `on_after_batch_transfer`"),
        ):
            if is_present:
                raise UnsupportedFeatureError(f"`virtual_ranks` does not support {problem}.")

    @override
    def begin(self, batch: Any, fetched: FetchedBatch) -> bool:
        if not self._trainer.training:
            return super().begin(batch, fetched)
        super().begin([], fetched)  # `run` begins with each part
        return True

    def cut(self, seed: int, loaders: Sequence[Any]) -> list[Any]:
        """Return the training loader with batches of parts, which the ranks share."""
        loader = cut_loader(loaders, self._parts, lambda: (seed, self._trainer.current_epoch))
        self._sampler: PartSampler = loader.batch_sampler
        return [loader]

    def _seed(self, part: int) -> None:
        # The loader has used the same numbers without the last one.
        index = self._trainer.fit_loop.epoch_loop.batch_idx
        seed_process(*self._sampler.seeds(), index, part, 1, device=self._trainer.strategy.root_device)

    @override
    def run(self, step: Callable[..., STEP_OUTPUT], *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the step on each part, with the backward pass of all parts but the last; return the last output."""
        shared, weights, trainer = self.balance.shared, self.weights, self._trainer
        assert shared is not None
        if self._passes and any(isinstance(one, LBFGS) for one in trainer.optimizers):
            raise UnsupportedFeatureError("`virtual_ranks` does not support L-BFGS, which needs the loss of all parts.")
        samples = self._sampler.sizes[trainer.fit_loop.epoch_loop.batch_idx]
        sizes = even_chunks(samples, self._parts)
        is_first = self._begins_window or not self._unit  # a run may resume within a window
        if is_first:
            self._unit = 1.0 if weights.is_sum else float(samples)
        unit = self._unit * self._accumulates
        own = self._reducer.begin(shared.sizes, sizes, is_first, unit, weights.is_sum)
        if self.is_shadow:
            return self._follow()
        batches, *others = (*args, *kwargs.values())
        output: STEP_OUTPUT = None
        logged, total, log_weight = dict[str, list[tuple[float, Tensor]]](), 0.0, 0.0
        if self.participation.is_uneven:
            self._broadcast.remember(self._active)
        with ExitStack() as stack, self._redirect(), self.logged.step(), self._measure():
            refuse_calls(stack, trainer.strategy, "all_gather", "broadcast", "barrier")
            for part, batch in zip(own, batches, strict=True):
                self._seed(part)
                batch = DDPStrategy.batch_to_device(trainer.strategy, batch, trainer.strategy.root_device)
                self._samples.begin(sizes[part], batch)
                set_logged_batch(trainer, batch)
                weights.weigh(batch)
                log_weight += weights.log_weight
                output = step(batch, *others)
                loss: Any = output["loss"] if isinstance(output, dict) else output
                if loss is None:
                    weights.skip()
                total += weights.weight
                self._factor = weights.weight / self._unit
                if part != own[-1] and self._factor and not leaves_out_backward(trainer):
                    self._run_backward(loss)
                self._reducer.end_part(part, weights.weight)
                for key, value in logged_in_step(self.logged.records).items():
                    logged.setdefault(key, []).append((weights.log_weight, value))
        for key, values in logged.items() if log_weight else ():
            set_latest(self.logged.records[key], _merge(values, self.logged.records[key].meta.sync.op))
        set_logged_batch(trainer, batches)
        output = self._finish(output)
        weights.weight = weights.window.total = total
        weights.log_weight = log_weight
        return output

    def _run_backward(self, loss: Tensor) -> None:
        """Run the backward pass of a part, with the operations that Lightning applies to the loss of the last part."""
        precision = self._trainer.precision_plugin
        self._reducer.defer_hooks()  # which the step has added
        loss = loss / self._accumulates * self._factor
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            loss = precision.scaler.scale(loss)
        precision.backward(loss, self._module, None)

    @override
    def weigh_loss(self, loss: Tensor) -> Tensor:
        self.weights.window.skips_pass = not self._factor
        return loss * self._factor if self._factor else loss

    @override
    @contextmanager
    def synchronizing(self) -> Iterator[None]:
        window = self.weights.window
        self._reducer.continues, window.is_postponed = window.is_postponed, False  # see `VirtualReducer`
        with super().synchronizing():
            yield
        self._seed(self._parts)

    @override
    def end_epoch(self) -> None:
        super().end_epoch()
        if self.gradient is not None and self._trainer.training:
            state = hash_training_state(self._module, self._trainer.optimizers)
            # Hooks get the outputs and the batches of this rank, and may change the state with them.
            if len(gather_different(state, self.group)) > 1:
                raise ReplicaMismatchError(
                    f"after epoch {self._trainer.current_epoch}, ranks have different training states: a hook may have"
                    " used outputs or batches of its rank. Add the callback `ReplicaConsistency()`, which names the"
                    " first tensor and the step."
                )
            epoch, threads = self._trainer.current_epoch, torch.get_num_threads()
            rank_zero_info(f"Epoch {epoch}, threads {threads}: SHA-256 of the training state {state}.")


def refuse_calls(cleanup: ExitStack, strategy: object, *names: str) -> None:
    """Let methods of a strategy raise an error that ranks have to call equally often, in steps of virtual ranks."""

    def refuse(name: str, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedFeatureError(
            f"`{name}` was called for one virtual rank, of which ranks run different numbers, one after another. Call"
            " it once for the whole batch, or leave `virtual_ranks` out."
        )

    replace_attributes(cleanup, strategy, **{name: partial(refuse, name) for name in names})


def _merge(logged: Sequence[tuple[float, Tensor]], operation: str) -> Tensor:
    """Return the value of all parts for a value that each of them has logged, with its weight."""
    stacked = torch.stack([value.to(widest_float(value.device)) for _, value in logged])
    if operation in ("max", "min"):
        merged = stacked.amax(0) if operation == "max" else stacked.amin(0)
    else:
        weights = torch.tensor([weight for weight, _ in logged], dtype=stacked.dtype, device=stacked.device)
        merged = stacked.sum(0) if operation == "sum" else torch.tensordot(weights, stacked, 1) / weights.sum()
    return merged.to(logged[0][1].dtype)


def check_virtual_ranks(virtual_ranks: int | None, **others: object) -> None:
    """Check the option, which excludes others."""
    if virtual_ranks is None:
        return
    check_integer("virtual_ranks", virtual_ranks, least=1, remedy="Leave it out for no virtual ranks.")
    if excluded := [name for name, one in others.items() if one]:
        raise ValueError(f"`{virtual_ranks=}` and `{excluded[0]}` exclude each other. Keep one of them.")


def check_ranks(virtual_ranks: int | None, ranks: int) -> None:
    """Raise an error if there are more ranks than virtual ones."""
    if virtual_ranks is not None and ranks > virtual_ranks:
        raise ValueError(f"`virtual_ranks` must be at least the number of ranks, {ranks}, got {virtual_ranks}.")


def describe_environment(virtual_ranks: int, device: torch.device) -> dict[str, Any]:
    """Describe on what the bits of a run with virtual ranks depend."""
    threads = {"`virtual_ranks`": virtual_ranks, "`torch.get_num_threads()`": torch.get_num_threads()}
    return {**threads, "kind of device": device.type, "version of torch": str(torch.__version__)}


def compare_environments(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse or warn of a checkpoint whose run had other settings that change bits."""
    for name, value in present.items():
        if saved.get(name, value) != value:
            text = f"the checkpoint was saved with {saved[name]} as {name}, and this run has {value}"
            if name in ("kind of device", "version of torch"):  # a user may be unable to go back
                rank_zero_warn(f"With `virtual_ranks`, {text}: it may continue with other bits.")
            else:
                remedy = "the environment variable `OMP_NUM_THREADS`" if "threads" in name else name
                raise UnsupportedFeatureError(
                    f"{text}, so that it would continue with other bits. Set {remedy} to {saved[name]}."
                )
