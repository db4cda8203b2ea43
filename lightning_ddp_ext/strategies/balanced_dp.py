"""The strategy `balanced_dp`: one process, several devices, one chunk of each batch per replica."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import OneTrainerStrategy, synchronizes_batch_norm, takes_dataloader_iter
from lightning_ddp_ext._compat.lightning_loaders import replace_loaders
from lightning_ddp_ext._devices import are_deterministic, reports_memory
from lightning_ddp_ext._lightning import (
    STEP_OUTPUT,
    Accelerator,
    CheckpointIO,
    ParallelStrategy,
    Precision,
    Trainer,
    TrainerFn,
    rank_zero_warn,
)
from lightning_ddp_ext._output import log_start, rank_zero_info
from lightning_ddp_ext._validation import check_integer, refuse_unknown
from lightning_ddp_ext.batches.balance_controller import BalanceController, PeakMemory
from lightning_ddp_ext.batches.chunk_sizes import Balance, ChunkRule, avoid_single_samples
from lightning_ddp_ext.batches.weights import WeightBy, WeightRule
from lightning_ddp_ext.clusters.environments import check_has_rank
from lightning_ddp_ext.clusters.process_group_options import check_objects
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.loaders.prefetching import Prefetcher, has_streams, pin
from lightning_ddp_ext.loaders.step_loader import combine_evenly
from lightning_ddp_ext.replicas.replicated_step import BatchRecord, ReplicatedModule
from lightning_ddp_ext.resume.loading import WeightsOnlyLoadMixin

_NAME = '`balance="auto"`'
_CHECKPOINT_KEY = "lightning_ddp_ext.balanced_dp"


class BatchDivision:
    """Maps a batch size to one chunk size per replica, from the strategy's options or the times of earlier batches."""

    def __init__(self, gpu0_batch_size: int | None, split: Sequence[float] | None, balance: Balance | None) -> None:
        self._rule = ChunkRule(gpu0_batch_size, split, balance)
        self._controller: BalanceController | None = None
        self._saved: dict[str, Any] | None = None
        self.peaks = PeakMemory()
        self._unread: deque[BatchRecord] = deque()  # whose times are not known, because the devices are behind the host
        self._batches = 0
        self._ran_in_order = False
        self._has_shown_order = False

    def check(self, devices: Sequence[torch.device]) -> None:
        """Check that there are as many proportions as devices."""
        self._rule.check_number(len(devices))

    def start(self, devices: Sequence[torch.device]) -> None:
        """Create the controller if balance is automatic, with the shares of a loaded checkpoint if they fit."""
        saved, self._saved = self._saved, None
        is_auto = self._rule.is_auto or (self._rule.is_free and len(set(devices)) == len(devices))
        if not is_auto or len(devices) == 1:
            return
        if are_deterministic():
            self._controller = None
            rank_zero_info(f"{_NAME} is off, because measured times are not deterministic: batches are divided evenly.")
            return
        if self._controller is None:
            self._controller = BalanceController(len(devices))
        if saved is not None and len(saved["shares"]) == len(devices):
            self._controller.load_state_dict(saved)
        elif saved is not None:
            rank_zero_info(f"{_NAME} starts with even chunks: the checkpoint is of {len(saved['shares'])} replicas.")

    def __str__(self) -> str:
        return str(self._rule) if self._controller is None else "by their speed"

    def split_sizes(self, batch_size: int, num_replicas: int, avoids_single_samples: bool = False) -> list[int]:
        """Return how many samples of a batch each replica gets."""
        sizes, limits = self._rule.divide(batch_size, num_replicas), self._rule.limits
        if self._controller is not None:
            if avoids_single_samples:  # from now on, also in evaluation and for `split_sizes` of the strategy
                self._controller.least_samples = 2
            sizes, limits = self._controller.split_sizes(batch_size), tuple(self._controller.limits)
        return avoid_single_samples(sizes, limits) if avoids_single_samples else sizes

    def observe(self, record: BatchRecord, devices: Sequence[torch.device]) -> None:
        """Adapt the shares to the times of batches that the devices have finished, and to their memory; do not wait."""
        if self._controller is None:
            return
        self._batches += 1
        ran_in_order, self._ran_in_order = self._ran_in_order, record.in_order
        if record.in_order:  # moving samples would gain nothing
            # The first batch always runs in order, which shows whether the step draws random numbers.
            if ran_in_order and not self._has_shown_order:
                self._has_shown_order = True
                rank_zero_info(f"{_NAME} changes no chunks: replicas that run one after another would gain nothing.")
            return
        # Replicas of one device share its memory; on the CPU they share the memory of the process.
        if len(set(devices)) == len(devices) and all(map(reports_memory, devices)):
            limits = self.peaks.observe(record.sizes, devices)
            self._controller.limits = self._controller.limits if limits is None else limits
        self._unread.append(record)
        while self._unread and self._unread[0].is_done():
            finished = self._unread.popleft()
            decision = self._controller.observe(finished.sizes, finished.seconds)
            if decision is None:
                continue
            rank_zero_info(f"{_NAME}, batch {self._batches}: {decision}.")
            if decision.before != decision.after:
                self._unread.clear()  # these batches were divided by the shares before

    def state_dict(self) -> dict[str, Any]:
        """Return the entries to add to a checkpoint: none, unless balance is automatic."""
        return {} if self._controller is None else {_CHECKPOINT_KEY: self._controller.state_dict()}

    def load_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Keep the state in a checkpoint for `start`."""
        self._saved = checkpoint.get(_CHECKPOINT_KEY)


T = TypeVar("T")


class BalancedDataParallelStrategy(OneTrainerStrategy, WeightsOnlyLoadMixin, ParallelStrategy):
    """Trains one module on several devices in one process, with chunks of a batch as large as each device can take.

    Every device holds a replica of the module and runs the whole step on its chunk, loss included. The losses are
    combined by weight, so that the optimizer receives the gradient that a single device would compute on the whole
    batch. Only the module itself has an optimizer, callbacks and checkpoints. The forward pass must treat samples
    independently: batch normalisation and in-batch negatives see one chunk only, as in every data-parallel system.
    A replica whose `training_step` returns None has no weight in the step; if all do, there is no new gradient.

    Registered as `"balanced_dp"`. On the CPU, `devices=n` makes n logical replicas.

    Args:
        gpu0_batch_size: Most samples of a batch that the first device gets, at most an even share; the others divide
            the rest evenly. The first device also holds the optimizer, so it often has room for fewer samples; 0 gives
            it none. The number applies to each forward pass: Lightning does not divide a batch for gradient
            accumulation. Use `split` to give the first device more than an even share.
        split: Proportion of the batch for each device, such as `[2, 3, 3]`.
        balance: `"even"` divides batches evenly. `"auto"` measures the devices and moves samples towards the
            fastest ones, as far as their memory allows. The default is `"auto"` if the devices are distinct and
            `"even"` for replicas of one device. `Trainer(deterministic=True)` turns `"auto"` into `"even"`, because
            chunks that follow measured times change the order of floating-point additions.
        weight_by: Weights of the chunks' losses. `"samples"` is exact for losses that are means over samples; `"sum"`
            for losses that are sums; `"tokens"` for means over tokens, see `TokenCount`; `"equal"` gives every chunk
            the same weight; a callable maps a chunk to its weight, such as its number of boxes.
        batch_dim: Dimension of the batch's tensors that counts samples.
        prefetch: Number of training batches that a thread fetches, collates and pins while the current one trains, also
            without workers; 0 for none.
        accelerator: See `lightning.pytorch.strategies.ParallelStrategy`.
        parallel_devices: See `lightning.pytorch.strategies.ParallelStrategy`; by default the Trainer's `devices`.
        checkpoint_io: See `lightning.pytorch.strategies.ParallelStrategy`.
        precision_plugin: See `lightning.pytorch.strategies.ParallelStrategy`.

    Raises:
        TypeError: If an argument is unknown or of the wrong type.
        ValueError: If an argument is out of range, if more than one of `gpu0_batch_size`, `split` and `balance` is
            given, or, from the Trainer's constructor, if `split` and `devices` differ in length.
        UnsupportedFeatureError: From the Trainer, before training starts, for manual optimization, steps that take
            `dataloader_iter`, `sync_batchnorm`, and several processes or nodes.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_ddp_ext import BalancedDataParallelStrategy
        >>> strategy = BalancedDataParallelStrategy(split=[1, 3])
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
        >>> strategy.split_sizes(8)
        [2, 6]
    """

    def __init__(
        self,
        gpu0_batch_size: int | None = None,
        split: Sequence[float] | None = None,
        balance: Literal["even", "auto"] | None = None,
        weight_by: WeightBy = "samples",
        batch_dim: int = 0,
        prefetch: int = 0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **unknown: object,
    ) -> None:
        refuse_unknown(unknown, type(self))
        self._division = BatchDivision(gpu0_batch_size, split, balance)
        check_integer("batch_dim", batch_dim, remedy="Use 0 for batches whose first dimension counts samples.")
        check_integer("prefetch", prefetch, remedy="Use 0 to fetch a batch when its step begins.")
        self._weight_rule = WeightRule(weight_by, rank_zero_info)
        base: dict[str, Any] = {
            "accelerator": accelerator, "parallel_devices": parallel_devices, "checkpoint_io": checkpoint_io,
            "precision_plugin": precision_plugin,
        }  # fmt: skip
        check_objects(**base)
        self.weight_by = weight_by
        self.batch_dim = batch_dim
        self.prefetch = prefetch
        self._cleanup, self._prefetching = ExitStack(), ExitStack()
        self._replicated: ReplicatedModule | None = None
        self._last = BatchRecord()
        self._dataloader_idx = 0
        super().__init__(**base)

    @property
    def devices(self) -> list[torch.device]:
        """The Trainer's devices, one per replica."""
        if not self.parallel_devices:
            raise RuntimeError(
                "`balanced_dp` has no devices yet. Pass it to a Trainer first, or set `parallel_devices`."
            )
        return self.parallel_devices

    @property
    def chunk_sizes(self) -> list[int]:
        """Number of samples of the last batch on each device; empty before the first batch."""
        return list(self._last.sizes)

    @property
    def replica_seconds(self) -> list[float]:
        """Seconds that each device spent on the last batch, forward and backward; empty before the first batch."""
        return list(self._last.seconds)

    @property
    def last_batch(self) -> BatchRecord:
        """Sizes, weights and timers of the last batch; reading its times waits for the devices."""
        return self._last

    def cut(self, batch: Any) -> list[Any]:
        """Cut a training batch into one chunk per device, None for a device without samples."""
        assert self._replicated is not None
        return self._replicated.cut(batch)[0]

    def split_sizes(self, batch_size: int) -> list[int]:
        """Return how many samples of a batch each device gets.

        Args:
            batch_size: Number of samples in the batch.

        Returns:
            One number per device, before a single sample is merged into a neighbour for batch normalisation. With
            `balance="auto"`, the numbers follow the shares measured so far.

        Raises:
            RuntimeError: If the strategy has not been passed to a Trainer yet.
        """
        return self._division.split_sizes(batch_size, len(self.devices))

    @property
    @override
    def root_device(self) -> torch.device:
        return self.devices[0]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise UnsupportedFeatureError(
                f"`balanced_dp` runs in one process on one node, got `num_nodes={num_nodes}`."
                ' Set `num_nodes=1`, or use `strategy="balanced_ddp"` for several nodes.'
            )

    @override
    def _configure_launcher(self) -> None:
        if synchronizes_batch_norm(self):
            raise UnsupportedFeatureError(
                "`balanced_dp` cannot synchronise batch normalisation: its replicas share one process and"
                ' no process group. Remove `sync_batchnorm=True`, or use `strategy="balanced_ddp"`.'
            )
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise UnsupportedFeatureError(
                f"`balanced_dp` runs in one process, but an earlier strategy has started {dist.get_world_size()}, which"
                " all run this program. Use `balanced_dp` in a program of its own, or before strategies with several"
                " processes."
            )
        processes = 1 if self.cluster_environment is None else self.cluster_environment.world_size()
        if processes > 1:
            raise UnsupportedFeatureError(
                f"`balanced_dp` runs in one process, but {type(self.cluster_environment).__name__} reports"
                f' {processes}. Start it as a plain `python` command or with one task, or use "balanced_ddp".'
            )
        check_has_rank(self.cluster_environment)
        self._division.check(self.devices)

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

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            raise UnsupportedFeatureError(
                "`balanced_dp` cannot run manual optimization: every replica would step the optimizer on its own chunk."
                ' Set `automatic_optimization = True`, or use `strategy="ddp_checkpoint"`.'
            )
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            if takes_dataloader_iter(module, step):
                raise UnsupportedFeatureError(
                    f"`balanced_dp` cannot cut batches that `{step}(self, dataloader_iter)` fetches itself."
                    f" Take `batch` and `batch_idx` in `{step}`."
                )
            if hasattr(module, f"{step}_end"):
                rank_zero_warn(
                    f"`{step}_end` is a hook of Lightning 1.x, which Lightning 2 does not call. Compute loss and"
                    f" metrics of a chunk in `{step}`; the strategy weighs and joins them."
                )
        if self.prefetch and trainer.state.fn == TrainerFn.FITTING:
            replace_loaders(self._cleanup, trainer, self._combine_loaders)
        super().setup(trainer)
        meaning = None
        if trainer.state.fn == TrainerFn.FITTING:
            self._division.start(self.devices)
            meaning = self._weight_rule.meaning
        devices = ", ".join(map(str, self.devices))
        log_start(f"{type(self).__name__} on {devices}: the devices share each batch {self._division}.", meaning)

    def _combine_loaders(self, given: Any, is_training: bool) -> Any:
        if not is_training:
            return given
        self._prefetching.close()  # the Trainer has dropped the loader before this one
        # Chunks are copied when the step has cut the batch; from pinned memory, that does not stop the host.
        prepare = pin if any(map(has_streams, self.devices)) else None
        prefetcher = Prefetcher(self.prefetch, self.root_device, prepare=prepare)
        self._prefetching.callback(prefetcher.close)
        return combine_evenly(given, is_training=True, prefetcher=prefetcher)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # Chunks are moved when the step runs, each to its device: the whole batch never lands on device 0, and changes
        # that hooks make to it before the step are kept.
        self._dataloader_idx = dataloader_idx
        if self._replicated is not None:
            self._replicated.expect_new_batch()
        return batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.precision_plugin.train_step_context():
            outputs, record = self._run("training_step", *args, **kwargs)
        skipped = [index for index, output in zip(record.active, outputs, strict=True) if output is None]
        if skipped:
            record.skip(skipped, self._weight_rule)
            outputs = [output for output in outputs if output is not None]
            if outputs:  # otherwise Lightning warns
                self._weight_rule.warn_of_skip(f"the replicas {skipped}")
        if not any(record.weights):
            return None  # as a single device skips a batch of zero weight
        found = [output.get("loss") if isinstance(output, Mapping) else output for output in outputs]
        losses = [loss for loss in found if isinstance(loss, Tensor)]
        if len(losses) < len(found):
            return outputs[0]  # type: ignore[no-any-return]  # the Trainer raises an error for it
        assert self._replicated is not None
        loss = self._replicated.combine_losses(losses, record)
        if not isinstance(outputs[0], Mapping):
            return loss
        extras = [{name: value for name, value in output.items() if name != "loss"} for output in outputs]
        return {"loss": loss, **record.gather(extras, self.root_device, self.batch_dim)}

    def _run(self, step: str, batch: Any, *args: Any) -> tuple[list[Any], BatchRecord]:
        if self._last.is_trained:  # only now: the memory in use is what batches leave behind
            self._division.observe(self._last, self.devices)
        if self._replicated is None:
            assert self.lightning_module is not None
            self._replicated = ReplicatedModule(
                self.lightning_module,
                self.devices,
                self._division.split_sizes,
                self._weight_rule,
                self.batch_dim,
            )
        self._last = BatchRecord()  # frees the losses of a step without a backward pass
        outputs, self._last = self._replicated.run(step, batch, args, self._dataloader_idx)
        return outputs, self._last

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self._replicated is None or not self._last.losses:
            raise RuntimeError("`backward` was called without a loss from `training_step`.")
        self._replicated.backward(self._last)
        # `on_after_backward` fires here and sees the gradient of the whole batch.
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

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
        outputs, record = self._run(step, *args, **kwargs)
        self._division.peaks.forget()
        return record.gather(outputs, self.root_device, self.batch_dim)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        checkpoint.update(self._division.state_dict())
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._division.load_state_dict(checkpoint)
        return checkpoint

    @override
    def teardown(self) -> None:
        if self._replicated is not None:
            self._replicated.close()
        self._replicated = None
        self._prefetching.close()
        self._cleanup.close()
        super().teardown()
