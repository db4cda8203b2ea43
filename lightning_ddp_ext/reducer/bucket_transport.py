"""Collection of gradients during backward passes, and their all-reduce or communication hook."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_ddp_ext._compat.torch import count_collectives, post_accumulate_hooks
from lightning_ddp_ext.distributed.backends import runs_on_streams
from lightning_ddp_ext.reducer.buckets import GradientBucket, GradientLayout, is_packed_alone

CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]

_TAKE_GROUPS = tuple(f"torch.distributed.algorithms.ddp_comm_hooks.{kind}" for kind in ("default", "quantization"))


def takes_group(comm_hook: CommHook | None) -> bool:
    """Return True if the first argument of a hook is a process group, as of torch's stateless hooks."""
    return getattr(comm_hook, "__module__", "").startswith(_TAKE_GROUPS)


class BucketTransport:
    """Adds up buckets over ranks, several at a time, with an all-reduce or a communication hook."""

    def __init__(self, group: dist.ProcessGroup, comm_hook: CommHook | None, comm_state: object) -> None:
        # A hook returns the mean over the ranks; this factor on the gradients makes it their sum.
        self.factor = 1 if comm_hook is None else dist.get_world_size(group)
        self.is_hook = comm_hook is not None
        self._group = group
        self._comm_hook = comm_hook
        self._comm_state = group if comm_state is None and takes_group(comm_hook) else comm_state
        self.keeps_state = not isinstance(self._comm_state, dist.ProcessGroup | None)
        self._in_flight: list[tuple[GradientBucket, Any]] = []

    def send(self, bucket: GradientBucket) -> None:
        """Start to reduce a bucket."""
        if self._comm_hook is None:
            # Asynchronous, to overlap with the backward pass. All ranks send buckets in the order of the layout.
            work: Any = dist.all_reduce(bucket.buffer_with_payload(), group=self._group, async_op=True)
        else:
            if not runs_on_streams(dist.get_backend_config(self._group), bucket.buffer().device.type):
                self.wait_for_gradients()  # threads of gloo run hooks' callbacks in any order: one bucket at a time
            work = self._comm_hook(self._comm_state, bucket)
        self._in_flight.append((bucket, work))

    def wait_for_gradients(self) -> None:
        """Wait for all buckets in flight, on the device if it has streams."""
        for bucket, work in self._in_flight:
            result = work.wait()
            if self._comm_hook is not None:
                reduced = result[0] if isinstance(result, list | tuple) else result
                if reduced.data_ptr() != bucket.buffer().data_ptr():
                    bucket.set_buffer(reduced)
        self._in_flight.clear()

    def forget(self) -> None:
        """Drop the buckets in flight, after an error."""
        self._in_flight.clear()


NEVER = -1
_KINDS = 16  # remembered kinds of backward pass; a model with more of them overlaps less


class BackwardPredictor:
    """Counts gradients per parameter, and expects the counts of the last backward pass of the same kind.

    The parameter that gets the first gradient identifies the kind, such as the networks of a GAN. `expected` is the
    number of gradients of a complete parameter, or `NEVER`; the scheduler adds to `counts` and `order`.
    """

    def __init__(self, parameters: int) -> None:
        self.counts = [0] * parameters
        self.expected = [NEVER] * parameters
        self.order: list[int] = []  # parameters without a bucket in the order of their gradients, with repetitions
        self.kind: int | None = None
        self._remembered: dict[int, tuple[list[int], list[int]]] = {}

    def begin(self) -> None:
        """Reset the counts for a new synchronisation."""
        self.counts[:] = [0] * len(self.counts)
        self.expected[:] = [NEVER] * len(self.expected)
        self.order.clear()
        self.kind = None

    def recognize(self, first: int, buckets: Sequence[GradientBucket]) -> bool:
        """Look up the kind of a backward pass by its first parameter; return True if the kind is known."""
        self.kind = first
        if first not in self._remembered:
            return False
        counts, missing = self._remembered[first]
        self.expected[:] = counts
        for bucket, number in zip(buckets, missing, strict=True):
            bucket.missing = number
        return True

    def learn(self, buckets: Sequence[GradientBucket], has_new: bool) -> None:
        """Remember this backward pass for the next one of its kind; forget earlier ones if there are new buckets."""
        if has_new:
            self._remembered.clear()
        if self.kind is None:
            return
        known = self._remembered.get(self.kind)
        if known is not None and known[0] == self.counts:
            return
        if known is None and len(self._remembered) == _KINDS:
            del self._remembered[next(iter(self._remembered))]
        missing = [sum(self.counts[member] > 0 for member in bucket.members) for bucket in buckets]
        self._remembered[self.kind] = list(self.counts), missing

    def state(self) -> list[list[Any]]:
        """Return the known kinds as numbers and lists."""
        return [[kind, *remembered] for kind, remembered in self._remembered.items()]

    def load(self, state: Iterable[Sequence[Any]]) -> None:
        """Restore the `state` of a predictor for the same buckets."""
        self._remembered = {kind: (list(counts), list(missing)) for kind, counts, missing in state}


class BucketScheduler:
    """Moves gradients into buckets while backward passes run, and sends each bucket once it is expected complete.

    Buckets are sent in the order of the layout on every rank. A gradient that comes after its bucket was sent stays
    with the parameter, and the bucket is marked late. The `control_bucket` waits for `send_control_bucket`.

    NCCL may deadlock unless every rank issues the collectives of all process groups in one order, and the bucket of a
    parameter that a rank does not use waits for the end of the backward pass. So `is_held` is True, and buckets follow
    all collectives of the backward pass, if the module `communicates` there, as `nn.SyncBatchNorm` does, once any
    backward pass has done so, or on a device whose collectives cannot be counted. gloo copes with any order on CPUs.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: GradientLayout,
        transport: BucketTransport,
        group: dist.ProcessGroup,
        communicates: bool,
    ) -> None:
        device = next((parameter.device for parameter in parameters if parameter.device.type != "cpu"), None)
        # The number of collectives that other code has issued on the device; None if it is unknown.
        self._count_collectives = (lambda: 0) if device is None else partial(count_collectives, device, group)
        self.is_held = device is not None and (communicates or self._count_collectives() is None)
        self._counted: int | None = None  # when the first gradient came
        self.has_begun = False  # there are gradients of an unfinished synchronisation
        self.is_active = False
        self.control_bucket: GradientBucket | None = None
        self.predictor = BackwardPredictor(len(parameters))
        self.factor = 0.0  # on gradients that are packed
        self._parameters = parameters
        self._layout = layout
        self._transport = transport
        self._lock = RLock()  # a module that spans several devices has a backward thread for each
        self._next = 0  # first bucket that has not been sent
        self._late: set[int] = set()
        self._unsynchronized: set[int] = set()
        self._aside: list[Tensor | None] = []
        self._lost: list[bool] = []
        self._hooks = [self._add_hook(number, parameter) for number, parameter in enumerate(parameters)]
        self._hooks_seen = -1  # number of the last hook of this process that was looked for
        self._has_deferred = False

    def unsynchronized(self) -> set[int]:
        """Return the `id` of each parameter with a gradient that is newer than its last synchronisation."""
        parameters = (self._parameters[number] for number in self._unsynchronized)
        return {id(parameter) for parameter in parameters if parameter.grad is not None}

    def defer_hooks(self) -> bool:
        """Defer the hooks of other code on gradients until `run_hooks`; return True if any hook is new."""
        if self._hooks_seen == RemovableHandle.next_id:
            return False
        self._hooks_seen = RemovableHandle.next_id
        for parameter, own in zip(self._parameters, self._hooks, strict=True):
            hooks = post_accumulate_hooks(parameter)
            for number, hook in hooks.items() if len(hooks) > 1 else ():
                if number != own.id:
                    hooks[number] = hook if isinstance(hook, _DeferredHook) else _DeferredHook(hook)
                    self._has_deferred = True
        return True

    def run_hooks(self, used: Sequence[float], context: Callable[[], AbstractContextManager[None]]) -> None:
        """Run the deferred hooks of used parameters, if any, in the context; on every rank, as they may step."""
        if not self._has_deferred:
            return
        due = [
            (parameter, hook.hook)
            for parameter, is_used in zip(reversed(self._parameters), reversed(used), strict=True)
            for hook in (post_accumulate_hooks(parameter).values() if is_used else ())
            if isinstance(hook, _DeferredHook)
        ]
        if due:
            with context():
                for parameter, hook in due:
                    hook(parameter)

    def begin(self, factor: float, control_bucket: GradientBucket | None) -> None:
        """Start to collect gradients, and to multiply them by the factor."""
        self.control_bucket = control_bucket
        self.factor = factor
        self.predictor.begin()
        self._next = 0
        self._late.clear()
        self.is_active = True

    def set_aside(self) -> None:
        """Take the present gradients away from the parameters, because this rank has no weight."""
        unsynchronized = self.unsynchronized()
        self._lost = [id(parameter) in unsynchronized for parameter in self._parameters]
        self._aside = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def restore(self, group: dist.ProcessGroup) -> None:
        """Undo `set_aside` for gradients that all ranks had synchronised; all ranks have set theirs aside."""
        lost = torch.tensor(self._lost, dtype=torch.uint8)
        # Only all ranks together know which gradients were synchronised: a rank may lack one that others have.
        dist.all_reduce(lost, dist.ReduceOp.MAX, group)
        for parameter, gradient, is_lost in zip(self._parameters, self._aside, lost.tolist(), strict=True):
            parameter.grad = None if is_lost else gradient

    @contextmanager
    def disregard(self) -> Iterator[None]:
        """Ignore the gradients of a block, which the caller discards."""
        unsynchronized = set(self._unsynchronized)
        try:
            yield
        finally:
            self._unsynchronized = unsynchronized

    def drop_unbucketed(self) -> None:
        """Delete the gradients of parameters without a bucket, because this rank has no weight."""
        for number in (*self._layout.unassigned, *self._layout.excluded):
            self._parameters[number].grad = None

    def end(self) -> None:
        """Send the remaining buckets except the control bucket."""
        if self.predictor.kind is not None and self._counted != self._count_collectives():
            self.is_held = True
        self.is_active = False
        self.has_begun = True
        self.send([bucket for bucket in self._layout.buckets[self._next :] if bucket is not self.control_bucket])

    def send_control_bucket(self, payload: Tensor) -> Tensor:
        """Send the control bucket with the payload, wait for all buckets, and return the summed payload."""
        control_bucket = self.control_bucket
        assert control_bucket is not None
        control_bucket.payload().copy_(payload)
        self.send([control_bucket])
        self._transport.wait_for_gradients()
        return control_bucket.payload()

    def abandon(self) -> None:
        """Discard the collected gradients after an error in the forward or backward pass."""
        self.is_active = False
        come = [number for number, count in enumerate(self.predictor.counts) if count]
        self.has_begun |= bool(come)
        self._unsynchronized.update(come)
        self.control_bucket = None
        self._transport.forget()
        for bucket in self._layout.buckets:
            bucket.release()
        for parameter, gradient in zip(self._parameters, self._aside, strict=False):
            parameter.grad = gradient
        self._aside = []

    def finish(self) -> None:
        """End the synchronisation: every gradient is synchronised, and the buckets are released."""
        self._unsynchronized.clear()
        for bucket in self._layout.buckets:
            bucket.release()
        self._aside = []
        self.has_begun = False

    def state(self) -> dict[str, Any]:
        """Return what this rank has learned from backward passes, as numbers and lists."""
        return {"backward_passes": self.predictor.state(), "is_held": self.is_held}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the `state` of a scheduler for the same buckets."""
        self.predictor.load(state["backward_passes"])
        self.is_held |= state["is_held"]

    def close(self) -> None:
        """Remove the hooks from the parameters and restore deferred ones."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            hooks = post_accumulate_hooks(parameter)
            hooks.update({number: hook.hook for number, hook in hooks.items() if isinstance(hook, _DeferredHook)})

    def send(self, buckets: Sequence[GradientBucket]) -> None:
        """Pack and send buckets."""
        for bucket in buckets:
            self.has_begun = True
            bucket.pack_all(self.factor)
            bucket.launched = True
            self._next += 1
            self._transport.send(bucket)

    def late_buckets(self) -> bytearray:
        """Mark the buckets that had been sent when a gradient came on this rank."""
        return bytearray(not self._late.isdisjoint(bucket.members) for bucket in self._layout.buckets)

    def used(self) -> bytearray:
        """Mark the parameters that have a gradient on this rank."""
        used = bytearray(len(self._parameters))
        # Late gradients, and gradients in a bucket that has not been sent, may still be with their parameters.
        for bucket in self._layout.buckets:
            for number, parameter, packed in zip(bucket.members, bucket.params, bucket.packed, strict=True):
                used[number] = packed or parameter.grad is not None
        for number in (*self._layout.unassigned, *self._layout.excluded):
            used[number] = self._parameters[number].grad is not None
        return used

    def _add_hook(self, number: int, parameter: nn.Parameter) -> Any:
        """Follow the gradients of a parameter, even if it is frozen: torch accepts a hook only while it is not."""
        predictor, layout, alone = self.predictor, self._layout, is_packed_alone(parameter)

        def gradient_is_there(parameter: Tensor) -> None:
            if not self.is_active:
                self._unsynchronized.add(number)
                return
            with self._lock:
                if predictor.kind is None:
                    self._counted = self._count_collectives()
                    if predictor.recognize(number, layout.buckets):
                        self._send_complete()
                predictor.counts[number] += 1
                bucket = layout.bucket_of[number]
                if bucket is None:
                    predictor.order.append(number)
                elif bucket.launched:
                    self._late.add(number)
                elif predictor.counts[number] == predictor.expected[number]:
                    if alone:
                        bucket.pack(number, self.factor)
                    bucket.missing -= 1
                    if not bucket.missing:
                        self._send_complete()

        frozen = not parameter.requires_grad
        parameter.requires_grad_(True)
        hook = parameter.register_post_accumulate_grad_hook(gradient_is_there)  # type: ignore[no-untyped-call]
        if frozen:
            parameter.requires_grad_(False)
        return hook

    def _send_complete(self) -> None:
        """Send the next buckets up to the first that is expected to get more gradients."""
        if self.is_held:
            return
        rest = self._layout.buckets[self._next :]
        self.send(
            list(itertools.takewhile(lambda bucket: not bucket.missing and bucket is not self.control_bucket, rest))
        )


class _DeferredHook:
    """Replaces a hook, which can still be removed by its handle, and does nothing."""

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        self.hook = hook

    def __call__(self, parameter: Tensor) -> None:
        pass
