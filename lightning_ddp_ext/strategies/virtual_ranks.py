"""`balanced_ddp` with virtual ranks: the same bits on any number of ranks."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import Module
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import loader_of_moving_batch
from lightning_ddp_ext._devices import are_deterministic
from lightning_ddp_ext._lightning import STEP_OUTPUT, CombinedLoader, Trainer, TrainerFn, is_overridden, rank_zero_warn
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext._validation import check_integer
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.loaders.step_loader import StepLoader
from lightning_ddp_ext.reducer.virtual_ranks import VirtualReducer
from lightning_ddp_ext.resume.rng_state import preserved_rng_state
from lightning_ddp_ext.shares.parts import PartTable, check_loaders
from lightning_ddp_ext.steps.balancer import ShareBalancer
from lightning_ddp_ext.steps.virtual_ranks import PartWeights, VirtualStepDriver
from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy


class VirtualRanksStrategy(BalancedDDPStrategy):
    """The strategy that `BalancedDDPStrategy(virtual_ranks=...)` becomes; other steps do not know of virtual ranks."""

    draws_alike = True
    driver_type = VirtualStepDriver
    weights_type = PartWeights
    _parts: int

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        ranks = self.num_nodes * self.num_processes
        if ranks > self._parts:
            raise ValueError(
                f"`virtual_ranks={self._parts}` must be at least the number of ranks, got {ranks} ranks. Use fewer"
                " devices."
            )

    @override
    def setup(self, trainer: Trainer) -> None:
        module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
        if not module.automatic_optimization and trainer.state.fn == TrainerFn.FITTING:
            raise UnsupportedFeatureError("`virtual_ranks` needs automatic optimization. Leave one of them out.")
        owners = [module] if data is None else [module, data]
        hooks = ("on_after_batch_transfer", "transfer_batch_to_device")
        self._draws_in_transfer = any(is_overridden(hook, owner) for hook in hooks for owner in owners)
        if any(is_overridden("on_before_batch_transfer", owner) for owner in owners):
            raise UnsupportedFeatureError(
                "`on_before_batch_transfer` would get the batches of several virtual ranks at once. Use"
                " `on_after_batch_transfer`, which is called for each of them."
            )
        if self.root_device.type != "cpu" and not are_deterministic():
            raise UnsupportedFeatureError(
                "`virtual_ranks` needs deterministic algorithms on devices. Use `Trainer(deterministic=True)`."
            )
        super().setup(trainer)

    @override
    def compared_arguments(self) -> dict[str, object]:
        return {**super().compared_arguments(), "torch.get_num_threads()": torch.get_num_threads()}

    @override
    def make_reducer(self, module: Module, **options: Any) -> VirtualReducer:
        options = {name: one for name, one in options.items() if not name.startswith("comm_")}
        return VirtualReducer(module, self._parts, **options)

    @override
    def _make_balancer(self, rule: ChunkRule | None) -> ShareBalancer:
        # Memory limits samples, and shares are numbers of parts.
        return ShareBalancer(rule, self.world_size, self.root_device, rank_zero_info, is_exact=True)

    @override
    def _make_table(self) -> PartTable:
        trainer = self.module.trainer
        return PartTable(self._rule, self.world_size, self._parts, lambda: (self._seed, trainer.current_epoch))

    @override
    def make_balance(self) -> ShareBalancer | None:
        if self._run is not None and "virtual_ranks" in self._run.resumed_steps:
            self._check_resumed(self._run.resumed_steps["virtual_ranks"])
        balance = super().make_balance()
        self.division = (
            f"each batch has {self._parts} virtual ranks ({torch.get_num_threads()} threads); {self.division}"
        )
        return balance

    def _environment(self) -> dict[str, Any]:
        """Describe on what the bits of a run depend."""
        return {
            "virtual_ranks": self._parts,
            "intra-op threads": torch.get_num_threads(),
            "kind of device": self.root_device.type,
            "version of torch": str(torch.__version__),
        }

    def _check_resumed(self, saved: dict[str, Any]) -> None:
        """Raise an error for another setting than that of a checkpoint; warn of what a user may be unable to choose."""
        own = self._environment()
        for name, remedy in (
            ("virtual_ranks", f"Use `virtual_ranks={saved['virtual_ranks']}`."),
            ("intra-op threads", f"Call `torch.set_num_threads({saved['intra-op threads']})` on every rank."),
        ):
            if saved[name] != own[name]:
                raise UnsupportedFeatureError(
                    f"the checkpoint was saved with {saved[name]} {name.replace('_', ' ')}, and this run has"
                    f" {own[name]}, so that it would continue with other bits. {remedy}"
                )
        for name in ("kind of device", "version of torch"):
            if saved[name] != own[name]:
                rank_zero_warn(
                    f"The checkpoint was saved on another {name}, {saved[name]} instead of {own[name]}. The run may"
                    " continue with other bits than without the interruption."
                )

    @override
    def state_of_steps(self) -> dict[str, Any]:
        return {**super().state_of_steps(), "virtual_ranks": self._environment()}

    @override
    def _make_driver(self, reducer: Any = None) -> None:
        super()._make_driver(reducer)
        self._virtual.parts, self._virtual.seed = self._parts, self._seed

    @property
    def _virtual(self) -> VirtualStepDriver:
        assert isinstance(self.driver, VirtualStepDriver)
        return self.driver

    @override
    def combine_loaders(self, given: Any, is_training: bool) -> CombinedLoader:
        loader = super().combine_loaders(given, is_training)
        if is_training and self._run is not None:
            assert isinstance(loader, StepLoader)
            check_loaders(loader.flattened)
        return loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        trainer = self.module.trainer
        loader: Any = loader_of_moving_batch(trainer) if self.driver is not None and trainer.training else None
        if loader is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        self._virtual.begin(batch, loader.fetched.popleft())
        numbers = [*self._virtual.own_parts()] or range(len(batch))  # a rank without parts has the batch of another
        moved = []
        with preserved_rng_state(self.root_device) if self._draws_in_transfer else nullcontext():
            for number, one in zip(numbers, batch, strict=True):
                if self._draws_in_transfer:
                    self._virtual.seed_part(trainer.fit_loop.epoch_loop.total_batch_idx, number, 1)
                # The method of Lightning.
                moved.append(super(ExplicitDDPStrategy, self).batch_to_device(one, device, dataloader_idx))
        return moved

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        driver, trainer = self._virtual, self.module.trainer
        loop = trainer.fit_loop.epoch_loop
        driver.begin_step(loop.total_batch_idx, loop.batch_idx, trainer.accumulate_grad_batches)
        driver.begin_parts()
        if driver.is_shadow:
            return driver.follow()
        batches, *others = (*args, *kwargs.values())
        return driver.finish(driver.run(super(ExplicitDDPStrategy, self).training_step, batches, others))

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._virtual.continuing()

    @override
    def all_gather(self, tensor: Any, *args: Any, **options: Any) -> Any:
        if self.driver is not None and self._virtual.is_running:
            raise UnsupportedFeatureError(
                "`training_step` calls `all_gather` under `virtual_ranks`, where a rank runs one virtual rank after"
                " another. Compute the loss from the samples of one virtual rank, or leave `virtual_ranks` out."
            )
        return super().all_gather(tensor, *args, **options)


def use_virtual_ranks(strategy: BalancedDDPStrategy, virtual_ranks: int) -> None:
    """Check the arguments of a strategy, and make it one with virtual ranks."""
    check_integer("virtual_ranks", virtual_ranks, least=1, remedy="Leave it out for no virtual ranks.")
    for name, given in (("cost", strategy.cost), ("ddp_comm_hook", strategy.comm_hook)):
        if given is not None:
            raise ValueError(f"`virtual_ranks={virtual_ranks}` and `{name}` exclude each other. Keep one of them.")
    if type(strategy) is not BalancedDDPStrategy:
        raise TypeError(
            f"`virtual_ranks` is an argument of `BalancedDDPStrategy` itself, got its subclass"
            f" `{type(strategy).__name__}`. Leave it out."
        )
    strategy.__class__ = VirtualRanksStrategy
    strategy._parts = virtual_ranks  # type: ignore[attr-defined]
