"""A step of the LightningModule on several replicas."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext._compat.lightning_loaders import is_list_of_batches
from lightning_ddp_ext._compat.torch import STRUCTURE, TensorVersions, recompile_limit, recompile_limit_of
from lightning_ddp_ext._devices import Timer, current_device
from lightning_ddp_ext._lightning import LightningModule, PassThroughProfiler, is_overridden
from lightning_ddp_ext.batches.containers import walk
from lightning_ddp_ext.batches.splitting import gather, split_batch
from lightning_ddp_ext.batches.weights import WeightRule
from lightning_ddp_ext.errors import BatchSplitError, UnsupportedFeatureError
from lightning_ddp_ext.replicas.attribute_copies import walk_references
from lightning_ddp_ext.replicas.buffer_merger import BatchNormObserver, BufferMerger
from lightning_ddp_ext.replicas.changed_attributes import AttributeMirror
from lightning_ddp_ext.replicas.metrics import LogReplay, MetricMerger
from lightning_ddp_ext.replicas.replica import Replicas
from lightning_ddp_ext.replicas.workers import ReplicaWorkers, SharedState, refuse_changed_settings


def _observable_parts(chunks: Sequence[Any]) -> list[Any]:
    """Return the parts of chunks by which a change of a chunk is noticed."""
    # Changes of tensors made in inference mode cannot be noticed.
    return [
        part
        for chunk in chunks
        for part in walk(chunk)
        if not isinstance(part, Mapping | list | tuple) and not (isinstance(part, Tensor) and part.is_inference())
    ]


@dataclass(slots=True)
class BatchRecord:
    """A step on one batch.

    `sizes`, `timers` and `weights` have an entry for each replica. `active` are the replicas with
    samples, except the replicas in `skipped`, whose `training_step` returned None.
    """

    sizes: list[int] = field(default_factory=list)
    timers: list[list[Timer]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    in_order: bool = False
    losses: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # until the backward pass; see `combine_losses`
    is_trained: bool = False

    @property
    def active_sizes(self) -> list[int]:
        """Number of samples of each active replica."""
        return [self.sizes[index] for index in self.active]

    @property
    def active_weights(self) -> list[float]:
        """Weight of each active replica."""
        return [self.weights[index] for index in self.active]

    def is_done(self) -> bool:
        """Return True if the devices have finished the batch, so that reading the times does not wait."""
        return all(timer.is_done() for timers in self.timers for timer in timers)

    @property
    def seconds(self) -> list[float]:
        """Time that each replica has spent so far; waits for the devices."""
        return [float(sum(timer.seconds for timer in timers)) for timers in self.timers]

    def skip(self, skipped: list[int], rule: WeightRule) -> None:
        """Give some active replicas no weight in the step."""
        self.skipped = skipped
        self.active = [index for index in self.active if index not in skipped]
        self.weights = rule.normalize([w if index in self.active else 0.0 for index, w in enumerate(self.weights)])

    def gather(self, outputs: Sequence[Any], device: torch.device, batch_dim: int) -> Any:
        """Combine outputs of the active replicas into the output that one device would return."""
        return gather(outputs, self.active_sizes, device, batch_dim)


@dataclass(frozen=True, slots=True)
class _ScatteredBatch:
    """A batch with its chunks, on the devices of the replicas, and the record from which each step on it starts."""

    batch: Any
    chunks: list[Any]  # None for a replica without samples
    record: BatchRecord


class _Mergers:
    """Bring the results of the present replicas back to the module; built again with the replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self.batch_norm = BatchNormObserver(replicas)
        self.attributes = AttributeMirror(replicas)
        self._buffers = BufferMerger(replicas)
        self._metrics = MetricMerger(replicas)
        self._logs = LogReplay(replicas, self._metrics)

    def merge(self, record: BatchRecord, is_sum: bool) -> None:
        """Merge what a step did to the replicas; values are averaged by samples if losses are sums."""
        active, sizes = record.active, record.active_sizes
        has_means = not is_sum and any(record.active_weights)
        weights = record.active_weights if has_means else [float(size) for size in sizes]
        merged = self.batch_norm.merge(active, sizes)
        self._buffers.merge(active, sizes, merged)
        self.attributes.pull(active, sizes)
        self._metrics.merge(active, weights, sizes)
        self._logs.replay(active, weights, sizes)


class ReplicatedModule:
    """Runs the steps of a LightningModule, the master, on its replicas.

    The master never runs in a worker thread; the results of the replicas are merged into it when all have finished.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        split_sizes: Callable[[int, int, bool], list[int]],
        weight_rule: WeightRule,
        batch_dim: int,
    ) -> None:
        self._module = module
        self._devices = list(devices)
        # Of the number of samples, the number of replicas, and whether chunks of one sample are to be avoided.
        self._split_sizes = split_sizes
        self._weight_rule = weight_rule
        self._batch_dim = batch_dim
        self._workers = ReplicaWorkers(devices)
        self._shared = SharedState(devices)
        self._replicas = Replicas(module, devices)
        self._mergers: _Mergers  # of the replicas that `_update_replicas` has built
        self._scattered: _ScatteredBatch | None = None
        self._closing = ExitStack()
        # Compiled code is specific to the device, and to the number of threads, which workers share.
        self._closing.enter_context(recompile_limit_of(2 * len(set(devices)) * recompile_limit()))
        self._closing.callback(self._workers.close)

    def run(self, step: str, batch: Any, args: Sequence[Any], dataloader_idx: int) -> tuple[list[Any], BatchRecord]:
        """Run a step, such as `"training_step"`, on every replica with samples; return their outputs and a record."""
        self._update_replicas(step)
        outputs, record = self._step(step, args, self._scatter(batch, dataloader_idx))
        self._replicas.adopt_requires_grad(record.active, step)
        self._mergers.merge(record, self._weight_rule.is_sum)
        return outputs, record

    def combine_losses(self, losses: Sequence[Tensor], record: BatchRecord) -> Tensor:
        """Return the weighted sum of the active replicas' losses, detached from their graphs; not all weights are 0.

        Lightning's own backward pass (precision, accumulation, overrides) ends here; `backward` resumes it in replicas.
        """
        detached = [loss.detach().to(self._devices[0]).requires_grad_(loss.requires_grad) for loss in losses]
        record.losses = list(zip(losses, detached, strict=True))
        # The loss of a chunk of zero weight may be a mean over nothing, and 0 * nan is nan.
        weighted = [(loss, weight) for loss, weight in zip(detached, record.active_weights, strict=True) if weight]
        for loss in [loss for loss, _ in weighted if loss.requires_grad][:1]:  # a backward pass comes to each of them
            loss.register_hook(_refuse_second_order)  # type: ignore[no-untyped-call]
        terms = [loss * weight for loss, weight in weighted]
        return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]

    def backward(self, record: BatchRecord) -> None:
        """Run the replicas' backward passes from the gradients of the combined losses; add up their gradients."""
        losses, record.losses = record.losses, []
        jobs = {
            index: partial(torch.autograd.backward, loss, detached.grad.to(loss.device, loss.dtype))
            for index, (loss, detached) in zip(record.active, losses, strict=True)
            if detached.grad is not None
        }
        record.is_trained = True
        if not jobs:
            return
        for replica in self._replicas:  # a step may leave some, which Lightning clears before its backward pass
            replica.forget_gradients()
        self._shared.watch("backward")
        self._apply("backward", jobs, record)
        self._shared.notice_use("backward")
        self._replicas.reduce_gradients(sorted(jobs))

    def _update_replicas(self, step: str) -> None:
        """Give the replicas the parameters, buffers and attributes of the module; build them if its parts changed."""
        # Without inference mode: autograd uses what is written here in the next training step.
        with torch.inference_mode(False):
            if self._replicas.refresh(step):
                self._refuse_trained_tensors()
                self._shared.forget()
                self._mergers = _Mergers(self._replicas)
            self._mergers.attributes.push()

    def _refuse_trained_tensors(self) -> None:
        """Refuse trained tensors that are no parameters: replicas on other devices have copies without gradients."""
        trained = {
            id(tensor): type(optimizer).__name__
            for optimizer in self._module.trainer.optimizers
            for group in optimizer.param_groups
            for tensor in group["params"]
        }
        for parameter in self._module.parameters():
            trained.pop(id(parameter), None)
        if not trained or len(set(self._devices)) == 1:
            return
        for prefix, (module, _) in zip(self._replicas.prefixes, self._replicas[0].modules, strict=True):
            for name, value in vars(module).items():
                for entry in walk_references(value) if name not in STRUCTURE else ():
                    if id(entry) in trained:
                        raise UnsupportedFeatureError(
                            f"`self.{prefix}{name}` holds a tensor that `{trained[id(entry)]}` trains and that is no"
                            " parameter of the module, so that replicas on other devices would not add to its gradient."
                            " Register it as an `nn.Parameter` of a module."
                        )

    def _step(self, step: str, args: Sequence[Any], scattered: _ScatteredBatch) -> tuple[list[Any], BatchRecord]:
        """Run the step on the active replicas; repeat it in order if it uses state that the replicas share."""
        may_repeat = len(scattered.record.active) > 1 and not self._shared.forces_order(step)
        before = TensorVersions(_observable_parts(scattered.chunks) if may_repeat else [])
        outputs, record, has_used = self._run_replicas(step, args, scattered)
        if has_used and may_repeat and not record.in_order:
            # The first use came after batches without any: the step is repeated in order, on replicas as before it.
            if before.changed(_observable_parts(scattered.chunks)):
                raise UnsupportedFeatureError(
                    f"`{step}` has changed its batch, and draws random numbers or uses `parametrize.cached()` for the"
                    " first time after steps without, so that it cannot be repeated. Do so in every step, for example"
                    " by `torch.rand(())`, so that replicas run one after another from the beginning; or leave the"
                    " batch as it is."
                )
            self._shared.restore()
            del outputs  # frees the memory of the first run
            self._replicas.discard()
            self._update_replicas(step)
            outputs, record, _ = self._run_replicas(step, args, scattered)
        return outputs, record

    def _run_replicas(
        self, step: str, args: Sequence[Any], scattered: _ScatteredBatch
    ) -> tuple[list[Any], BatchRecord, bool]:
        """Run the step in the threads of the active replicas; return True last if it has used shared state."""
        trainer = self._module.trainer
        record = replace(scattered.record, timers=[[] for _ in self._devices])
        # Python's and torch's profilers record only the thread that started them; Lightning's refuse an action twice.
        profiler = trainer.profiler  # type: ignore[attr-defined]  # public, but set outside of the class
        record.in_order = not isinstance(profiler, PassThroughProfiler) or self._shared.forces_order(step)
        self._mergers.batch_norm.expect(record.active)
        self._shared.watch(step)
        jobs = {
            index: partial(getattr(self._replicas[index].module, step), scattered.chunks[index], *args)
            for index in record.active
        }
        with (
            # A single replica changes settings once, as one device does.
            refuse_changed_settings(trainer.optimizers if len(record.active) > 1 else [], step),
            self._replicas.refuse_changed_parameters(record.active, step),
        ):
            try:
                outputs = self._apply(step, jobs, record)
            except RuntimeError:  # perhaps a tensor of another device, from the cache that replicas share
                if record.in_order or len(jobs) == 1 or not self._shared.notice_use(step):
                    raise
                return [], record, True
        has_used = self._shared.notice_use(step)
        return [outputs[index] for index in record.active], record, has_used

    def expect_new_batch(self) -> None:
        """Forget the chunks of the last batch, also if the next one is the same object."""
        self._scattered = None

    def close(self) -> None:
        """End the worker threads, and restore the compiler's limit."""
        self._closing.close()

    def _scatter(self, batch: Any, dataloader_idx: int) -> _ScatteredBatch:
        # An optimizer may call the step several times for one batch (L-BFGS): augmentations then run once, as on one
        # device, where the batch is transferred once.
        if self._scattered is not None and self._scattered.batch is batch:
            return self._scattered
        self._scattered = None
        chunks, sizes = self.cut(batch)
        active = [index for index, size in enumerate(sizes) if size]
        for index in active:
            replica = self._replicas[index]
            chunks[index] = transfer(chunks[index], self._module, replica.module, replica.device, dataloader_idx)
        rule = self._weight_rule
        factors = rule.normalize([rule.weigh(chunks[index], sizes[index]) for index in active])
        by_replica = dict(zip(active, factors, strict=True))
        weights = [by_replica.get(index, 0.0) for index in range(len(sizes))]
        record = BatchRecord(sizes, weights=weights, active=active)
        self._scattered = _ScatteredBatch(batch, chunks, record)
        return self._scattered

    def cut(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Cut a batch: return one chunk per replica, None for a replica without samples, and the chunk sizes."""
        sizes: list[int] = []

        def split(number_of_samples: int) -> list[int]:
            avoids_single_samples = self._mergers.batch_norm.refuses_single_samples()
            sizes[:] = self._split_sizes(number_of_samples, len(self._devices), avoids_single_samples)
            return list(sizes)

        hook = getattr(self._module, "scatter_batch", None)
        if hook is None:
            if not is_list_of_batches(self._module.trainer, batch):
                return split_batch(batch, split, self._batch_dim), sizes
            chunks = split_batch(dict(enumerate(batch)), split, self._batch_dim)
            return [None if chunk is None else type(batch)(chunk.values()) for chunk in chunks], sizes
        chunks = list(hook(batch, split))
        if [chunk is None for chunk in chunks] != [size == 0 for size in sizes]:
            raise BatchSplitError(
                f"`scatter_batch` returned {len(chunks)} chunks for the sizes {sizes}. Call `split(number_of_samples)`"
                " once and return one chunk for each size, None for size 0."
            )
        return chunks, sizes

    def _apply(self, step: str, jobs: Mapping[int, Callable[[], Any]], record: BatchRecord) -> dict[int, Any]:
        sizes = record.sizes

        def describe(index: int) -> str:
            start = sum(sizes[:index])
            return (
                f"Raised in replica {index} of {len(self._devices)} on device {self._devices[index]},"
                f" whose chunk is samples {start} to {start + sizes[index] - 1} of a batch of {sum(sizes)}."
            )

        try:
            results, timers = self._workers.run(step, jobs, describe, record.in_order)
        except BaseException:
            # Half of a step's changes to the replicas must not reach the next step.
            self._scattered = None
            self._replicas.discard()
            raise
        for index, timer in timers.items():
            record.timers[index].append(timer)
        return results


def transfer(chunk: Any, module: LightningModule, replica: Any, device: torch.device, dataloader_idx: int) -> Any:
    """Move a chunk with the transfer hooks; the replica runs the hooks that the module overrides."""
    hooks = {"transfer_batch_to_device": (device, dataloader_idx), "on_after_batch_transfer": (dataloader_idx,)}
    for hook, args in hooks.items():
        data = module.trainer.datamodule  # type: ignore[attr-defined]  # public, but set outside of the class
        owner = data if data is not None and is_overridden(hook, data) else module
        with current_device(device):
            chunk = getattr(replica if owner is module else owner, hook)(chunk, *args)
    return chunk


def _refuse_second_order(gradient: Tensor) -> None:
    # Autograd records gradients in a backward pass only with `create_graph=True`.
    if torch.is_grad_enabled():
        raise UnsupportedFeatureError(
            "`balanced_dp` cannot run `backward(create_graph=True)`: the module's gradients are sums over replicas and"
            " have no graph to differentiate. Train optimizers that need second-order gradients, such as AdaHessian,"
            ' with `strategy="auto", devices=1`; a gradient penalty may call'
            " `torch.autograd.grad(..., create_graph=True)` inside `training_step`."
        )
