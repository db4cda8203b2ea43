"""Synchronisation of gradients after any backward pass."""

import itertools
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
from lightning_ddp_ext.consistency import compare_setups, describe_module, fixed_parameters, shared_parameters
from lightning_ddp_ext.distributed.exchange import destroy_group, digest, group_with_cpu, own_group
from lightning_ddp_ext.errors import RanksOutOfStepError, UnsupportedFeatureError
from lightning_ddp_ext.reducer.bucket_transport import BucketScheduler, BucketTransport, CommHook
from lightning_ddp_ext.reducer.buckets import GradientBucket, GradientLayout, broadcast_all
from lightning_ddp_ext.reducer.buffer_synchronizer import BufferSynchronizer
from lightning_ddp_ext.reducer.control import Control
from lightning_ddp_ext.reducer.sparse_gradients import SparseGradients


class GradientReducer:
    """Averages gradients over the ranks of a process group, by weight, while the backward pass is still running.

    The backward pass may be of any kind: parameters may get gradients several times (reused layers, activation
    checkpointing, several backward passes) or not at all, on some ranks or on all; layers may be frozen and thawed;
    graphs may change from step to step and differ between ranks.

    Gradients are moved into flat buckets, which all ranks reduce in the same order. Each rank sends a bucket as soon as
    it expects no more gradients, according to the last backward pass of the same kind. A gradient that comes after its
    bucket was sent is reduced separately and added. At the end, ranks exchange which parameters were used on any rank,
    which buckets had late gradients, and the total weight; a last bucket on the CPU carries this message. A wrong
    prediction therefore costs time, never correctness.

    Every rank has to synchronise equally often, with or without a backward pass. The gradient of a parameter that no
    rank used stays None. Sparse gradients of embedding modules with `sparse=True` stay sparse; gradients of
    `functional.embedding` become dense. Buffers that any rank has changed are made equal too: floating-point buffers
    become the weighted mean, others are copied from the first rank with data. Parameters and buffers that torch's
    `DistributedDataParallel` would ignore are ignored.

    Args:
        module: The same module on every rank, on its devices. Parameters and buffers are copied from the first rank.
        process_group: The ranks; by default all, in a separate group, so that collectives issued by the model cannot
            mix with collectives of the reducer.
        bucket_cap_mb: Largest size of a bucket in MiB. On the CPU it is at most a 32nd of the parameters, or 4 MiB.
        comm_hook: Function that reduces a bucket instead of an all-reduce, `hook(state, bucket) -> Future[Tensor]`, as
            for torch's `DistributedDataParallel.register_comm_hook`.
        comm_state: First argument of `comm_hook`.
        timeout: Time limit of a collective in the separate group; None for torch's default.
        hook_context: Function that returns the context in which hooks on parameters run after a synchronisation, such
            as one that seeds random numbers.

    Attributes:
        control: The weights of all ranks in the last synchronisation, and further numbers that ranks send each other
            in every synchronisation, such as a request to stop; see `Control`.
        buffers: The buffers, of which integers may be kept until `buffers.settle()`; see `BufferSynchronizer`.
        normalizes_over_ranks: Whether the module has `nn.SyncBatchNorm`. Its gradients are exact for different weights
            only if the losses are weighted: multiply them by the weight, and give `scale=1.0`.

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
        hook_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        check_bucket_cap(bucket_cap_mb)
        self._parameters = shared_parameters(module)
        self._names = dict(module.named_parameters())
        # The position of each shared parameter, by its `id`, is the same on every rank.
        self.places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._known = {id(parameter): parameter for parameter in module.parameters()}
        self._owns_group = process_group is None
        self._group = own_group(timeout) if process_group is None else group_with_cpu(process_group)
        # Ranks with and without a hook, or on another kind of device, would send other messages.
        kinds = {"kind of device": sorted({parameter.device.type for parameter in self._parameters})}
        compare_setups(
            {**describe_module(module), **kinds, "use of a communication hook": bool(comm_hook)}, self._group
        )
        self.control = Control(self._group)
        self._weight_field, self._structure_field = self.control.add(), self.control.add()
        self._transport = self._make_transport(comm_hook, comm_state)
        self._sparse = SparseGradients(module, self._parameters, self._group)
        self._layout = GradientLayout(self._parameters, self._sparse.members, bucket_cap_mb, self._group)
        self.buffers = BufferSynchronizer(module, self._group)
        self._weight = self._scale = 1.0
        self._divisor: float | None = None
        # A power of two near the total weight of the last synchronisation, so the same on every rank. Dividing by it
        # keeps sums small and rounds nothing: gradients do not depend on earlier ones. It at most halves per
        # synchronisation, so that one light synchronisation is not followed by an overflow in half precision. When the
        # usual weight returns after n lighter synchronisations, the sum is about 2**n times as large as the mean.
        self._expected_total = 1.0
        broadcast_all([*self._parameters, *fixed_parameters(module), *self.buffers.dense()], self._group)
        self.buffers.remember()
        self.normalizes_over_ranks = any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
        self._scheduler = BucketScheduler(
            self._parameters, self._layout, self._transport, self._group, self.normalizes_over_ranks
        )
        self._hook_context = hook_context
        self.defer_hooks()

    def _make_transport(self, comm_hook: CommHook | None, comm_state: object) -> BucketTransport:
        return BucketTransport(self._group, comm_hook, comm_state)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self._group

    @property
    def synchronizations(self) -> int:
        """Number of synchronisations that have begun on this rank."""
        return int(self.control.count.value)

    def has_unsynchronized(self, parameters: Iterable[Tensor]) -> bool:
        """Return True if any of these parameters has a gradient that is newer than its last synchronisation."""
        if not self.synchronizations:  # gradients of zeros were set by hand, to create the state of an optimizer
            known = [parameter for parameter in parameters if id(parameter) in self._known]
            return any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in known)
        unsynchronized = self._scheduler.unsynchronized()
        return bool(unsynchronized) and any(id(parameter) in unsynchronized for parameter in parameters)

    def unmanaged_parameters(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters that were not part of the module when the reducer was made."""
        return [parameter for parameter in parameters if id(parameter) not in self._known]

    def defer_hooks(self) -> None:
        """Let hooks of `register_post_accumulate_grad_hook` run after the synchronisation, with its gradient.

        `synchronize` calls this itself. Call it before a backward pass outside of a block if hooks were added since.
        """
        if not self._scheduler.defer_hooks():
            return
        for name, parameter in self._names.items():
            if steps_in_backward(parameter):
                raise UnsupportedFeatureError(
                    f"parameter `{name}` is changed inside of the backward pass, by `_apply_optimizer_in_backward`,"
                    " with the gradient of this rank alone. Use the optimizer without it, or step in a hook of"
                    " `register_post_accumulate_grad_hook`, which sees the gradient of all ranks."
                )

    def unsynchronized_parameters(self) -> list[Tensor]:
        """Return the parameters with a gradient that is newer than its last synchronisation."""
        unsynchronized = self._scheduler.unsynchronized()
        return [parameter for number, parameter in self._known.items() if number in unsynchronized]

    @contextmanager
    def discard_gradients(self) -> Iterator[None]:
        """Discard the gradients of the backward passes in a block; gradients from before stay."""
        kept = [(parameter, parameter.grad) for parameter in self._known.values()]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            with self._scheduler.disregard():
                yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    @contextmanager
    def synchronize(
        self, weight: float = 1.0, scale: float | None = None, divisor: float | None = None
    ) -> Iterator[None]:
        """Synchronise the gradients at the end of a block, overlapped with the backward passes inside.

        Gradients accumulated before the block are included. A rank without a batch takes part with an empty block.

        Args:
            weight: Weight of this rank's gradient, such as the number of its samples if the loss is their mean; 0 if it
                has none, which also ignores its gradients. The result is the sum of `scale * gradient` over the ranks,
                divided by `divisor`. If all weights are 0, gradients synchronised before stay, and nothing is added.
            scale: Factor on the gradient of this rank; None for its weight.
            divisor: Divisor of the sum, the same on all ranks; None for the sum of the weights.

        Raises:
            ValueError: If the weight is negative or not finite.
            RanksOutOfStepError: If an earlier synchronisation has failed on some ranks only, or if the last one has
                failed after its backward pass had begun.
        """
        if self._scheduler.is_active:
            raise RuntimeError("A synchronisation has begun already. End its block before the next one begins.")
        if self._scheduler.has_begun:
            raise RanksOutOfStepError(
                f"rank {dist.get_rank(self._group)}: the last synchronisation failed after its backward pass had begun,"
                " so other ranks might add the next gradients of this rank to gradients of an earlier step. Restart the"
                " run, such as from its last checkpoint; to continue after an error, raise it in the forward pass,"
                " before any backward pass."
            )
        self.defer_hooks()
        self.control.count.value += 1  # first, so that an error on this rank alone is noticed
        if not 0 <= weight < math.inf:
            raise ValueError(f"`weight` must be finite and at least 0, got {weight}. Use 0 for a rank without data.")
        self._weight, self._divisor = weight, divisor
        self._scale = weight if scale is None else scale
        if not weight:
            self._scheduler.set_aside()
        self._scheduler.begin(self._transport.factor * self._factor, self._reserve_payload())
        try:
            yield
        except BaseException:
            self._scheduler.abandon()
            raise
        self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for the gradients of all ranks, and give their mean to the parameters."""
        self._scheduler.end()
        if not self._weight:
            self._scheduler.drop_unbucketed()
        if self._transport.is_hook:
            # Hooks may issue collectives when earlier ones end. On every rank these come before ours.
            self._transport.wait_for_gradients()
        late, used, changed = self._exchange()
        self._transport.wait_for_gradients()
        if self.control.total_weight:
            self._complete(late, used)
        else:
            self._scheduler.restore(self._group)
        self.buffers.synchronize(self.control.weights, self._structure_field.of_ranks, changed)
        self._scheduler.finish()
        self._end_batch(used)

    def _end_batch(self, used: Sequence[float]) -> None:
        """Run the deferred hooks of used parameters, with the gradient of all ranks."""
        if self.control.total_weight:
            self._scheduler.run_hooks(used, self._hook_context)

    def _reserve_payload(self) -> GradientBucket | None:
        """Reserve room for the control message in the last bucket if it is on the CPU, and return this bucket."""
        if not self._layout.buckets or self._transport.is_hook:
            return None
        control_bucket = self._layout.buckets[-1]
        first = control_bucket.params[0]
        if first.device.type != "cpu" or not self.control.fits(first.dtype):
            return None
        marks = len(self._layout.buckets) + len(self._parameters) + self.buffers.number  # as in `_exchange`
        control_bucket.payload_numel = self.control.length(marks, first.dtype)
        return control_bucket

    def _exchange(self) -> list[list[float]]:
        """Send the control message with the control bucket, or separately on the CPU; return the sums of its marks.

        These are above 0 for each bucket that a gradient has missed on any rank, for each parameter that any rank has
        used, and for each buffer that any rank has changed.

        On a device this is the only time in a step that the host waits, for the slowest host and not for the device: it
        has to know before the optimizer steps which gradients there are and their divisor. In a bucket of the device
        the values could only be read at the end of the backward pass.
        """
        changed = self.buffers.find_changes()
        used = self._scheduler.used() if self._weight else bytearray(len(self._parameters))
        own = [self._scheduler.late_buckets(), used, changed]
        self._weight_field.value, self._structure_field.value = self._weight, self.buffers.structure
        control_bucket = self._scheduler.control_bucket
        if control_bucket is not None:
            message = self.control.write(bytearray().join(own), control_bucket.buffer().dtype)
            message = self._scheduler.send_control_bucket(message)
        else:
            message = self.control.write(bytearray().join(own), torch.float64)
            dist.all_reduce(message, group=self._group)
        marks = iter(self.control.read(message))
        self.control.weights = self._weight_field.of_ranks
        return [list(itertools.islice(marks, len(part))) for part in own]

    def state_dict(self) -> dict[str, Any]:
        """Return what the reducer has learned, as numbers, text and lists; only `"of_rank"` may differ between ranks.

        It decides how sums are rounded: more than two ranks add gradients in an order that depends on their place in a
        message, and late gradients are added last. So rounding depends on the buckets and on the predictions of ranks.
        """
        return {
            "setup": self._setup(),
            "layout": self._layout.state(),
            "expected_total": self._expected_total,
            "of_rank": self._scheduler.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another reducer to continue bit for bit; before the first synchronisation, on all ranks.

        Communication hooks with a state start afresh. A state for other parameters, ranks or bucket sizes is ignored.
        """
        if self.synchronizations or self._layout.buckets:
            raise RuntimeError("The reducer has learned something already. Load the state right after the constructor.")
        # Ranks with and without a restored layout would send buckets of other sizes.
        fits = state["setup"] == self._setup()
        agreed = [fits, *(part for name, part in state.items() if name != "of_rank")]
        compare_setups({"state of the reducer": digest(agreed)}, self._group)
        if not fits:
            return
        self._layout.append(state["layout"])
        self._expected_total = state["expected_total"]
        self._scheduler.load(state["of_rank"])

    def _setup(self) -> str:
        """Return a digest of everything that must be equal for a layout to fit."""
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
        """Remove the hooks from the module, and destroy the process group if the reducer has made it."""
        self._scheduler.close()
        self.control.close()
        if self._owns_group and dist.is_initialized():
            destroy_group(self._group)
        self._owns_group = False

    @property
    def _factor(self) -> float:
        """Factor on gradients before they are added up over ranks, unless a hook averages them."""
        return self._scale / self._expected_total if self._weight else 0.0

    def _complete(self, late: Sequence[float], used: Sequence[float]) -> None:
        """Add late gradients and gradients of new parameters, divide by the total weight, and write the result back."""
        total = self.control.total_weight if self._divisor is None else self._divisor
        if not self._layout.buckets:  # nothing has been sent yet, and a hook that rounds should not see large sums
            self._expected_total = _nearest_power(total)
            self._scheduler.factor = self._transport.factor * self._factor
        for bucket, is_late in zip(self._layout.buckets, late, strict=True):
            if is_late:
                self._add_late(bucket)
        new = self._layout.grow(used, self._scheduler.predictor.order, self.control.source)
        if new:
            # There is no message yet. But how sums are rounded depends on the length of the buffer, which is to be the
            # same in the next synchronisation.
            self._reserve_payload()
        self._scheduler.send(new)
        self._transport.wait_for_gradients()
        for bucket in self._layout.buckets:
            if total != self._expected_total:
                bucket.buffer().mul_(self._expected_total / total)
            bucket.write_back(used)
        if not self._transport.keeps_state:  # which is in the units of the first synchronisation
            self._expected_total = max(_nearest_power(total), self._expected_total / 2)
        if self._sparse.members:
            self._sparse.reduce(used, self._scale / total if self._weight else 0.0)
        self._scheduler.predictor.learn(self._layout.buckets, has_new=bool(new))

    def _add_late(self, bucket: GradientBucket) -> None:
        """Reduce the gradients that came after a bucket had been sent; other ranks may have others, or none."""
        # The marks have told every rank that some rank is late, so that all send this message, with zeros if need be.
        difference = GradientBucket(bucket.index(), bucket.params, bucket.members)
        difference.pack_all(self._factor)
        dist.all_reduce(difference.buffer(), group=self._group)
        bucket.buffer().add_(difference.buffer())


def _nearest_power(number: float) -> float:
    return 2.0 ** round(math.log2(number))
