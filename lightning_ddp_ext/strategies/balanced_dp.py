"""The strategy `balanced_dp`: one process, several devices, one chunk of each batch per replica."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import takes_dataloader_iter
from lightning_ddp_ext._validation import check_integer
from lightning_ddp_ext.batches.splitting import gather
from lightning_ddp_ext.batches.weights import SkipWarning, WeightBy, check_weight_by
from lightning_ddp_ext.clusters.process_group_options import check_objects
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.replicas.balance import BatchSplit
from lightning_ddp_ext.replicas.replicated_step import BatchRecord, CombinedLoss, ReplicatedModule, ScatteredBatch
from lightning_ddp_ext.strategies.base import Registered, WeightsOnlyLoadMixin

T = TypeVar("T")


class SingleProcessStrategy(Registered, WeightsOnlyLoadMixin, ParallelStrategy):
    """Several devices, one process: there is one rank, and nothing to communicate.

    Raises:
        UnsupportedFeatureError: By the Trainer's constructor, if it asks for several nodes or for synchronised batch
            normalisation, or if a launcher has started several processes.
    """

    @property
    def devices(self) -> list[torch.device]:
        """The Trainer's devices.

        Raises:
            RuntimeError: If the strategy has not been passed to a Trainer yet.
        """
        if not self.parallel_devices:
            raise RuntimeError(
                f"`{self._registered_name}` has no devices yet. Pass it to a Trainer first, or set `parallel_devices`."
            )
        return self.parallel_devices

    @property
    @override
    def root_device(self) -> torch.device:
        return self.devices[0]

    @property
    @override
    def global_rank(self) -> int:
        return 0

    @property
    @override
    def local_rank(self) -> int:
        return 0

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return 1

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process."""
        return False

    @property
    def num_nodes(self) -> int:
        """Number of nodes, always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise UnsupportedFeatureError(
                f"`{self._registered_name}` runs in one process on one node, got `num_nodes={num_nodes}`."
                ' Set `num_nodes=1`, or use `strategy="ddp"` for several nodes.'
            )

    @property
    def _registered_name(self) -> str:
        return self.strategy_name or type(self).__name__

    @override
    def _configure_launcher(self) -> None:
        if self._layer_sync is not None:
            raise UnsupportedFeatureError(
                f"`{self._registered_name}` cannot synchronise batch normalisation: its replicas share one process and"
                ' no process group. Remove `sync_batchnorm=True`, or use `strategy="ddp"`.'
            )
        processes = 1 if self.cluster_environment is None else self.cluster_environment.world_size()
        if processes > 1:
            raise UnsupportedFeatureError(
                f"`{self._registered_name}` runs in one process, but {type(self.cluster_environment).__name__} reports"
                f" {processes}. Start it as a plain `python` command or with one task, or use"
                ' `strategy="ddp"`.'
            )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @override
    def model_to_device(self) -> None:
        if self.model is not None:
            self.model.to(self.root_device)

    @override
    def reduce(self, tensor: Tensor | Any, *args: Any, **kwargs: Any) -> Tensor | Any:
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj

    @override
    def barrier(self, name: str | None = None) -> None:
        pass


class BalancedDataParallelStrategy(SingleProcessStrategy):
    """Trains one module on several devices of one process, with chunks of a batch as large as each device can take.

    Every device holds a replica of the module and runs the whole step on its chunk, loss included. The losses are
    combined by weight, so that the gradient that reaches the optimizer is the one a single device would compute on the
    whole batch; only the module itself has an optimizer, callbacks and checkpoints. The forward must treat samples
    independently: batch normalisation and in-batch negatives see their chunk only, as in every data-parallel system.
    A replica whose `training_step` returns None has no weight in the step; if all do, there is no new gradient.

    Registered as `"balanced_dp"`. On the CPU, `devices=n` makes n logical replicas.

    Args:
        gpu0_batch_size: Most samples of a batch that the first device gets; the others share the rest evenly. Device 0
            also holds the optimizer, so it often has room for fewer samples than the others; 0 leaves it none at all.
            Counted per forward: Lightning does not divide a batch for gradient accumulation. Never more than an even
            share; use `split` for that.
        split: Proportions of the batch for each device, such as `[2, 3, 3]`; smaller batches are shared in the same
            proportions.
        balance: `"even"` shares a batch evenly; `"auto"` moves samples towards the devices that finish first, from
            the times it measures, as far as their memory allows. The default is `"auto"` if the devices are distinct
            and `"even"` for replicas of one device. Chunks that follow measured times change sums in their last
            digits, so `Trainer(deterministic=True)` turns `"auto"` into `"even"`.
        weight_by: What a chunk counts in the gradient. `"samples"` is exact for losses that are means over samples;
            `"sum"` for losses that are sums; `"equal"` counts every chunk once; a callable maps a chunk to a number,
            such as its non-padding tokens.
        batch_dim: Dimension of the batch's tensors that counts samples.
        accelerator: See `lightning.pytorch.strategies.ParallelStrategy`.
        parallel_devices: See `lightning.pytorch.strategies.ParallelStrategy`; by default the Trainer's `devices`.
        checkpoint_io: See `lightning.pytorch.strategies.ParallelStrategy`.
        precision_plugin: See `lightning.pytorch.strategies.ParallelStrategy`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range, if more than one of `gpu0_batch_size`, `split` and `balance` is
            given, or, by the Trainer's constructor, if `split` and `devices` differ in length.
        UnsupportedFeatureError: By the Trainer, before training starts, for manual optimization, steps that take
            `dataloader_iter`, `sync_batchnorm`, and several processes or nodes.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_ddp_ext import BalancedDataParallelStrategy
        >>> strategy = BalancedDataParallelStrategy(split=[1, 3])
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
        >>> strategy.split_sizes(8)
        [2, 6]
    """

    strategy_name = "balanced_dp"

    def __init__(
        self,
        gpu0_batch_size: int | None = None,
        split: Sequence[float] | None = None,
        balance: Literal["even", "auto"] | None = None,
        weight_by: WeightBy = "samples",
        batch_dim: int = 0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._split = BatchSplit(gpu0_batch_size, split, balance)
        check_integer("batch_dim", batch_dim, remedy="Use 0 for batches whose first dimension counts samples.")
        check_weight_by(weight_by)
        check_objects(
            accelerator=accelerator, parallel_devices=parallel_devices, checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )  # fmt: skip
        self.weight_by = weight_by
        self.batch_dim = batch_dim
        self._replicated: ReplicatedModule | None = None
        self._last = BatchRecord([], [])
        self._unobserved: BatchRecord | None = None
        self._pending: CombinedLoss | None = None
        self._dataloader_idx = 0
        self._skip_warning = SkipWarning()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @property
    def chunk_sizes(self) -> list[int]:
        """Number of samples that each device had of the last batch; empty before the first."""
        return list(self._last.sizes)

    @property
    def replica_seconds(self) -> list[float]:
        """Seconds that each device spent on the last batch, forward and backward; empty before the first."""
        return list(self._last.seconds)

    @property
    def last_batch(self) -> BatchRecord:
        """Sizes and times of the last batch; reading the times waits for the devices."""
        return self._last

    def cut(self, batch: Any) -> list[Any]:
        """Cut a training batch as the strategy does; return one chunk per device, None for a device without samples."""
        assert self._replicated is not None
        return self._replicated.cut(batch)[0]

    def split_sizes(self, batch_size: int) -> list[int]:
        """Return how many samples of a batch each device gets.

        Args:
            batch_size: Number of samples in the batch.

        Returns:
            One number per device, before a single sample is merged into a neighbour for batch normalisation. With
            `balance="auto"`, as measured so far.

        Raises:
            RuntimeError: If the strategy has not been passed to a Trainer yet.
        """
        return self._split.sizes(batch_size, self.devices)

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._split.check(self.devices)

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            raise UnsupportedFeatureError(
                "`balanced_dp` cannot run manual optimization: every replica would step the optimizer on its own chunk."
                ' Set `automatic_optimization = True`, or use `strategy="ddp"`.'
            )
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            if takes_dataloader_iter(module, step):
                raise UnsupportedFeatureError(
                    f"`balanced_dp` cannot cut batches that `{step}(self, dataloader_iter)` fetches itself."
                    f" Take `batch` and `batch_idx` in `{step}`."
                )
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._split.start(self.devices)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # Chunks go straight to their devices, when the step runs: the whole batch never lands on device 0, and what
        # hooks do to it before the step is not lost.
        self._dataloader_idx = dataloader_idx
        if self._replicated is not None:
            self._replicated.expect_new_batch()
        return batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._pending = None
        self._observe()
        with self.precision_plugin.train_step_context():
            outputs, scattered = self._run("training_step", *args, **kwargs)
        if any(output is None for output in outputs):
            outputs, scattered = self._without_skipped(outputs, scattered)
        if not any(scattered.weights):
            return None  # as one device does that leaves out a batch of which nothing counts
        found = [output.get("loss") if isinstance(output, Mapping) else output for output in outputs]
        losses = [loss for loss in found if isinstance(loss, Tensor)]
        if len(losses) < len(found):
            return outputs[0]  # type: ignore[no-any-return]  # the Trainer says what is wrong with it
        self._pending = CombinedLoss(losses, scattered, self.root_device)
        if not isinstance(outputs[0], Mapping):
            return self._pending.value
        extras = [{name: value for name, value in output.items() if name != "loss"} for output in outputs]
        return {"loss": self._pending.value, **self._gather(extras, scattered)}

    def _without_skipped(self, outputs: Sequence[Any], scattered: ScatteredBatch) -> tuple[list[Any], ScatteredBatch]:
        """Return the outputs that are not None, and their part of the batch, whose weights are those of a whole one."""
        kept = [position for position, output in enumerate(outputs) if output is not None]
        active = [scattered.active[position] for position in kept]
        skipped = [index for index in scattered.active if index not in active]
        if kept:  # otherwise Lightning warns
            self._skip_warning.show(f"the replicas {skipped}")
        weights = [scattered.weights[position] for position in kept]
        total = 1.0 if self.weight_by == "sum" else sum(weights) or 1.0
        weights = [weight / total for weight in weights]
        by_replica = dict(zip(active, weights, strict=True))
        scattered.record.skipped = skipped
        scattered.record.weights = [by_replica.get(index, 0.0) for index in scattered.active]
        return [outputs[position] for position in kept], replace(scattered, active=active, weights=weights)

    def _run(self, step: str, batch: Any, *args: Any) -> tuple[list[Any], ScatteredBatch]:
        if self._replicated is None:
            assert self.lightning_module is not None
            self._replicated = ReplicatedModule(
                self.lightning_module, self.devices, self.split_sizes, self.weight_by, self.batch_dim
            )
        outputs, scattered = self._replicated.run(step, batch, args, self._dataloader_idx)
        self._last = scattered.record
        return outputs, scattered

    def _observe(self) -> None:
        """Learn from the last training batch. Not before the next one: its times are known when devices are done."""
        last, self._unobserved = self._unobserved, None
        if last is not None:
            self._split.observe(last)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._backward_replicas()
        # `on_after_backward` fires here and sees the gradient of the whole batch.
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _backward_replicas(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            raise RuntimeError("`backward` was called without a loss from `training_step`.")
        assert self._replicated is not None
        pending.backward(self._replicated)
        self._unobserved = self._last

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", *args, **kwargs)  # type: ignore[no-any-return]

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", *args, **kwargs)  # type: ignore[no-any-return]

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        return self._gather(*self._run(step, *args, **kwargs))

    def _gather(self, outputs: Sequence[Any], scattered: ScatteredBatch) -> Any:
        return gather(outputs, scattered.active_sizes, self.root_device, self.batch_dim, scattered.other_rows)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        checkpoint.update(self._split.state_dict())
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._split.load_state_dict(checkpoint)
        return checkpoint

    @override
    def teardown(self) -> None:
        if self._replicated is not None:
            self._replicated.close()
        self._replicated = self._pending = None
        super().teardown()
