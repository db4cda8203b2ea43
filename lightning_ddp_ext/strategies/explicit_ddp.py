"""Explicit gradient synchronisation after any backward pass: the base of the strategies with one process per device."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, get_args
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import (
    OneTrainerStrategy,
    start_method_of,
    surround_launch,
    takes_dataloader_iter,
)
from lightning_ddp_ext._compat.lightning_loaders import (
    keep_batch_samplers,
    loader_of_moving_batch,
    replace_loaders,
    replace_prediction,
)
from lightning_ddp_ext._compat.torchmetrics import watch_synchronization
from lightning_ddp_ext._devices import widened
from lightning_ddp_ext._lightning import (
    STEP_OUTPUT,
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    CombinedLoader,
    DDPStrategy,
    LightningModule,
    MixedPrecision,
    PossibleUserWarning,
    Precision,
    Trainer,
    TrainerFn,
)
from lightning_ddp_ext._output import log_start, rank_zero_info
from lightning_ddp_ext._validation import check_choice, check_flag, check_integer, refuse_unknown
from lightning_ddp_ext.activation_checkpointing import ActivationCheckpointingPolicy
from lightning_ddp_ext.batches.weights import BatchWeights, WeightBy
from lightning_ddp_ext.clusters.process_group_options import StartMethod, check_objects
from lightning_ddp_ext.distributed.backends import DEFAULT_TIMEOUT
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.loaders.predictions import Finished, NoPrediction, Predictions, PredictionsOn, none_finished
from lightning_ddp_ext.loaders.prefetching import Prefetcher, copies_to
from lightning_ddp_ext.loaders.step_loader import FetchedBatch, combine_evenly
from lightning_ddp_ext.reducer.bucket_transport import CommHook, takes_group
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from lightning_ddp_ext.resume.checkpoint import RANKS, AtomicSaveMixin, ResumableRun
from lightning_ddp_ext.resume.preemption import exit_on_sigterm, shield_workers
from lightning_ddp_ext.resume.rng_state import SharedRandomNumbers
from lightning_ddp_ext.steps.balancer import ShareBalancer
from lightning_ddp_ext.steps.driver import GradientDriver, StepDriver, describe_pass
from lightning_ddp_ext.steps.metric_states import synchronize_states
from lightning_ddp_ext.steps.optimizer_guard import OptimizerGuard
from lightning_ddp_ext.steps.trainer_watchdog import TrainerWatchdog
from lightning_ddp_ext.strategies.connected import ConnectedStrategy
from lightning_ddp_ext.strategies.gathering import GatherMixin
from lightning_ddp_ext.strategies.gradient_options import GradientOptionsMixin
from lightning_ddp_ext.strategies.launching import receive_predictions, run_on_rank, unshare

_ONE_MINUTE = timedelta(minutes=1)


class ExplicitDDPStrategy(
    OneTrainerStrategy, AtomicSaveMixin, GradientOptionsMixin, ConnectedStrategy, GatherMixin, DDPStrategy
):
    """The base of the strategies with one process per device: exact gradients after any backward pass.

    The module is not wrapped in torch's `DistributedDataParallel`. A `GradientReducer` synchronises gradients before
    `on_after_backward`, so that clipping, logged norms and callbacks see the gradient of the whole batch, whose parts
    may differ in size from rank to rank and from micro-batch to micro-batch. A rank whose `training_step` returns None
    has no weight in the step; if all return None, there is no new gradient, as on one device.

    Args:
        accelerator: See `lightning.pytorch.strategies.DDPStrategy`.
        parallel_devices: The devices of this node.
        cluster_environment: The environment that has started the processes, or starts them.
        checkpoint_io: The plugin that writes checkpoints.
        precision_plugin: The precision.
        ddp_comm_state: First argument of `ddp_comm_hook`.
        ddp_comm_hook: A communication hook of `torch.distributed.algorithms.ddp_comm_hooks`, on any device.
        ddp_comm_wrapper: A function that wraps `ddp_comm_hook`.
        model_averaging_period: Steps between two averages of the model, for a `PostLocalSGDState`.
        process_group_backend: `"gloo"`, `"nccl"` and so on; by default the one that suits the devices.
        timeout: How long ranks wait for each other at the start, and the time limit of one collective; a timedelta or
            seconds.
        start_method: How this process starts the others of its node: `"popen"`, `"spawn"`, `"fork"` or
            `"forkserver"`. By default `"fork"` in interactive sessions, such as notebooks, and `"popen"` elsewhere.
        bucket_cap_mb: Largest size of a bucket of gradients in MiB.
        weight_by: Weight of a rank's batch in the gradient. `"samples"` is exact for losses that are means over
            samples; `"tokens"` for means over tokens, see `TokenCount`; `"sum"` for losses that are sums; `"equal"`
            gives every batch the same weight, as torch does; a callable maps a batch to a number, such as its boxes.
            Micro-batches of an accumulation window are weighted in the same way, so that a short last window is exact
            too.
        batch_dim: Dimension of samples in a batch's tensors, for loaders that do not draw samples themselves: iterables
            other than a `DataLoader`, `batch_size=None`, or a class with its own iterator.
        init_method: Another rendezvous endpoint than the main address: `"tcp://host:port"` or `"file:///path"`.
        network_interface: Name of an interface that every node has; `"auto"` for the one that leads to the other nodes;
            `"loopback"` for one node; None to leave the choice to the backend.
        activation_checkpointing: Modules that recompute their activations in the backward pass: a class, its path as a
            string, several of these, or a predicate. Their number is logged once.
        stall_timeout: Time without a sign of life from a rank after which all ranks report their positions and end;
            None for no limit. A slow rank does give signs of life; `timeout` limits the wait for it.
        prefetch: Number of training batches that a thread fetches, collates and copies to the device while the current
            one trains, also without workers; 0 for none.
        move_to_device: Whether the module is moved to the device of the rank. False for a module that has placed its
            parameters on several devices.

    Raises:
        TypeError: If an argument is unknown or of the wrong type, or one of `DistributedDataParallel` that is not
            needed here.
        ValueError: If an argument is out of range.
        BackendError: If this torch has no such backend.
        NetworkInterfaceError: If this node has no such interface.
    """

    division = "each rank draws its own batches, as many as the others"  # for a message
    channels = 2  # process groups, each with a connection between any two ranks, and connections to the store
    shares_batches = False  # all ranks have the same batches, so that any number of ranks trains alike
    reducer_type: Callable[..., GradientReducer] = GradientReducer
    driver_type: Callable[..., StepDriver] = StepDriver
    agrees = False  # ranks may run out of data at different times, and agree on each step

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: CommHook | None = None,
        ddp_comm_wrapper: Callable[[CommHook], CommHook] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        start_method: StartMethod | None = None,
        bucket_cap_mb: float = 25.0,
        weight_by: WeightBy = "samples",
        batch_dim: int = 0,
        init_method: str | None = None,
        network_interface: str | None = None,
        activation_checkpointing: ActivationCheckpointingPolicy | None = None,
        stall_timeout: timedelta | float | None = _ONE_MINUTE,
        prefetch: int = 0,
        move_to_device: bool = True,
        **unknown: object,
    ) -> None:
        refuse_unknown(unknown, type(self))
        check_flag("move_to_device", move_to_device)
        check_integer("prefetch", prefetch, remedy="Use 0 to fetch a batch when its step begins.")
        objects: dict[str, Any] = {
            "accelerator": accelerator, "parallel_devices": parallel_devices, "checkpoint_io": checkpoint_io,
            "cluster_environment": cluster_environment, "precision_plugin": precision_plugin,
            "ddp_comm_hook": ddp_comm_hook, "ddp_comm_wrapper": ddp_comm_wrapper,
            "model_averaging_period": model_averaging_period,
        }  # fmt: skip
        check_objects(**objects)
        self._watch = TrainerWatchdog(stall_timeout)
        super().__init__(
            **objects, ddp_comm_state=ddp_comm_state, process_group_backend=process_group_backend, timeout=timeout,
            init_method=init_method, network_interface=network_interface, start_method=start_method,
            bucket_cap_mb=bucket_cap_mb, weight_by=weight_by, batch_dim=batch_dim,
            activation_checkpointing=activation_checkpointing,
        )  # fmt: skip
        self.prefetch, self.move_to_device = prefetch, move_to_device
        self.comm_hook = ddp_comm_hook
        if ddp_comm_hook is not None and ddp_comm_wrapper is not None:
            self.comm_hook = ddp_comm_wrapper(ddp_comm_hook)
        self.comm_state = ddp_comm_state
        if self.agrees and self.comm_hook is not None and not (takes_group(self.comm_hook) and ddp_comm_state is None):
            raise ValueError(
                f"`ddp_comm_hook` must be one of torch's that keep no state, such as `fp16_compress_hook`, and"
                f" `ddp_comm_state` None, got {self.comm_hook!r}: a hook with state communicates on a group without"
                " the ranks that have run out of data. Leave it out, or use `ddp_checkpoint`."
            )
        self.predictions_on: PredictionsOn = "all_ranks"
        # `PredictionWriter` sets it: returns the batches that an interrupted run has predicted.
        self.find_finished: Callable[[], Finished] | None = None
        self.is_preparing_loader = False  # Lightning, not the user, asks for the arguments of a sampler
        self.driver: StepDriver | None = None  # of this run, as the objects below
        self._run: ResumableRun | None = None
        self._random: SharedRandomNumbers | None = None
        self._resumed: dict[str, Any] | None = None
        # Undoes the set-up of a run. It stays empty in a process that only starts others: there is nothing to undo, and
        # the module has no trainer.
        self._cleanup = ExitStack()
        self._loaders: Any = ()  # of this run
        self._prefetching = ExitStack()  # ends the thread that fetches ahead

    @property
    def reducer(self) -> GradientReducer | None:
        """The reducer that synchronises the gradients; None unless the Trainer is fitting."""
        gradient = None if self.driver is None else self.driver.gradient
        return None if gradient is None else gradient.reducer

    @property
    def batch_weight(self) -> float:
        """Weight of this rank's last training batch in the gradient; 0 without data, or if the step returned None."""
        weights = None if self.driver is None else self.driver.weights
        return 0.0 if weights is None else weights.weight

    @property
    def is_shadow(self) -> bool:
        """Whether this rank has run out of data, while others make a step."""
        return self.driver is not None and self.driver.is_shadow

    def count_samples(self, batch: Any) -> float | None:
        """Return the number of samples of the current batch, the mean over several loaders; None if it is unknown."""
        return self._samples.count(batch)

    def make_balance(self) -> ShareBalancer | None:
        """Return what measures the ranks, once per run, if they share batches."""
        return None

    def combine_loaders(self, given: Any, is_training: bool) -> CombinedLoader:
        """Combine the loaders of a loop. Training can be resumed within an epoch."""
        if not is_training or self._run is None:
            return combine_evenly(given, is_training=False)
        looks_ahead = not takes_dataloader_iter(self.module, "training_step")
        return combine_evenly(given, True, self.world_size, self._run.rng, self.make_prefetcher(), looks_ahead)

    def make_prefetcher(self) -> Prefetcher | None:
        """Return an object that fetches training batches ahead, or None if that is off."""
        if not self.prefetch or self._run is None:
            return None
        # The Trainer has dropped the loader before this one, perhaps in the middle of an epoch.
        self._prefetching.close()
        copies = copies_to(self.root_device, self.module)
        prefetcher = Prefetcher(self.prefetch, self.root_device, self._run.rng, copies)
        self._prefetching.callback(prefetcher.close)
        return prefetcher

    @override
    def compared_arguments(self) -> dict[str, object]:
        trainer = self.module.trainer
        return {
            **super().compared_arguments(),
            "process_group_backend": self.process_group_backend,
            "ddp_comm_hook": self.comm_hook,
            "stall_timeout": self._watch.limit,
            "move_to_device": self.move_to_device,
            "precision": trainer.precision,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "predictions_on": self.predictions_on,
        }

    @property
    def module(self) -> LightningModule:
        """The LightningModule, once the Trainer has connected it."""
        module = self.lightning_module
        assert module is not None
        return module

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        surround_launch(self.launcher, partial(run_on_rank, self, self._watch), receive_predictions)

    @override
    def setup_distributed(self) -> None:
        self._resumed = None
        if start_method_of(self) in ("spawn", "forkserver"):  # torch passes tensors on the CPU in shared memory
            unshare([self.module, *self.module.trainer.callbacks])  # type: ignore[attr-defined]
        self._connect()
        super().setup_distributed()  # it keeps the process group that it finds
        self._watch.start(self.module.trainer)

    @override
    def setup(self, trainer: Trainer) -> None:
        for step in ("training_step", "validation_step", "test_step", "predict_step") if self.agrees else ():
            if takes_dataloader_iter(trainer.lightning_module, step):
                raise UnsupportedFeatureError(
                    f"`{step}(self, dataloader_iter)` fetches batches itself, so that ranks cannot agree on who has"
                    " one. Take the batch instead."
                )
        if trainer.state.fn != TrainerFn.FITTING:
            exit_on_sigterm(self._cleanup, trainer)
        self._loaders = WeakSet()  # Lightning keeps references to them, and they refer to a group
        watch_synchronization(self._cleanup, synchronize_states)
        self.keep_loaders(trainer)
        replace_loaders(self._cleanup, trainer, self.combine_loaders)
        super().setup(trainer)  # calls `configure_ddp` if the Trainer is fitting
        meaning = None if self.driver is None else self._weight_rule.meaning
        if self.driver is None:
            self._make_driver()
        if trainer.predicting and self.agrees:
            replace_prediction(
                self._cleanup, trainer, self._combine_predicted, self.indices_of, self._driver.end,
                lambda output: not isinstance(output, NoPrediction),
                lambda outputs: self.predictions.merge(outputs),
            )  # fmt: skip
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''} ({self.root_device.type})"
        log_start(f"{type(self).__name__} on {ranks}: {self.division}.", meaning)

    @override
    def model_to_device(self) -> None:
        if self.move_to_device:
            super().model_to_device()

    @property
    def predictions(self) -> Predictions:
        """The predictions of this rank, while the Trainer predicts and ranks agree on steps."""
        assert self._driver.predictions is not None
        return self._driver.predictions

    def _combine_predicted(self, given: Any) -> CombinedLoader:
        finished = none_finished if self.find_finished is None else self.find_finished()
        trainer, group = self.module.trainer, self._driver.group
        self._driver.predictions = Predictions(trainer, group, self.batch_dim, self.predictions_on, finished)
        return self.combine_loaders(given, is_training=False)

    def indices_of(self, dataloader_idx: int) -> Sequence[Any] | None:
        """Return the indices of batches of a loader of predictions; None if Lightning has to find them."""
        return None

    def keep_loaders(self, trainer: Trainer) -> None:
        """Have Lightning keep what it would change about loaders beyond their samplers."""
        keep_batch_samplers(self._cleanup, trainer, self._preparing_loader)

    @contextmanager
    def _preparing_loader(self) -> Iterator[None]:
        self.is_preparing_loader = True
        try:
            with warnings.catch_warnings():
                if self.agrees:  # no sample is repeated
                    warnings.filterwarnings("ignore", "Using `DistributedSampler` with", PossibleUserWarning)
                yield
        finally:
            self.is_preparing_loader = False

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        if self._weight_rule.function is not None and takes_dataloader_iter(self.module, "training_step"):
            raise UnsupportedFeatureError(
                "`training_step(self, dataloader_iter)` fetches batches itself, so that a callable `weight_by` has none"
                " to weigh. Take the batch instead, or leave `weight_by` out: each batch then has weight 1."
            )
        # Before the reducer, whose first messages have the sizes that these arguments set.
        self.compare_ranks()
        if self._checkpointing is not None:
            self._cleanup.callback(self._checkpointing.remove, self.module)
            self._checkpointing.apply(self.model)
            rank_zero_info(f"On each rank, {self._checkpointing.report}.")
        reducer = self.reducer_type(
            self.model,
            bucket_cap_mb=self.bucket_cap_mb,
            comm_hook=self.comm_hook,
            comm_state=self.comm_state,
            timeout=self._connection.timeout,
            hook_context=self._in_hook,
        )
        self._cleanup.callback(reducer.close)
        self.cpu_group = reducer.process_group
        trainer = self.module.trainer
        self._run = ResumableRun(self._cleanup, trainer, reducer, self._resumed)
        if self.world_size > 1 or self.shares_batches:
            self._random = SharedRandomNumbers(self._run.seed, self.root_device)
        # Before `configure_optimizers`, which may ask for the number of steps and so load the data.
        self._make_driver(reducer)

    def _make_driver(self, reducer: GradientReducer | None = None) -> None:
        """Make the driver of a run, with the reducer if the Trainer is fitting."""
        trainer, timeout, balance = self.module.trainer, self._connection.timeout, self.make_balance()
        weights, gradient = None, None
        if reducer is not None:
            # A step that fetches batches itself gives each the weight 1.
            counts = not takes_dataloader_iter(self.module, "training_step")
            is_automatic = self.module.automatic_optimization
            weights = BatchWeights(self._weight_rule, self._samples, self.global_rank, counts, is_automatic)
            guard = OptimizerGuard(
                self.global_rank,
                reducer,
                self.module.named_parameters,
                known=lambda: trainer.optimizers,
                weigh_loss=lambda: (weights.weight, weights.is_sum),
                synchronize_by="Call `self.manual_backward(loss)` instead of `loss.backward()`, and leave the last one"
                " before a step out of `toggle_model(sync_grad=False)`.",
                create_in="in `__init__`, `configure_model` or `setup` of the module",
                describe_position=describe_pass,
            )
            self._cleanup.callback(guard.close)
            reducer.buffers.settles_itself = False
            gradient = GradientDriver(reducer, weights.window, guard, balance)
        self.driver = self.driver_type(
            self._cleanup, trainer, self._samples, self.agrees, timeout, weights, gradient, balance
        )

    def _in_hook(self) -> AbstractContextManager[None]:
        """Return the context of a hook on a parameter, which may draw random numbers as optimizers do."""
        gradient = None if self.driver is None else self.driver.gradient
        if self._random is None or gradient is None:
            return nullcontext()
        return self._random.shared(-1 - gradient.guard.position)  # other numbers than optimizers get

    @property
    def _driver(self) -> StepDriver:
        assert self.driver is not None
        return self.driver

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        combined = None if self.driver is None else loader_of_moving_batch(self.module.trainer)
        if self.driver is not None and combined is not None:
            fetched = getattr(combined, "fetched", None)  # None for a class that the user has derived
            if self.driver.begin(batch, FetchedBatch(None) if fetched is None else fetched.popleft()):
                return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        driver, trainer = self._driver, self.module.trainer
        loop = trainer.fit_loop.epoch_loop
        driver.begin_step(loop.total_batch_idx, loop.batch_idx, trainer.accumulate_grad_batches)
        return driver.run(super().training_step, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._driver.is_shadow:
            return None
        with self._driver.logged.step():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._driver.is_shadow:
            return None
        with self._driver.logged.step():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        predictions = self._driver.predictions
        run = partial(super().predict_step, *args, **kwargs)
        return run() if predictions is None else predictions.run(run)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        driver = self._driver
        closure_loss = driver.weigh_loss(closure_loss)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.module)
        with driver.synchronizing():
            if not driver.is_shadow:
                self.precision_plugin.backward(closure_loss, self.module, optimizer, *args, **kwargs)
        # `on_after_backward` is called here and sees the gradient of the whole batch.
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        weights = None if self.driver is None else self.driver.weights
        return nullcontext() if weights is None else weights.window.postpone()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        reducer, gradient, numbers = self.reducer, self._driver.gradient, self._random
        assert reducer is not None and gradient is not None  # noqa: PT018

        def run_closure() -> Any:
            """Run the closure, ensure that gradients are synchronised, and return the loss of the whole batch."""
            with nullcontext() if numbers is None else numbers.own():
                before = reducer.synchronizations
                loss = closure()
                if self.module.automatic_optimization and reducer.synchronizations == before:
                    # Lightning skips the backward pass when it updates statistics for averaged weights.
                    with self._driver.synchronizing():
                        pass
                loss = gradient.guard.end_closure(loss, optimizer)
            return None if self._leaves_scaler_nothing(optimizer, reducer) else loss

        # Random numbers of an optimizer, such as the noise of Langevin dynamics, have to be the same on all ranks.
        with (
            gradient.guard.managing(optimizer),
            nullcontext() if numbers is None else numbers.shared(self.module.trainer.global_step),
        ):
            return super().optimizer_step(optimizer, run_closure, model, **kwargs)

    def _leaves_scaler_nothing(self, optimizer: Optimizer, reducer: GradientReducer) -> bool:
        """Return True if a gradient scaler would find no gradient because no batch has weight: it skips the step."""
        precision, weights = self.precision_plugin, reducer.control.weights
        has_scaler = isinstance(precision, MixedPrecision) and precision.scaler is not None
        if not has_scaler or not weights or any(weights) or not self.module.automatic_optimization:
            return False
        return all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if self._run is not None:
            shield_workers(dataloader, self.global_rank, self._run.preemption.requeue_signal)
        return dataloader

    @override
    def reduce(
        self, tensor: Tensor, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        tensor = widened(tensor, reduce_op)
        if self.driver is None or group is not None:
            return super().reduce(tensor, group, reduce_op)
        reduced = self.driver.logged.reduce(tensor, reduce_op) if isinstance(reduce_op, str) else None
        return super().reduce(tensor, self.driver.active.group, reduce_op) if reduced is None else reduced

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        group = None if self.driver is None else self.driver.active.group
        if group is None:
            return super().reduce_boolean_decision(decision, all)
        agreeing = int(self.reduce(torch.tensor(int(decision), device=self.root_device), group, "sum"))
        return agreeing == group.size() if all else agreeing > 0

    @override
    def sizes_group(self) -> dist.ProcessGroup | None:
        return (self.driver and self.driver.active.group) or super().sizes_group()

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._watch.others_come():
            super().barrier(*args, **kwargs)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        if self.reducer is None or not self._watch.others_come():
            return state
        return state | {name: one for name, one in self.reducer.buffers.settled().items() if name in state}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        # After a failure the other ranks do not answer; a checkpoint that callbacks save then lacks their RNG state.
        if self._run is not None and self._watch.others_come():
            self._run.save(checkpoint, self.state_of_steps())
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def state_of_steps(self) -> dict[str, Any]:
        """Return the state of the steps for a checkpoint."""
        return {}

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._resumed = checkpoint.get(RANKS)  # used by a run that fits, and forgotten when another run begins
        return checkpoint

    @override
    def teardown(self) -> None:
        with ExitStack() as stack:  # in reverse order, and the others too if one fails
            stack.callback(self._watch.stop)
            stack.callback(super().teardown)
            stack.callback(self._prefetching.close)
            stack.callback(self._cleanup.close)
            for loader in self._loaders:
                stack.callback(loader.close)
            self._loaders = ()
            self.driver = self._run = self._random = self._resumed = self.cpu_group = self.find_finished = None


def check_predictions_on(value: PredictionsOn) -> PredictionsOn:
    """Return the value of `predictions_on` if it is one of its choices."""
    check_choice("predictions_on", value, get_args(PredictionsOn), 'Use "rank_zero" to save memory.')
    return value
