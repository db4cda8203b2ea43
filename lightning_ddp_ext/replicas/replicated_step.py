"""A step of the LightningModule on several replicas."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, SimpleProfiler
from torch import Tensor

from lightning_ddp_ext._compat.lightning import REPLICA_ATTRIBUTES, adopt_device, data_hook_owner
from lightning_ddp_ext._compat.loaders import is_list_of_batches
from lightning_ddp_ext.batches.chunk_sizes import merge_single_samples
from lightning_ddp_ext.batches.splitting import batch_size_of, rows_of_graphs, split_batch
from lightning_ddp_ext.batches.weights import WeightBy, combination_weights
from lightning_ddp_ext.errors import BatchSplitError, UnsupportedFeatureError
from lightning_ddp_ext.replicas.attributes import AttributeMirror
from lightning_ddp_ext.replicas.buffers import BatchNormObserver, BufferMerger
from lightning_ddp_ext.replicas.logged_values import LogReplay
from lightning_ddp_ext.replicas.metrics import MetricFolder, copy_metric
from lightning_ddp_ext.replicas.replica import Replicas
from lightning_ddp_ext.replicas.shared_state import OptimizerSettings, SharedGenerator, SharedParametrizationCache
from lightning_ddp_ext.replicas.workers import ReplicaWorkers, Timer, current_replica


def watches_one_thread(trainer: Trainer) -> bool:
    """Tell whether replicas must run one after another, on the calling thread, for the Trainer's profiler to see them.

    The profilers of Python and of torch record the thread that started them, and hooks of Lightning's around them keep
    one record per name of a module.
    """
    return not isinstance(_profiler(trainer), PassThroughProfiler | SimpleProfiler)


@contextmanager
def actions_named_by_replica(trainer: Trainer) -> Iterator[None]:
    """Give what replicas profile a name for each replica, such as `[Replica 1]attention`.

    A profiler knows an action by its name alone, and refuses to start one that another replica has started.

    Args:
        trainer: The Trainer whose profiler is meant.
    """
    profiler = _profiler(trainer)
    if isinstance(profiler, PassThroughProfiler):
        yield
        return
    before = dict(vars(profiler))
    # On the instance: code inside a step reaches the profiler by many ways.
    vars(profiler).update(start=_named(profiler.start), stop=_named(profiler.stop))
    try:
        yield
    finally:
        for method in ("start", "stop"):
            vars(profiler).pop(method)
            if method in before:
                vars(profiler)[method] = before[method]


def _profiler(trainer: Trainer) -> Profiler:
    return trainer.profiler  # type: ignore[attr-defined, no-any-return]  # public, but set outside of the class


def _named(method: Callable[[str], None]) -> Callable[[str], None]:
    def call(action_name: str) -> None:
        index = current_replica()
        method(action_name if index is None else f"[Replica {index}]{action_name}")

    return call


@dataclass(slots=True)
class BatchRecord:
    """What is kept of a batch when its chunks are gone.

    Attributes:
        sizes: Number of samples of each replica.
        timers: What has measured each replica's work, forward and backward.
        in_order: Whether the replicas ran one after another.
        weights: What each loss counts in the loss of the batch, of the replicas that have samples.
        skipped: Indices of the replicas whose `training_step` returned None.
    """

    sizes: list[int]
    timers: list[list[Timer]]
    in_order: bool = False
    weights: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Time that each replica has spent so far. Waits for the devices."""
        return [float(sum(timer.seconds for timer in timers)) for timers in self.timers]


@dataclass(slots=True)
class ScatteredBatch:
    """A batch and its chunks.

    Attributes:
        batch: The whole batch, where the loader left it.
        chunks: One chunk per replica, on its device; None for a replica without samples.
        sizes: Number of samples of each chunk.
        active: Indices of the replicas that have samples.
        weights: What each active replica's loss counts in the loss of the batch.
        record: What is measured of it.
        other_rows: Numbers of rows, other than the sizes, that outputs of the active replicas may have.
    """

    batch: Any
    chunks: list[Any]
    sizes: list[int]
    active: list[int]
    weights: list[float]
    record: BatchRecord
    other_rows: list[tuple[int, ...]]

    @property
    def active_sizes(self) -> list[int]:
        """Number of samples of each active replica."""
        return [self.sizes[index] for index in self.active]


class ReplicatedModule:
    """A LightningModule and its replicas.

    The module itself never runs in a worker thread, so it is never half changed; what a step does to replicas - logged
    values, metrics, buffers, attributes - is brought back to it when all have finished.

    Args:
        module: The user's module, on the first device.
        devices: Device of each replica.
        chunk_sizes: Maps a batch size to one chunk size per replica.
        weight_by: See `combination_weights`.
        batch_dim: Dimension of tensors that counts samples.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        chunk_sizes: Callable[[int], list[int]],
        weight_by: WeightBy,
        batch_dim: int,
    ) -> None:
        self._module = module
        self._devices = list(devices)
        self._chunk_sizes = chunk_sizes
        self._weight_by = weight_by
        self._batch_dim = batch_dim
        self._workers = ReplicaWorkers(devices)
        self._generator = SharedGenerator(devices)
        self._replicas = Replicas(module, devices, copy_metric, self._attach)
        self._scattered: ScatteredBatch | None = None

    def _attach(self, replicas: Replicas) -> None:
        for replica in replicas:
            adopt_device(replica.module, replica.device)
        self._generator.forget()
        self._parametrizations = SharedParametrizationCache(replicas.master)
        self._batch_norm = BatchNormObserver(replicas)
        self._buffers = BufferMerger(replicas)
        self._metrics = MetricFolder(replicas)
        self._logs = LogReplay(replicas, self._metrics)
        self._attributes = AttributeMirror(replicas, own=REPLICA_ATTRIBUTES)

    def run(self, step: str, batch: Any, args: Sequence[Any], dataloader_idx: int) -> tuple[list[Any], ScatteredBatch]:
        """Run a step on every replica that has samples.

        Args:
            step: Name of the method, such as `"training_step"`.
            batch: The whole batch.
            args: The step's other arguments.
            dataloader_idx: Number of the loader that the batch is from.

        Returns:
            What each active replica returned, and the scattered batch.

        Raises:
            BatchSplitError: If the batch cannot be cut.
            UnsupportedFeatureError: If the step has changed a parameter in place, or a setting of an optimizer.
            BaseException: The exception of a replica, with a note that names replica, device and chunk.
        """
        self._replicas.refresh()
        self._attributes.push()
        scattered = self._scatter(batch, dataloader_idx)
        self._attributes.lend(scattered.active)
        self._batch_norm.forget()
        jobs = {
            index: partial(getattr(self._replicas[index].module, step), scattered.chunks[index], *args)
            for index in scattered.active
        }
        in_order = (
            self._generator.forces_order(step)
            or self._parametrizations.forces_order(step)
            or watches_one_thread(self._module.trainer)
        )
        scattered.record = BatchRecord(scattered.sizes, [], in_order, scattered.weights)
        versions = self._replicas.versions(scattered.active)
        # What a single replica changes is changed once, as on one device.
        settings = OptimizerSettings(self._module.trainer.optimizers if len(jobs) > 1 else [])
        with self._generator.watch(step), self._parametrizations.watch(step, in_order or len(jobs) == 1):
            results, timers = self._apply(jobs, scattered)
        self._replicas.check_untouched(versions, step)
        settings.check_unchanged(step)
        scattered.record.timers = [[timers[index]] if index in timers else [] for index in range(len(self._devices))]
        self._bring_back(scattered)
        return [results[index] for index in scattered.active], scattered

    def expect_new_batch(self) -> None:
        """Forget the chunks of the last batch, also if the next one is the same object."""
        self._scattered = None

    def backward(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None], scattered: ScatteredBatch) -> None:
        """Run every replica's backward pass and add its gradients to the module's.

        Args:
            losses: The loss of each active replica.
            gradients: The gradient of the batch's loss with respect to each of them; None where it has none.
            scattered: What the losses were computed from.
        """
        jobs = {
            index: partial(torch.autograd.backward, loss, gradient.to(loss.device, loss.dtype))
            for index, loss, gradient in zip(scattered.active, losses, gradients, strict=True)
            if gradient is not None
        }
        if not jobs:
            return
        self._replicas.forget_gradients()
        _, timers = self._apply(jobs, scattered)
        self._replicas.reduce_gradients(sorted(jobs))
        self._attributes.collect_responses(scattered.active, scattered.active_sizes)
        for index, timer in timers.items():
            scattered.record.timers[index].append(timer)

    def close(self) -> None:
        """End the worker threads."""
        self._workers.close()

    def _scatter(self, batch: Any, dataloader_idx: int) -> ScatteredBatch:
        # An optimizer may call the step several times for one batch (L-BFGS): augmentations then run once, as on one
        # device, where the batch is transferred once.
        if self._scattered is not None and self._scattered.batch is batch:
            return self._scattered
        self._scattered = None
        chunks, sizes = self.cut(batch)
        active = [index for index, size in enumerate(sizes) if size]
        other_rows = list(zip(*(rows_of_graphs(chunks[index]) for index in active), strict=False))
        for index in active:
            replica = self._replicas[index]
            chunks[index] = transfer(chunks[index], self._module, replica.module, replica.device, dataloader_idx)
        weights = combination_weights(self._weight_by, [chunks[i] for i in active], [sizes[i] for i in active])
        record = BatchRecord(sizes, [])
        self._scattered = ScatteredBatch(batch, chunks, sizes, active, weights, record, other_rows)
        return self._scattered

    def cut(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Cut a batch: return one chunk per replica, None for a replica without samples, and the chunk sizes."""
        hook = getattr(self._module, "scatter_batch", None)
        if hook is None and is_list_of_batches(self._module.trainer, batch):
            chunks, sizes = self._cut_by_size(dict(enumerate(batch)))
            return [None if chunk is None else type(batch)(chunk.values()) for chunk in chunks], sizes
        if hook is None:
            return self._cut_by_size(batch)
        sizes = []

        def split(number_of_samples: int) -> list[int]:
            sizes[:] = self._sizes(number_of_samples)
            return list(sizes)

        chunks = list(hook(batch, split))
        if [chunk is None for chunk in chunks] != [size == 0 for size in sizes]:
            raise BatchSplitError(
                f"`scatter_batch` returned {len(chunks)} chunks for the sizes {sizes}. Call `split(number_of_samples)`"
                " once and return one chunk for each size, None for size 0."
            )
        return chunks, sizes

    def _cut_by_size(self, batch: Any) -> tuple[list[Any], list[int]]:
        sizes = self._sizes(batch_size_of(batch, self._batch_dim))
        return split_batch(batch, sizes, self._batch_dim), sizes

    def _sizes(self, batch_size: int) -> list[int]:
        sizes = self._chunk_sizes(batch_size)
        return merge_single_samples(sizes) if 1 in sizes and self._batch_norm.refuses_single_samples() else sizes

    def _apply(
        self, jobs: Mapping[int, Callable[[], Any]], scattered: ScatteredBatch
    ) -> tuple[dict[int, Any], dict[int, Timer]]:
        def describe(index: int) -> str:
            start = sum(scattered.sizes[:index])
            return (
                f"Raised in replica {index} of {len(self._devices)} on device {self._devices[index]},"
                f" whose chunk is samples {start} to {start + scattered.sizes[index] - 1} of a batch of"
                f" {sum(scattered.sizes)}."
            )

        try:
            with actions_named_by_replica(self._module.trainer):
                return self._workers.run(jobs, describe, scattered.record.in_order)
        except BaseException:
            # What the step half did to the replicas must not reach the next one.
            self._scattered = None
            self._replicas.discard()
            raise

    def _bring_back(self, scattered: ScatteredBatch) -> None:
        active, sizes = scattered.active, scattered.active_sizes
        has_means = self._weight_by != "sum" and any(scattered.weights)
        means = scattered.weights if has_means else [float(size) for size in sizes]
        merged = self._batch_norm.merge(active, sizes)
        self._buffers.merge(active, sizes, merged)
        self._attributes.collect(active, sizes)
        self._metrics.fold(active, means, sizes)
        self._logs.replay(active, sizes, means)


def transfer(chunk: Any, module: LightningModule, replica: Any, device: torch.device, dataloader_idx: int) -> Any:
    """Apply the transfer hooks to a chunk; they are the replica's where the module overrides them."""
    hooks = {"transfer_batch_to_device": (device, dataloader_idx), "on_after_batch_transfer": (dataloader_idx,)}
    for hook, args in hooks.items():
        owner = data_hook_owner(module.trainer, hook)
        chunk = getattr(replica if owner is module else owner, hook)(chunk, *args)
    return chunk


class CombinedLoss:
    """The weighted sum of the replicas' losses, cut off from their graphs.

    Lightning's own backward pass (precision, accumulation, overrides) ends here; `backward` goes on in the replicas.

    Args:
        losses: The loss of each active replica.
        scattered: What they were computed from. Not all of its weights are 0.
        device: Where the sum is made.

    Attributes:
        value: The sum.
    """

    def __init__(self, losses: Sequence[Tensor], scattered: ScatteredBatch, device: torch.device) -> None:
        self._losses = losses
        self._scattered = scattered
        self._leaves = [loss.detach().to(device).requires_grad_(loss.requires_grad) for loss in losses]
        # A chunk that counts nothing is left out: its loss may be a mean over nothing, and 0 * nan is nan.
        for leaf in self._leaves:
            if leaf.requires_grad:
                leaf.register_hook(_refuse_second_order)  # type: ignore[no-untyped-call]
        terms = [leaf * weight for leaf, weight in zip(self._leaves, scattered.weights, strict=True) if weight]
        self.value = torch.stack(terms).sum(0)

    def backward(self, replicated: ReplicatedModule) -> None:
        """Take the gradient that the sum has got through the replicas' graphs, and add up what comes out."""
        replicated.backward(self._losses, [leaf.grad for leaf in self._leaves], self._scattered)


def _refuse_second_order(gradient: Tensor) -> None:
    # Autograd records gradients in a backward pass only with `create_graph=True`.
    if torch.is_grad_enabled():
        raise UnsupportedFeatureError(
            "`balanced_dp` cannot run `backward(create_graph=True)`: the module's gradients are sums over replicas and"
            " have no graph to differentiate. Train optimizers that need second-order gradients, such as AdaHessian,"
            ' with `strategy="auto", devices=1`; a gradient penalty may call'
            " `torch.autograd.grad(..., create_graph=True)` inside `training_step`."
        )
