"""Collection of the gradients of one backward pass and launch of their all-reduce."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_ddp_ext._compat.torch import post_accumulate_hooks
from lightning_ddp_ext.reducer.buckets import LARGE, GradientBucket, GradientLayout
from lightning_ddp_ext.reducer.comm_hooks import BucketTransport

NEVER = -1
_KINDS = 16  # remembered kinds of backward pass; a model with more of them overlaps less


class BackwardPredictor:
    """Counts gradients per parameter, and expects the counts of the last backward pass that began in the same way.

    The parameter that gets the first gradient tells kinds of backward pass apart: those of the two networks of a GAN,
    or of tasks that alternate, begin at different last layers.

    Attributes:
        counts: Gradients that each parameter has had in this synchronisation.
        expected: How many it will have had when it is complete, `NEVER` if nothing is known.
        order: Parameters in the order of their gradients, with repetitions; filled in by the reducer.
    """

    def __init__(self, parameters: int) -> None:
        self.counts = [0] * parameters
        self.expected = [NEVER] * parameters
        self.order: list[int] = []
        self.kind: int | None = None
        self._remembered: dict[int, tuple[list[int], list[int]]] = {}

    def begin(self) -> None:
        """Forget the counts: a synchronisation begins."""
        self.counts[:] = [0] * len(self.counts)
        self.expected[:] = [NEVER] * len(self.expected)
        self.order.clear()
        self.kind = None

    def recognize(self, first: int, buckets: Sequence[GradientBucket]) -> bool:
        """Set what is expected of a backward pass, from the first parameter that has got a gradient.

        Args:
            first: Number of the parameter.
            buckets: Told how many of their parameters are missing.

        Returns:
            Whether such a backward pass is known.
        """
        self.kind = first
        if first not in self._remembered:
            return False
        counts, missing = self._remembered[first]
        self.expected[:] = counts
        for bucket, number in zip(buckets, missing, strict=True):
            bucket.missing = number
        return True

    def learn(self, buckets: Sequence[GradientBucket]) -> None:
        """Remember this backward pass, for the next one of its kind."""
        if self.kind is None:
            return
        known = self._remembered.get(self.kind)
        if known is not None and known[0] == self.counts and len(known[1]) == len(buckets):
            return
        if known is None and len(self._remembered) == _KINDS:
            del self._remembered[next(iter(self._remembered))]
        missing = [sum(self.counts[member] > 0 for member in bucket.members) for bucket in buckets]
        self._remembered[self.kind] = list(self.counts), missing

    def state(self) -> list[list[Any]]:
        """Return what is remembered, as numbers and lists."""
        return [[kind, *remembered] for kind, remembered in self._remembered.items()]

    def load(self, state: Iterable[Sequence[Any]]) -> None:
        """Remember what another predictor did, for the same buckets."""
        self._remembered = {kind: (list(counts), list(missing)) for kind, counts, missing in state}

    def forget(self) -> None:
        """Forget every kind: the buckets are others now."""
        self._remembered.clear()


class GradientCollector:
    """Moves gradients into buckets while backward passes run, and sends each bucket when it is believed complete.

    Buckets leave in the order of the layout on every rank. What a rank believes may be wrong: a gradient that comes
    after its bucket has left stays with its parameter, and the bucket is marked late. The last bucket may wait for what
    is going to travel with it.

    Args:
        parameters: All parameters, the same on every rank.
        layout: Which gradients travel together.
        transport: What sends a bucket.

    Attributes:
        has_begun: Whether gradients have come, or left, that do not belong to a finished synchronisation.
        control_bucket: The bucket that waits for `send_control_bucket`, if there is one.
        predictor: What this rank believes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: GradientLayout, transport: BucketTransport) -> None:
        self.has_begun = False
        self._parameters = parameters
        self._layout = layout
        self._transport = transport
        self.predictor = BackwardPredictor(len(parameters))
        self._lock = RLock()  # a module that spans several devices has a backward thread for each
        self._active = False
        self._factor = 0.0
        self._next = 0  # first bucket that has not left
        self.control_bucket: GradientBucket | None = None
        self._late: set[int] = set()
        self._unsynchronized: set[int] = set()
        self._aside: list[Tensor | None] = []
        self._lost: list[bool] = []
        self._hooks = [self._watch(number, parameter) for number, parameter in enumerate(parameters)]
        self._hooks_seen = -1  # number of the last hook of this process that was looked for

    @property
    def is_active(self) -> bool:
        """Whether gradients are being collected."""
        return self._active

    @property
    def order(self) -> Sequence[int]:
        """Parameters that are in no bucket yet, in the order of their gradients."""
        return self.predictor.order

    def waiting(self) -> set[int]:
        """Return the identities of parameters whose gradient came since it was last synchronised."""
        own = (self._parameters[number] for number in self._unsynchronized)
        return {id(parameter) for parameter in own if parameter.grad is not None}

    def defer_hooks(self) -> bool:
        """Let the hooks of other code that wait for a gradient run in `run_hooks`, with the gradient of all ranks.

        Returns:
            Whether any code has added hooks since the last time.
        """
        if self._hooks_seen == RemovableHandle.next_id:
            return False
        self._hooks_seen = RemovableHandle.next_id
        for parameter, own in zip(self._parameters, self._hooks, strict=True):
            hooks = post_accumulate_hooks(parameter)
            for number, hook in hooks.items() if len(hooks) > 1 else ():
                if number != own.id and not isinstance(hook, _DeferredHook):
                    hooks[number] = _DeferredHook(hook)
        return True

    def run_hooks(self, used: Sequence[float], context: AbstractContextManager[None]) -> None:
        """Run the hooks of other code; on every rank alike, as they may change parameters.

        Args:
            used: Which parameters have a gradient on any rank.
            context: Entered if there are any.
        """
        due = [
            (parameter, hook.hook)
            for parameter, is_used in zip(reversed(self._parameters), reversed(used), strict=True)
            for hook in (post_accumulate_hooks(parameter).values() if is_used else ())
            if isinstance(hook, _DeferredHook)
        ]
        if due:
            with context:
                for parameter, hook in due:
                    hook(parameter)

    def begin(self, factor: float, control_bucket: GradientBucket | None = None) -> None:
        """Begin to collect.

        Args:
            factor: What gradients are multiplied by before they are added up over ranks.
            control_bucket: The bucket that leaves with `send_control_bucket`, if there is one.
        """
        self.control_bucket = control_bucket
        self._factor = factor
        self.predictor.begin()
        self._next = 0
        self._late.clear()
        self._active = True

    def rescale(self, factor: float) -> None:
        """Multiply the gradients of buckets that have not left by another factor, see `begin`."""
        self._factor = factor

    def set_aside(self) -> None:
        """Take away the gradients that are there: on this rank they count nothing. See `restore`."""
        waiting = self.waiting()
        self._lost = [id(parameter) in waiting for parameter in self._parameters]
        self._aside = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def restore(self, group: dist.ProcessGroup) -> None:
        """Give back what `set_aside` took away, where it had been synchronised on every rank; all ranks have done so.

        Args:
            group: The ranks.
        """
        lost = torch.tensor(self._lost, dtype=torch.uint8)
        dist.all_reduce(lost, dist.ReduceOp.MAX, group)
        for parameter, gradient, is_lost in zip(self._parameters, self._aside, lost.tolist(), strict=True):
            parameter.grad = None if is_lost else gradient

    @contextmanager
    def disregard(self) -> Iterator[None]:
        """Take no notice of the gradients of a block, which will not stay."""
        unsynchronized = set(self._unsynchronized)
        yield
        self._unsynchronized = unsynchronized

    def drop(self, excluded: Iterable[int]) -> None:
        """Forget the gradients that are in no bucket: on this rank they count nothing.

        Args:
            excluded: Those that are never in one.
        """
        for number in (*self._layout.unassigned, *excluded):
            self._parameters[number].grad = None

    def end(self) -> None:
        """Send the buckets that have not left, but for the carrier."""
        self._active = False
        self.has_begun = True
        self.send([bucket for bucket in self._layout.buckets[self._next :] if bucket is not self.control_bucket])

    def send_control_bucket(self, payload: Tensor) -> Tensor:
        """Send the last bucket.

        Args:
            payload: What travels behind its gradients.

        Returns:
            The sum of that over the ranks, when all buckets have arrived.
        """
        control_bucket = self.control_bucket
        assert control_bucket is not None
        control_bucket.payload().copy_(payload)
        self.send([control_bucket])
        self._transport.wait_for_gradients()
        return control_bucket.payload()

    def abandon(self) -> None:
        """Forget what was collected: the forward or backward pass has failed."""
        self._active = False
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
        """Take the synchronisation for finished."""
        for bucket in self._layout.buckets:
            bucket.release()
        self._aside = []
        self.control_bucket = None  # it may have been dissolved
        self.has_begun = False

    def synchronized(self) -> None:
        """Take every gradient for synchronised."""
        self._unsynchronized.clear()

    def learn(self, layout_has_changed: bool) -> None:
        """Learn from these backward passes for the next ones of their kind."""
        if layout_has_changed:
            self.predictor.forget()
        self.predictor.learn(self._layout.buckets)

    def close(self) -> None:
        """Stop watching the parameters."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            hooks = post_accumulate_hooks(parameter)
            hooks.update({number: hook.hook for number, hook in hooks.items() if isinstance(hook, _DeferredHook)})

    def send(self, buckets: Sequence[GradientBucket]) -> None:
        """Send buckets, with the gradients that are there."""
        for bucket in buckets:
            self.has_begun = True
            bucket.pack_all(self._factor)
            bucket.launched = True
            self._next += 1
            self._transport.send(bucket)

    def late_buckets(self) -> bytearray:
        """Mark the buckets that had left when a gradient came on this rank."""
        return bytearray(not self._late.isdisjoint(bucket.members) for bucket in self._layout.buckets)

    def used(self, excluded: Iterable[int]) -> bytearray:
        """Mark the parameters that have a gradient on this rank.

        Args:
            excluded: Those that are never in a bucket.
        """
        used = bytearray(len(self._parameters))
        # Of late gradients, and of those of a bucket that has not left, some are with their parameters.
        for bucket in self._layout.buckets:
            for number, parameter, packed in zip(bucket.members, bucket.params, bucket.packed, strict=True):
                used[number] = packed or parameter.grad is not None
        for number in (*self._layout.unassigned, *excluded):
            used[number] = self._parameters[number].grad is not None
        return used

    def _watch(self, number: int, parameter: nn.Parameter) -> Any:
        """Follow a parameter's gradients, even if it is frozen: a hook can only begin while it is not."""
        predictor, layout, large = self.predictor, self._layout, parameter.numel() >= LARGE

        def gradient_is_there(parameter: Tensor) -> None:
            if not self._active:
                self._unsynchronized.add(number)
                return
            with self._lock:
                if predictor.kind is None and predictor.recognize(number, layout.buckets):
                    self._send_complete()
                predictor.counts[number] += 1
                bucket = layout.bucket_of[number]
                if bucket is None:
                    predictor.order.append(number)
                elif bucket.launched:
                    self._late.add(number)
                elif predictor.counts[number] == predictor.expected[number]:
                    if large:
                        bucket.pack(number, self._factor)
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
        """Send the buckets that are believed complete, up to the first that is not."""
        waiting = self._layout.buckets[self._next :]
        self.send(
            list(itertools.takewhile(lambda bucket: not bucket.missing and bucket is not self.control_bucket, waiting))
        )


class _DeferredHook:
    """Takes the place of a hook, which thus can still be removed by its handle, and runs nothing.

    Args:
        hook: What runs when the gradient has been synchronised.
    """

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        self.hook = hook

    def __call__(self, parameter: Tensor) -> None:
        """Leave the gradient of this rank alone."""
