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

from lightning_ddp_ext._compat.lightning import data_hook_owner
from lightning_ddp_ext._compat.lightning_loaders import is_list_of_batches
from lightning_ddp_ext._compat.torch import versions_of
from lightning_ddp_ext._devices import current_device, set_rng_state
from lightning_ddp_ext.batches.chunk_sizes import merge_single_samples
from lightning_ddp_ext.batches.containers import items
from lightning_ddp_ext.batches.splitting import batch_size_of, rows_of_graphs, split_batch
from lightning_ddp_ext.batches.weights import WeightBy, combination_weights
from lightning_ddp_ext.errors import BatchSplitError, UnsupportedFeatureError
from lightning_ddp_ext.replicas.attributes import AttributeMirror
from lightning_ddp_ext.replicas.buffer_merger import BatchNormObserver, BufferMerger
from lightning_ddp_ext.replicas.log_replay import LogReplay
from lightning_ddp_ext.replicas.metrics import MetricMerger
from lightning_ddp_ext.replicas.replica import Replicas
from lightning_ddp_ext.replicas.shared_state import (
    SharedGenerators,
    SharedParametrizationCache,
    refuse_changed_settings,
)
from lightning_ddp_ext.replicas.workers import ReplicaWorkers, Timer, current_replica


class _Parts:
    """The parts of chunks, to see whether a step has changed them."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        self._before = self._list()

    def have_changed(self) -> bool:
        """Return True if a container holds another part, or a tensor was changed in place."""
        now = self._list()
        pairs = zip(self._before, now, strict=False)
        return len(now) != len(self._before) or any(one is not two or v != w for (one, v), (two, w) in pairs)

    def _list(self) -> list[tuple[Any, int]]:
        parts = list(self._chunks)
        for part in parts:
            parts.extend(item for _, item in items(part))  # which this loop visits too
        leaves = [part for part in parts if not isinstance(part, Mapping | list | tuple)]
        return list(zip(leaves, versions_of(leaves), strict=True))


@contextmanager
def _actions_named_by_replica(profiler: Profiler) -> Iterator[None]:
    """Name what a replica profiles, such as `[Replica 1]attention`; a profiler refuses a name that is under way."""
    if isinstance(profiler, PassThroughProfiler):
        yield
        return

    def named(method: Callable[[str], None]) -> Callable[[str], None]:
        def call(action_name: str) -> None:
            # On accelerators, the backward pass of all replicas recomputes in threads of autograd, at the same time.
            if (index := current_replica()) is not None:
                method(f"[Replica {index}]{action_name}")

        return call

    # On the instance, because code inside a step reaches the profiler by many ways.
    vars(profiler).update(start=named(profiler.start), stop=named(profiler.stop))
    try:
        yield
    finally:
        del vars(profiler)["start"], vars(profiler)["stop"]


@dataclass(slots=True)
class BatchRecord:
    """The sizes, weights and times of a batch, kept after its chunks.

    `sizes` and `timers` have an entry for each replica, `weights` one for each replica with samples; `skipped` holds
    the replicas whose `training_step` returned None.
    """

    sizes: list[int]
    timers: list[list[Timer]]
    in_order: bool = False
    weights: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def is_done(self) -> bool:
        """Return True if the devices have finished the batch, so that reading the times does not wait."""
        return all(timer.is_done() for timers in self.timers for timer in timers)

    @property
    def seconds(self) -> list[float]:
        """Time that each replica has spent so far; waits for the devices."""
        return [float(sum(timer.seconds for timer in timers)) for timers in self.timers]


@dataclass(slots=True)
class ScatteredBatch:
    """A batch and its chunks.

    `chunks` and `sizes` have an entry for each replica, None and 0 for a replica without samples; `weights` has one for
    each replica in `active`, which are the replicas with samples. `other_rows` are numbers of rows, other than the
    sizes, that outputs of the active replicas may have.
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
    """Runs the steps of a LightningModule, the master, on its replicas.

    The master itself never runs in a worker thread, so it is never half changed. Logged values, metrics, buffers and
    attributes of the replicas are merged into it when all have finished.
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
        self._generators = SharedGenerators(devices)
        self._replicas = Replicas(module, devices)
        self._scattered: ScatteredBatch | None = None
        # Compiled code is specific to the device, and to the number of threads, which workers share.
        limit = 2 * len(set(devices)) * torch.compiler.config.recompile_limit
        self._recompile_limit = torch.compiler.config.patch(recompile_limit=limit)  # type: ignore[attr-defined]
        self._recompile_limit.__enter__()

    def run(self, step: str, batch: Any, args: Sequence[Any], dataloader_idx: int) -> tuple[list[Any], ScatteredBatch]:
        """Run a step, such as `"training_step"`, on every replica with samples; return their outputs and the batch."""
        self._update_replicas(step)
        scattered = self._scatter(batch, dataloader_idx)
        outputs = self._step(step, args, scattered)
        self._merge(scattered)
        return outputs, scattered

    def backward(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None], scattered: ScatteredBatch) -> None:
        """Run the active replicas' backward passes from the gradients of their losses; add up the replicas' gradients.

        A replica whose loss has no gradient runs none.
        """
        jobs = {
            index: partial(torch.autograd.backward, loss, gradient.to(loss.device, loss.dtype))
            for index, loss, gradient in zip(scattered.active, losses, gradients, strict=True)
            if gradient is not None
        }
        if not jobs:
            return
        self._replicas.forget_gradients()
        states = self._generators.states()
        self._apply(jobs, scattered)
        self._generators.notice_draws("backward", states)
        self._replicas.reduce_gradients(sorted(jobs))

    def _update_replicas(self, step: str) -> None:
        """Give the replicas the parameters, buffers and attributes of the module; build them if its parts changed."""
        # Without inference mode: autograd uses what is written here in the next training step.
        with torch.inference_mode(False), torch.no_grad():
            if self._replicas.refresh(step):
                self._generators.forget()
                self._parametrizations = SharedParametrizationCache(self._module)
                self._batch_norm = BatchNormObserver(self._replicas)
                self._buffers = BufferMerger(self._replicas)
                self._metrics = MetricMerger(self._replicas)
                self._logs = LogReplay(self._replicas, self._metrics)
                self._attributes = AttributeMirror(self._replicas)
            self._attributes.push()

    def _step(self, step: str, args: Sequence[Any], scattered: ScatteredBatch) -> list[Any]:
        """Run the step in the threads of the active replicas."""
        trainer, active = self._module.trainer, scattered.active
        jobs = {
            index: partial(getattr(self._replicas[index].module, step), scattered.chunks[index], *args)
            for index in active
        }
        # Python's and torch's profilers record only the thread that started them.
        has_one_thread = not isinstance(_profiler(trainer), PassThroughProfiler | SimpleProfiler)
        in_order = has_one_thread or self._generators.forces_order(step) or self._parametrizations.forces_order(step)
        timers: list[list[Timer]] = [[] for _ in self._devices]
        scattered.record = BatchRecord(scattered.sizes, timers, in_order, scattered.weights)
        self._batch_norm.forget()
        states, parts = self._generators.states(), _Parts([scattered.chunks[index] for index in active])
        with (
            # A single replica changes settings once, as one device does.
            refuse_changed_settings(trainer.optimizers if len(active) > 1 else [], step),
            self._replicas.refuse_changed_parameters(active, step),
            self._parametrizations.watch(step, in_order or len(active) == 1),
        ):
            outputs = self._apply(jobs, scattered)
        if self._generators.notice_draws(step, states) and not in_order and len(active) > 1:
            # The first draw came after batches without any: the step is repeated in order, on replicas as before it.
            if parts.have_changed():
                raise UnsupportedFeatureError(
                    f"`{step}` has changed its batch, and draws random numbers for the first time after steps without"
                    " any, so that it cannot be repeated. Draw in every step, for example by `torch.rand(())`, so that"
                    " replicas run one after another from the beginning; or leave the batch as it is."
                )
            for device, state in states.items():
                set_rng_state(state, device)
            del outputs, jobs
            self._replicas.discard()
            self._update_replicas(step)
            return self._step(step, args, scattered)
        return [outputs[index] for index in active]

    def _merge(self, scattered: ScatteredBatch) -> None:
        """Bring what the step did to the replicas back to the module."""
        active, sizes = scattered.active, scattered.active_sizes
        has_means = self._weight_by != "sum" and any(scattered.weights)
        weights = scattered.weights if has_means else [float(size) for size in sizes]
        merged = self._batch_norm.merge(active, sizes)
        self._buffers.merge(active, sizes, merged)
        self._attributes.pull(active, sizes)
        self._metrics.merge(active, weights, sizes)
        self._logs.replay(active, weights, sizes)

    def expect_new_batch(self) -> None:
        """Forget the chunks of the last batch, also if the next one is the same object."""
        self._scattered = None

    def close(self) -> None:
        """End the worker threads, and restore the compiler's limit."""
        self._workers.close()
        self._recompile_limit.__exit__(None, None, None)

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

    def _apply(self, jobs: Mapping[int, Callable[[], Any]], scattered: ScatteredBatch) -> dict[int, Any]:
        def describe(index: int) -> str:
            start = sum(scattered.sizes[:index])
            return (
                f"Raised in replica {index} of {len(self._devices)} on device {self._devices[index]},"
                f" whose chunk is samples {start} to {start + scattered.sizes[index] - 1} of a batch of"
                f" {sum(scattered.sizes)}."
            )

        try:
            with _actions_named_by_replica(_profiler(self._module.trainer)):
                results, timers = self._workers.run(jobs, describe, scattered.record.in_order)
        except BaseException:
            # Half of a step's changes to the replicas must not reach the next step.
            self._scattered = None
            self._replicas.discard()
            raise
        for index, timer in timers.items():
            scattered.record.timers[index].append(timer)
        return results


def _profiler(trainer: Trainer) -> Profiler:
    return trainer.profiler  # type: ignore[attr-defined, no-any-return]  # public, but set outside of the class


def transfer(chunk: Any, module: LightningModule, replica: Any, device: torch.device, dataloader_idx: int) -> Any:
    """Move a chunk with the transfer hooks; the replica runs the hooks that the module overrides."""
    hooks = {"transfer_batch_to_device": (device, dataloader_idx), "on_after_batch_transfer": (dataloader_idx,)}
    for hook, args in hooks.items():
        owner = data_hook_owner(module.trainer, hook)
        with current_device(device):
            chunk = getattr(replica if owner is module else owner, hook)(chunk, *args)
    return chunk


class CombinedLoss:
    """The weighted sum of the active replicas' losses, detached from their graphs; not all weights are 0.

    Lightning's own backward pass (precision, accumulation, overrides) ends here; `backward` resumes it in the replicas.
    """

    def __init__(self, losses: Sequence[Tensor], scattered: ScatteredBatch, device: torch.device) -> None:
        self._losses = losses
        self._scattered = scattered
        self._leaves = [loss.detach().to(device).requires_grad_(loss.requires_grad) for loss in losses]
        for leaf in self._leaves:
            if leaf.requires_grad:
                leaf.register_hook(_refuse_second_order)  # type: ignore[no-untyped-call]
        # The loss of a chunk of zero weight may be a mean over nothing, and 0 * nan is nan.
        terms = [leaf * weight for leaf, weight in zip(self._leaves, scattered.weights, strict=True) if weight]
        self.value = torch.stack(terms).sum(0)

    def backward(self, replicated: ReplicatedModule) -> None:
        """Run the replicas' backward passes from the gradients that the sum has passed to their losses."""
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
