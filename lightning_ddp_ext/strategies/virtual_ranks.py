"""`balanced_ddp` with virtual ranks: a rank runs its parts of a batch one after another."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import LBFGS
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import loader_of_moving_batch
from lightning_ddp_ext._compat.lightning_logging import logged_in_step, set_latest, set_logged_batch
from lightning_ddp_ext._compat.lightning_loops import leaves_out_backward
from lightning_ddp_ext._devices import are_deterministic, widest_float
from lightning_ddp_ext._lightning import STEP_OUTPUT, MixedPrecision, Trainer, TrainerFn, is_overridden, rank_zero_warn
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext._validation import check_integer
from lightning_ddp_ext.batches.balance_controller import BalanceController
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule, even_chunks
from lightning_ddp_ext.batches.sample_counts import DrawnSamples
from lightning_ddp_ext.batches.weights import BatchWeights
from lightning_ddp_ext.consistency import hash_training_state
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.reducer.virtual_ranks import VirtualReducer
from lightning_ddp_ext.shares.parts import PartTable, seed_process
from lightning_ddp_ext.steps.balancer import ShareBalancer
from lightning_ddp_ext.steps.driver import StepDriver
from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy


class VirtualStepDriver(StepDriver):
    """Drives the steps of a rank that computes several virtual ranks, in parts of a batch."""

    balance: ShareBalancer
    weights: BatchWeights
    reducer: VirtualReducer  # the strategy sets this, the number of virtual ranks, and the seed of the run
    parts, seed = 1, 0
    is_running = False  # the parts of a batch
    _factor = 1.0  # on the loss of the last part
    _unit = 1.0  # weight of a part whose loss has the factor 1

    def _seed(self, part: int) -> None:
        seed_process(self.seed, self._number, part, device=self._trainer.strategy.root_device)

    def run(self, step: Callable[..., STEP_OUTPUT], batches: Sequence[Any]) -> STEP_OUTPUT:
        """Run a step on each part, with the backward pass of all parts but the last; return the output of the last."""
        shared, weights, rank = self.balance.shared, self.weights, self._trainer.global_rank
        assert shared is not None
        sizes, first = even_chunks(sum(shared.sizes), self.parts), sum(shared.nominal[:rank])
        own = [part for part in range(first, first + shared.nominal[rank]) if sizes[part]]
        if self._begins_window:
            # A power of two rounds nothing, and keeps gradients in the range of half precision.
            self._unit = 1.0 if weights.is_sum else 2.0 ** round(math.log2(sum(sizes)))
        unit = self._unit * self._accumulates
        self.reducer.begin(shared.nominal, sizes, self._begins_window, unit, weights.is_sum)
        if self.is_shadow:
            return self.follow()
        output: STEP_OUTPUT = None
        logged, total, log_weight = dict[str, list[tuple[float, Tensor]]](), 0.0, 0.0
        if self.participation.is_uneven:
            self._broadcast.remember(self._active)
        self.is_running = True
        with self._redirect(), self.logged.step(), self._measure():
            for part, batch in zip(own, batches, strict=True):
                self._seed(part)
                self._samples.begin(sizes[part], batch)
                set_logged_batch(self._trainer, batch)
                weights.weigh(batch)
                log_weight += weights.log_weight
                output = step(batch)
                loss: Any = output["loss"] if isinstance(output, dict) else output
                if loss is None:
                    weights.skip()
                total += weights.weight
                self._factor = weights.weight / self._unit
                if part != own[-1] and self._factor and not leaves_out_backward(self._trainer):
                    self._run_backward(loss)
                self.reducer.end_part(part, weights.weight, part == own[-1])
                for key, value in logged_in_step(self.logged.records).items():
                    logged.setdefault(key, []).append((weights.log_weight, value))
        self.is_running = False
        for key, values in logged.items() if log_weight else ():
            set_latest(self.logged.records[key], _merge(values, self.logged.records[key].meta.sync.op))
        set_logged_batch(self._trainer, batches)
        output = super().finish(output)
        weights.weight = weights.window.total = total
        weights.log_weight = log_weight
        return output

    def _run_backward(self, loss: Tensor) -> None:
        """Run the backward pass of a part, with the operations that Lightning applies to the loss of the last part."""
        precision = self._trainer.precision_plugin
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
        self.reducer.continues, window.is_postponed = window.is_postponed, False  # see `VirtualReducer`
        with super().synchronizing():
            yield
        self._seed(self.parts)

    @override
    def end_epoch(self) -> None:
        super().end_epoch()
        if self.gradient is not None and self._trainer.training:
            state = hash_training_state(self._module, self._trainer.optimizers)
            rank_zero_info(f"Epoch {self._trainer.current_epoch}: SHA-256 of the training state {state}.")


def _merge(logged: Sequence[tuple[float, Tensor]], operation: str) -> Tensor:
    """Return the value of all parts for a value that each of them has logged, with its weight."""
    stacked = torch.stack([value.to(widest_float(value.device)) for _, value in logged])
    if operation in ("max", "min"):
        merged = stacked.amax(0) if operation == "max" else stacked.amin(0)
    else:
        weights = torch.tensor([weight for weight, _ in logged], dtype=stacked.dtype, device=stacked.device)
        merged = stacked.sum(0) if operation == "sum" else torch.tensordot(weights, stacked, 1) / weights.sum()
    return merged.to(logged[0][1].dtype)


class VirtualRanksStrategy(BalancedDDPStrategy):
    """The strategy that `BalancedDDPStrategy(virtual_ranks=...)` becomes; other steps do not know of virtual ranks."""

    driver: VirtualStepDriver
    driver_type = VirtualStepDriver
    parts: int

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self.num_nodes * self.num_processes > self.parts:
            ranks = self.num_nodes * self.num_processes
            raise ValueError(f"`virtual_ranks` must be at least the number of ranks, {ranks}, got {self.parts}.")

    @override
    def setup(self, trainer: Trainer) -> None:
        module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
        moves = any(one is not None and is_overridden("on_before_batch_transfer", one) for one in (module, data))
        is_manual = trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization
        for is_present, problem in (
            (is_manual, "manual optimization. Leave one of them out"),
            (moves, "`on_before_batch_transfer`, which would get several parts. Use `on_after_batch_transfer`"),
            (
                self.root_device.type != "cpu" and not are_deterministic(),
                "algorithms that are not deterministic on a device. Use `Trainer(deterministic=True)`",
            ),
        ):
            if is_present:
                raise UnsupportedFeatureError(f"`virtual_ranks` does not support {problem}.")
        super().setup(trainer)
        if any(isinstance(one, LBFGS) for one in trainer.optimizers):
            raise UnsupportedFeatureError("`virtual_ranks` does not support L-BFGS, which needs the loss of all parts.")

    @override
    def compared_arguments(self) -> dict[str, object]:
        return {**super().compared_arguments(), "torch.get_num_threads()": torch.get_num_threads()}

    @override
    def make_reducer(self, module: Module, **options: Any) -> VirtualReducer:
        return VirtualReducer(module, self.parts, **options)

    @override
    def _make_balancer(self, rule: ChunkRule | None) -> ShareBalancer:
        # Without limits by memory, which are numbers of samples. Shares that follow measured times are deterministic.
        balance = ShareBalancer(None, self.world_size, self.root_device, rank_zero_info)
        if rule is not None and self.world_size > 1 and (rule.is_auto or rule.is_free):
            balance.controller = BalanceController(self.world_size, "rank")
        return balance

    @override
    def _make_table(self) -> PartTable:
        trainer = self.module.trainer
        return PartTable(self._rule, self.world_size, self.parts, lambda: (self._seed, trainer.current_epoch))

    @override
    def make_balance(self) -> ShareBalancer | None:
        saved = {} if self._run is None else self._run.resumed_steps.get("virtual_ranks", {})
        for name, value in self._environment().items():
            if saved.get(name, value) != value:
                text = f"the checkpoint was saved with {saved[name]} as {name}, and this run has {value}"
                if name in ("kind of device", "version of torch"):  # a user may be unable to go back
                    rank_zero_warn(f"With `virtual_ranks`, {text}: it may continue with other bits.")
                else:
                    raise UnsupportedFeatureError(
                        f"{text}, so that it would continue with other bits. Use {saved[name]}."
                    )
        balance = super().make_balance()
        self.division = f"{self.parts} virtual ranks with {torch.get_num_threads()} threads; {self.division}"
        return balance

    def _environment(self) -> dict[str, Any]:
        """Describe on what the bits of a run depend."""
        versions = {"kind of device": self.root_device.type, "version of torch": str(torch.__version__)}
        return {"`virtual_ranks`": self.parts, "`torch.get_num_threads()`": torch.get_num_threads(), **versions}

    @override
    def state_of_steps(self) -> dict[str, Any]:
        return {**super().state_of_steps(), "virtual_ranks": self._environment()}

    @override
    def load_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **options)
        if self._resumed is not None and "virtual_ranks" in self._resumed["steps"]:
            # The RNG state between steps is the same on all ranks, so that any number of them restores it.
            self._resumed = {**self._resumed, "of_ranks": self._resumed["of_ranks"][:1] * self.world_size}
        return checkpoint

    @override
    def _make_driver(self, reducer: Any = None) -> None:
        super()._make_driver(reducer)
        self.driver.reducer, self.driver.parts, self.driver.seed = reducer, self.parts, self._seed

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        trainer = self.module.trainer
        loader: Any = loader_of_moving_batch(trainer) if self.driver is not None and trainer.training else None
        if loader is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        fetched = loader.fetched.popleft()
        samples = DrawnSamples(fetched.shares.sizes[self.global_rank])
        samples.held = samples  # a list of batches would be counted in another way
        self.driver.begin(batch, fetched._replace(samples=samples))
        return batch  # each part is moved when it begins, with its random numbers

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        driver, trainer = self.driver, self.module.trainer
        loop = trainer.fit_loop.epoch_loop
        driver.begin_step(loop.total_batch_idx, loop.batch_idx, trainer.accumulate_grad_batches)
        batches, *others = (*args, *kwargs.values())
        move, run = super(ExplicitDDPStrategy, self).batch_to_device, super(ExplicitDDPStrategy, self).training_step
        return driver.run(lambda batch: run(move(batch, self.root_device), *others), batches)

    @override
    def all_gather(self, tensor: Any, *args: Any, **options: Any) -> Any:
        if self.driver is not None and self.driver.is_running:
            raise UnsupportedFeatureError(
                "`training_step` calls `all_gather`, but a rank runs its virtual ranks one after another. Compute the"
                " loss from the samples of one virtual rank, or leave `virtual_ranks` out."
            )
        return super().all_gather(tensor, *args, **options)


def use_virtual_ranks(strategy: BalancedDDPStrategy, virtual_ranks: int) -> None:
    """Check the arguments of a strategy, and make it one with virtual ranks."""
    check_integer("virtual_ranks", virtual_ranks, least=1, remedy="Leave it out for no virtual ranks.")
    for name, given in (("cost", strategy.cost), ("ddp_comm_hook", strategy.comm_hook)):
        if given is not None:
            raise ValueError(f"`virtual_ranks={virtual_ranks}` and `{name}` exclude each other. Keep one of them.")
    if type(strategy) is not BalancedDDPStrategy:
        name = type(strategy).__name__
        raise TypeError(f"`virtual_ranks` is an argument of `BalancedDDPStrategy`, not of its subclass `{name}`.")
    strategy.__class__ = VirtualRanksStrategy
    strategy.parts = virtual_ranks  # type: ignore[attr-defined]
