"""Steps of virtual ranks: a rank runs its parts of a batch one after another, each with its own backward pass."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_logging import is_logged_in_step, latest, set_latest, set_logged_batch
from lightning_ddp_ext._compat.lightning_loops import leaves_out_backward
from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext._lightning import STEP_OUTPUT, MixedPrecision
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext.batches.chunk_sizes import even_chunks
from lightning_ddp_ext.batches.sample_counts import DrawnSamples
from lightning_ddp_ext.batches.weights import BatchWeights, WindowSum
from lightning_ddp_ext.consistency import hash_training_state
from lightning_ddp_ext.loaders.step_loader import FetchedBatch
from lightning_ddp_ext.reducer.virtual_ranks import VirtualReducer
from lightning_ddp_ext.shares.parts import seed_process
from lightning_ddp_ext.steps.driver import StepDriver


class PartWeights(BatchWeights):
    """The weights of the parts of a rank, whose sum is the weight of the rank."""

    total = 0.0

    @override
    def of_window(self, accumulates: int) -> WindowSum:
        return self.total, 1.0, 1.0  # the losses are weighted, and the reducer divides


class VirtualStepDriver(StepDriver):
    """Drives the steps of a rank that computes several virtual ranks.

    `parts` is their number and `seed` the seed of the run; the strategy sets both before the first step.
    """

    parts, seed = 1, 0
    is_running = False  # the parts of a batch
    _factor = 1.0  # on the loss of the last part
    _unit = 1.0  # weight of a part whose loss has the factor 1

    @property
    def _reducer(self) -> VirtualReducer:
        assert self.gradient is not None
        assert isinstance(self.gradient.reducer, VirtualReducer)
        return self.gradient.reducer

    @property
    def _weights(self) -> PartWeights:
        assert isinstance(self.weights, PartWeights)
        return self.weights

    def seed_part(self, number: int, *place: int) -> None:
        """Seed the random numbers of a place in a batch, such as a part, the same on any rank."""
        seed_process(self.seed, number, *place, device=self._trainer.strategy.root_device)

    @override
    def begin(self, batch: Any, fetched: FetchedBatch) -> None:
        if self._trainer.training:
            samples = DrawnSamples(fetched.shares.sizes[self._trainer.global_rank])
            samples.held = samples
            fetched = fetched._replace(samples=samples)
        super().begin(batch, fetched)

    def own_parts(self) -> dict[int, int]:
        """Return the sizes of the parts of this rank that have samples, by number."""
        assert self.balance is not None
        shared = self.balance.shared
        assert shared is not None
        sizes, rank = even_chunks(sum(shared.sizes), self.parts), self._trainer.global_rank
        first = sum(shared.nominal[:rank])
        return {part: sizes[part] for part in range(first, first + shared.nominal[rank]) if sizes[part]}

    def begin_parts(self) -> None:
        """Begin with the parts of a batch, on a rank without parts too."""
        assert self.balance is not None
        shared = self.balance.shared
        assert shared is not None
        samples = sum(shared.sizes)
        # A power of two rounds nothing, and keeps gradients in the range of half precision.
        self._unit = 1.0 if self._weights.is_sum else 2.0 ** round(math.log2(samples))
        self._reducer.begin(
            shared.nominal,
            even_chunks(samples, self.parts),
            self._begins_window,
            self._unit * self._accumulates,
            self._weights.is_sum,
        )
        self._weights.total = 0.0

    def run(self, step: Callable[..., STEP_OUTPUT], batches: Sequence[Any], args: Sequence[Any]) -> STEP_OUTPUT:
        """Run a step on each part, with the backward pass of all parts but the last; return the output of the last."""
        weights, sizes, outputs = self._weights, self.own_parts(), []
        last, logged = [*sizes][-1], _PartLogs(self)
        self.is_running = True
        if self.participation.is_uneven:
            self._broadcast.remember(self._active)
        with self._redirect(), self.logged.step(), self._measure():
            for (part, samples), batch in zip(sizes.items(), batches, strict=True):
                self.seed_part(self._number, part)
                self._samples.begin(samples, batch)
                set_logged_batch(self._trainer, batch)
                weights.weigh(batch)
                weight = weights.weight
                outputs = [step(batch, *args)]
                loss = outputs[0]["loss"] if isinstance(outputs[0], dict) else outputs[0]
                if loss is None:
                    weights.skip()
                self._factor = weights.weight / self._unit
                if part != last and self._factor and not leaves_out_backward(self._trainer):
                    self._run_backward(loss)
                logged.add(weight)
                self._reducer.end_part(part, weights.weight, part == last)
                weights.total += weights.weight
        self.is_running = False
        logged.merge()
        set_logged_batch(self._trainer, batches)
        self._samples.begin(sum(sizes.values()))
        weights.log_weight = logged.weight
        return outputs[0]

    def _run_backward(self, loss: Any) -> None:
        """Run the backward pass of a part, with the operations that Lightning applies to the loss of the last part."""
        precision = self._trainer.precision_plugin
        loss = loss / self._accumulates * self._factor
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            loss = precision.scaler.scale(loss)
        precision.backward(loss, self._module, None)

    @override
    def finish(self, output: STEP_OUTPUT) -> STEP_OUTPUT:
        output = super().finish(output)
        self._weights.weight = self._weights.total
        return output

    @override
    def weigh_loss(self, loss: Tensor) -> Tensor:
        self._weights.window.skips_pass = not self._factor
        return loss * self._factor if self._factor else loss

    @contextmanager
    def continuing(self) -> Iterator[None]:
        """Let the accumulation window continue after the batch in the block."""
        self._reducer.continues = True
        try:
            yield
        finally:
            self._reducer.continues = False

    @override
    @contextmanager
    def synchronizing(self) -> Iterator[None]:
        with super().synchronizing():
            yield
        self.seed_part(self._number, self.parts)

    @override
    def end_epoch(self) -> None:
        super().end_epoch()
        if self.gradient is not None and self._trainer.training:
            state = hash_training_state(self._module, self._trainer.optimizers)
            rank_zero_info(f"Epoch {self._trainer.current_epoch}: SHA-256 of the training state {state}.")


class _PartLogs:
    """Merges the values that the parts of a rank log in a step: the latest value becomes the one of all parts."""

    def __init__(self, driver: StepDriver) -> None:
        self._driver = driver
        self._values: dict[str, list[tuple[float, Tensor]]] = {}
        self.weight = 0.0

    def add(self, weight: float) -> None:
        """Add the values of a part with this weight."""
        self.weight += weight
        for key, metric in self._driver.logged.records.items():
            if is_logged_in_step(metric):
                self._values.setdefault(key, []).append((weight, latest(metric)))

    def merge(self) -> None:
        """Replace each value by the sum, the mean, the largest or the smallest of the parts."""
        for key, pairs in self._values.items() if self.weight else ():
            if len(pairs) == 1:
                continue
            metric = self._driver.logged.records[key]
            stacked = torch.stack([value.to(widest_float(value.device)) for _, value in pairs])
            operation = metric.meta.sync.op
            if operation in ("sum", "max", "min"):
                merged = getattr(torch, f"a{operation}" if operation != "sum" else "sum")(stacked, 0)
            else:
                factors = torch.tensor([weight for weight, _ in pairs], dtype=stacked.dtype, device=stacked.device)
                merged = (factors @ stacked.reshape(len(pairs), -1)).reshape(stacked[0].shape) / factors.sum()
            set_latest(metric, merged.to(pairs[0][1].dtype))
