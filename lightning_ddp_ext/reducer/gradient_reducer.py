"""Synchronisation of gradients after any backward pass."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import steps_in_backward
from lightning_ddp_ext._validation import check_bucket_cap
from lightning_ddp_ext.consistency.setups import compare_setups, describe_module, fixed_parameters, shared_parameters
from lightning_ddp_ext.distributed.exchange import digest, group_with_cpu, own_group
from lightning_ddp_ext.distributed.flat_tensors import broadcast_all
from lightning_ddp_ext.errors import RanksOutOfStepError, UnsupportedFeatureError
from lightning_ddp_ext.reducer.buckets import GradientBucket, GradientLayout
from lightning_ddp_ext.reducer.buffers import BufferSynchronizer
from lightning_ddp_ext.reducer.collector import GradientCollector
from lightning_ddp_ext.reducer.comm_hooks import BucketTransport, CommHook
from lightning_ddp_ext.reducer.control import NOTES, RankReport, SyncControl, SyncReport


class SparseGradients:
    """Adds up the sparse gradients of all ranks by gathering their rows, which every backend can do.

    Args:
        module: Searched for embeddings with sparse gradients.
        parameters: All parameters, the same on every rank.
        group: The ranks.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        weights = {
            part.weight for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        }
        self.members = frozenset(member for member, parameter in enumerate(parameters) if parameter in weights)
        self._parameters = parameters
        self._group = group

    def reduce(self, used: Sequence[float], factor: float) -> None:
        """Give the parameters that any rank has used the sum of their gradients.

        Args:
            used: Above 0 for what any rank has used; the same on every rank.
            factor: What this rank's gradients are multiplied by.
        """
        for member in sorted(self.members):
            if used[member]:
                self._reduce(self._parameters[member], factor)

    def _reduce(self, parameter: nn.Parameter, factor: float) -> None:
        gradient = parameter.grad
        if gradient is None or not factor:
            gradient = torch.sparse_coo_tensor(
                torch.zeros(1, 0, dtype=torch.long, device=parameter.device),
                parameter.detach()[:0],
                parameter.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        dense = gradient.layout == torch.strided
        gradient = gradient.detach() * factor if dense else gradient.detach().coalesce() * factor
        counts = self._gather(torch.tensor([[-1 if dense else gradient._nnz()]], device=parameter.device))
        if min(counts.flatten().tolist()) < 0:
            # A dense gradient somewhere, of a layer tied to the embedding: the sum is dense.
            parameter.grad = gradient.to_dense()
            dist.all_reduce(parameter.grad, group=self._group)
            return
        sizes = [int(count) for count in counts.flatten().tolist()]
        rows = self._gather_rows(gradient.indices().t(), sizes)
        values = self._gather_rows(gradient.values(), sizes)
        parameter.grad = torch.sparse_coo_tensor(rows.t(), values, parameter.shape, check_invariants=False).coalesce()

    def _gather_rows(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: len(part)] = part
        gathered = torch.split(self._gather(padded), max(sizes)) if max(sizes) else [padded]
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=False)])

    def _gather(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return torch.cat(parts)


class GradientReducer:
    """Averages gradients over the ranks of a process group, by weight, while the backward pass is still running.

    No assumption is made about the backward pass: parameters may get gradients several times (reused layers,
    activation checkpointing, several backward passes) or not at all, on some ranks or on all; layers may be frozen and
    thawed; graphs may change from step to step and differ between ranks. How it works: gradients are moved into flat
    buckets, which are reduced in a fixed order, each as early as this rank believes it complete, from what the same
    kind of backward pass did before. A gradient that comes after its bucket has left is a new tensor, which is reduced
    by itself and added. At the end ranks exchange which parameters were used anywhere, which buckets had late
    gradients, and the total weight; a last bucket on the CPU takes that along. A wrong belief therefore costs time,
    never correctness.

    Every rank has to synchronise equally often, with or without a backward pass of its own. Where no rank used a
    parameter, its gradient stays None. Sparse gradients stay sparse if they are those of embedding modules with
    `sparse=True`; those of `functional.embedding` become dense. Buffers which a rank has changed are made equal as
    well: floating ones are averaged by weight, others come from the first rank that had data. What torch's
    `DistributedDataParallel` is told to ignore is ignored, see `find_ignored`.

    Args:
        module: The same module on every rank, on its devices. Parameters and buffers become those of the first rank.
        process_group: The ranks; by default all, in a group of the reducer's own, so that collectives issued by the
            model cannot mix with those of the gradients.
        bucket_cap_mb: Largest size of a bucket in MiB.
        comm_hook: What reduces a bucket instead of an all-reduce, `hook(state, bucket) -> Future[Tensor]`, as for
            torch's `DistributedDataParallel.register_comm_hook`.
        comm_state: First argument of `comm_hook`.
        timeout: Time limit of a collective in the reducer's own group; None for torch's default.

    Raises:
        TypeError: If `bucket_cap_mb` is not a number.
        ValueError: If `bucket_cap_mb` is out of range.
        ReplicaMismatchError: If the module is not built alike on every rank.
        UnsupportedFeatureError: If parameters are not initialised yet.

    Example:
        ```python
        dist.init_process_group("gloo")
        model = nn.Linear(8, 1)
        reducer = GradientReducer(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches:  # of any size, different on every rank
            optimizer.zero_grad()
            with reducer.synchronize(weight=len(x)):
                nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        reducer.close()
        dist.destroy_process_group()
        ```
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25.0,
        comm_hook: CommHook | None = None,
        comm_state: object = None,
        timeout: timedelta | None = None,
    ) -> None:
        check_bucket_cap(bucket_cap_mb)
        self._parameters = shared_parameters(module)
        self._names = dict(module.named_parameters())
        self._known = {id(parameter): parameter for parameter in module.parameters()}
        self._owns_group = process_group is None
        self._group = own_group(timeout) if process_group is None else group_with_cpu(process_group)
        # Ranks with and without a hook, or on another kind of device, would send other messages.
        kinds = {"kind of device": sorted({parameter.device.type for parameter in self._parameters})}
        compare_setups(
            {**describe_module(module), **kinds, "use of a communication hook": bool(comm_hook)}, self._group
        )
        self._transport = BucketTransport(self._group, comm_hook, comm_state)
        self._sparse = SparseGradients(module, self._parameters, self._group)
        self._layout = GradientLayout(self._parameters, self._sparse.members, bucket_cap_mb, self._group)
        self._buffers = BufferSynchronizer(module, self._group)
        self._control = SyncControl(self._group)
        self._weight = self._scale = 1.0
        self._divisor: float | None = None
        # A power of two near the total of the weights that the last synchronisation found, so the same on every rank.
        # Dividing by it keeps sums small and rounds nothing: gradients do not depend on what was before.
        self._expected_total = 1.0
        self._stop = self._stop_agreed = 0
        self._position = self._begun = 0
        self._notes: Sequence[float] = ()
        self._report: SyncReport | None = None
        broadcast_all([*self._parameters, *fixed_parameters(module), *self._buffers.tensors()], self._group)
        self._buffers.remember()
        self._collector = GradientCollector(self._parameters, self._layout, self._transport)
        # Makes the context in which hooks on parameters run after a synchronisation, from its position.
        self.hook_context: Callable[[int], AbstractContextManager[None]] = lambda position: nullcontext()
        self.defer_hooks()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self._group

    @property
    def report(self) -> SyncReport | None:
        """What ranks told each other in the last synchronisation; the same on every rank."""
        return self._report

    @property
    def stop_agreed(self) -> int:
        """What ranks asked for in the last synchronisation, the largest `stop`; the same on every rank."""
        return self._stop_agreed

    def unsynchronized(self, parameters: Iterable[Tensor]) -> bool:
        """Tell whether any of these parameters has a gradient that came since it was last synchronised."""
        waiting = self._collector.waiting()
        return bool(waiting) and any(id(parameter) in waiting for parameter in parameters)

    def unmanaged_parameters(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return those of these parameters that were not part of the module when the reducer was made."""
        return [parameter for parameter in parameters if id(parameter) not in self._known]

    def defer_hooks(self) -> None:
        """Let hooks of `register_post_accumulate_grad_hook` run after the synchronisation, with its gradient.

        `synchronize` does so itself. Call it before a backward pass outside of a block if hooks were added meanwhile.

        Raises:
            UnsupportedFeatureError: If an optimizer steps inside of the backward pass in another way.
        """
        if not self._collector.defer_hooks():
            return
        for name, parameter in self._names.items():
            if steps_in_backward(parameter):
                raise UnsupportedFeatureError(
                    f"parameter `{name}` is changed inside of the backward pass, by `_apply_optimizer_in_backward`,"
                    " with the gradient of this rank alone. Use the optimizer without it, or step in a hook of"
                    " `register_post_accumulate_grad_hook`, which sees the gradient of all ranks."
                )

    def disregard(self) -> AbstractContextManager[None]:
        """Take no notice of the gradients that come in a block, and that are thrown away."""
        return self._collector.disregard()

    @contextmanager
    def synchronize(
        self,
        weight: float = 1.0,
        scale: float | None = None,
        stop: int = 0,
        position: int = 0,
        notes: Sequence[float] = (),
        divisor: float | None = None,
    ) -> Iterator[None]:
        """Synchronise the gradients at the end of a block, overlapped with the backward passes inside.

        What has been accumulated before counts as well. With an empty block, a rank that has no batch takes part.

        Args:
            weight: What this rank's gradient counts, such as the number of its samples if the loss is their mean; 0
                if it has none: its gradients then count as not there. The result is the sum of `scale * gradient` over
                the ranks, divided by the sum of their weights. If the weights add up to 0, what has been synchronised
                before stays, and nothing is added.
            scale: What the gradient is multiplied by; by default the weight. Accumulated gradients that are weighted
                already have another one.
            stop: Above 0 to ask all ranks to stop, see `stop_agreed`; the number may say why.
            position: Where in the training this is, such as the number of the batch; the same on all ranks.
            notes: What this rank tells the others, up to two numbers, whole ones below 2 ** 53; see `report`.
            divisor: What the sum over the ranks is divided by instead of their weights, the same on all ranks.

        Raises:
            ValueError: If the weight is negative or not finite, or there are too many notes.
            RanksOutOfStepError: If ranks are at different positions, if a synchronisation before has failed on some of
                them, or the last one after its backward pass had begun.
        """
        if self._collector.is_active:
            raise RuntimeError("A synchronisation has begun already. End its block before the next one begins.")
        if self._collector.has_begun:
            raise RanksOutOfStepError(
                f"rank {dist.get_rank(self._group)}: the last synchronisation failed after its backward pass had begun,"
                " so that what this rank sends next might be added to what others sent then. Restart the run, such as"
                " from its last checkpoint; to go on after an error, let the forward pass raise it, before any backward"
                " pass."
            )
        self.defer_hooks()
        self._begun += 1  # first, so that an error of this rank alone is noticed
        if not 0 <= weight < math.inf:
            raise ValueError(f"`weight` must be finite and at least 0, got {weight}. Use 0 for a rank without data.")
        if len(notes) > NOTES:
            raise ValueError(f"`notes` must be at most {NOTES} numbers, got {len(notes)}. Leave some out.")
        self._weight, self._stop, self._position = weight, stop, position
        self._notes = [float(note) for note in notes]
        self._scale = weight if scale is None else scale
        self._divisor = divisor
        if not weight:
            self._collector.set_aside()
        self._collector.begin(self._transport.factor * self._factor, self._prepare_control_bucket())
        try:
            yield
        except BaseException:
            self._collector.abandon()
            raise
        self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait until the gradients of all ranks have been added up, and give them to the parameters."""
        self._collector.end()
        if not self._weight:
            self._collector.drop(self._sparse.members)
        if self._transport.is_hook:
            # Hooks may issue collectives when earlier ones end. On every rank these come before ours.
            self._transport.wait_for_gradients()
        self._buffers.start(self._weight)
        self._report = report = self._exchange()
        self._stop_agreed = int(report.stop)
        self._collector.synchronized()
        self._transport.wait_for_gradients()
        if report.total_weight:
            self._complete(report)
        else:
            self._collector.restore(self._group)
        self._buffers.finish(report, self._weight)
        self._collector.finish()
        if report.total_weight:
            self._collector.run_hooks(report.used, self.hook_context(self._position))

    def _prepare_control_bucket(self) -> GradientBucket | None:
        """Return the bucket that takes along what ranks tell each other, with room for it; the same on every rank.

        It is the last one, if it is on the CPU.
        """
        if not self._layout.buckets or self._transport.is_hook:
            return None
        control_bucket = self._layout.buckets[-1]
        first = control_bucket.params[0]
        if first.device.type != "cpu" or not self._control.can_travel_as(first.dtype):
            return None
        flags = len(self._layout.buckets) + len(self._parameters) + len(self._buffers)  # as in a `RankReport`
        control_bucket.payload_numel = self._control.length(flags, first.dtype)
        return control_bucket

    def _exchange(self) -> SyncReport:
        """Tell the other ranks what this one has found, with the last bucket or in a message of its own on the CPU."""
        own = RankReport(
            self._weight,
            self._stop,
            self._begun,
            self._position,
            self._notes,
            self._buffers.structure,
            self._collector.late_buckets(),
            self._collector.used(self._sparse.members) if self._weight else bytearray(len(self._parameters)),
            self._buffers.changes(),
        )
        control_bucket = self._collector.control_bucket
        if control_bucket is not None:
            message = self._control.write(own, control_bucket.buffer().dtype)
            return self._control.read(self._collector.send_control_bucket(message), own)
        message = self._control.write(own, torch.float64)
        dist.all_reduce(message, group=self._group)
        return self._control.read(message, own)

    def state_dict(self) -> dict[str, Any]:
        """Return what the reducer has learned; numbers, text and lists. Only `"of_rank"` may differ between ranks.

        It decides how sums are rounded: more than two ranks add gradients in an order that depends on their place in a
        message, and what comes after a bucket has left is added last. So it depends on which gradients travel
        together, and on what each rank believes of its backward passes.
        """
        return {
            "setup": self._setup(),
            "layout": self._layout.state(),
            "expected_total": self._expected_total,
            "buffers": self._buffers.state(),
            "of_rank": {
                "backward_passes": self._collector.predictor.state(),
                "silent_buffers": self._buffers.silent,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the reducer whose state this is, bit for bit; before the first synchronisation, on every rank.

        Communication hooks that keep a state begin anew. The state of a reducer with other parameters, ranks or sizes
        of buckets is left alone: it would be of no use.

        Args:
            state: What `state_dict` returned on this rank.

        Raises:
            RuntimeError: If gradients have been synchronised, or a state was loaded already.
            ReplicaMismatchError: If ranks have the states of different steps.
        """
        if self._begun or self._layout.buckets:
            raise RuntimeError("The reducer has learned something already. Load the state right after the constructor.")
        fits = state["setup"] == self._setup()
        agreed = [fits, *(part for name, part in state.items() if name != "of_rank")]
        compare_setups({"state of the reducer": digest(agreed)}, self._group)
        if not fits:
            return
        self._layout.load(state["layout"])
        self._expected_total = state["expected_total"]
        self._collector.predictor.load(state["of_rank"]["backward_passes"])
        self._buffers.load(state["buffers"], state["of_rank"]["silent_buffers"])

    def _setup(self) -> str:
        """Return a text for all that has to be the same where a layout is to fit."""
        devices = list(dict.fromkeys(parameter.device for parameter in self._parameters))
        parameters = [
            (parameter.numel(), str(parameter.dtype), parameter.device.type, devices.index(parameter.device))
            for parameter in self._parameters
        ]
        excluded = sorted(self._sparse.members)
        return digest(
            [dist.get_world_size(self._group), self._layout.cap, self._transport.is_hook, parameters, excluded]
        )

    def close(self) -> None:
        """Stop watching the module, and give the process group up if it is the reducer's own."""
        self._collector.close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._owns_group = False

    @property
    def _factor(self) -> float:
        """What gradients are multiplied by before they are added up over ranks, if no hook takes a mean of them."""
        return self._scale / self._expected_total if self._weight else 0.0

    def _complete(self, report: SyncReport) -> None:
        """Add late gradients and those of new parameters, divide by the total weight, and write the result back."""
        total = self._divisor or report.total_weight
        if not self._layout.buckets:  # so nothing has left, and a hook that rounds need not see large sums
            self._expected_total = 2.0 ** round(math.log2(total))
            self._collector.rescale(self._transport.factor * self._factor)
        for bucket, late in zip(self._layout.buckets, report.late, strict=True):
            if late:
                self._add_late(bucket)
        new = self._layout.grow(report.used, self._collector.order, report.source)
        control_bucket = self._prepare_control_bucket() if new else None
        if control_bucket is not None:
            # Nothing travels there yet. But how sums are rounded depends on the length of a message, which is to be the
            # same in the next synchronisation.
            control_bucket.payload().zero_()
        self._collector.send(new)
        self._transport.wait_for_gradients()
        for bucket in self._layout.buckets:
            if total != self._expected_total:
                bucket.buffer().mul_(self._expected_total / total)
            bucket.write_back(report.used)
        if not self._transport.keeps_state:  # which is in the units of the first synchronisation
            self._expected_total = 2.0 ** round(math.log2(total))
        self._sparse.reduce(report.used, self._scale / total if self._weight else 0.0)
        before = self._layout.buckets
        if not self._transport.is_hook:  # a hook may keep state for each bucket
            self._layout.evict_unused_buckets(report.used)
        self._collector.learn(layout_has_changed=bool(new) or self._layout.buckets != before)

    def _add_late(self, bucket: GradientBucket) -> None:
        """Reduce by itself what came after a bucket had left; on other ranks it may be something else, or nothing."""
        difference = GradientBucket(bucket.index(), bucket.params, bucket.members)
        difference.pack_all(self._factor)
        dist.all_reduce(difference.buffer(), group=self._group)
        bucket.buffer().add_(difference.buffer())
