"""Training batches that a thread fetches ahead, while the model trains."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_ddp_ext._compat.torch import before_random_numbers
from lightning_ddp_ext._devices import current_device
from lightning_ddp_ext._lightning import LightningModule, is_overridden, rank_zero_warn
from lightning_ddp_ext.batches.containers import values_of, walk, with_values
from lightning_ddp_ext.resume.rng_state import (
    ResumableRng,
    capture_rng_state,
    capture_states,
    find_loader_rngs,
    restore_states,
)

_IN_MAIN_THREAD = 2  # batches of an iteration; the first fetch draws the order, the second shows if all fetches draw
_JOIN_LIMIT = 10.0  # seconds to wait for the fetch under way, when a run has failed


class StreamCopies:
    """Copies tensors to an accelerator on a separate stream, from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def start(self, batch: Any) -> tuple[Any, torch.Event]:
        """Start copying a batch; return it with the event that marks the end."""
        with current_device(self._device):
            before = torch.accelerator.current_stream(self._device)
            torch.accelerator.set_stream(self._stream)
            try:
                copied = self._copy(batch)
                event = torch.Event(self._device)
                event.record(self._stream)
            finally:
                torch.accelerator.set_stream(before)
        return copied, event

    def finish(self, batch: Any, event: torch.Event) -> None:
        """Let the current stream wait for the copies; the host does not wait."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(event)
        for part in walk(batch):
            if isinstance(part, Tensor) and part.device == self._device:
                part.record_stream(current)  # the memory belongs to the other stream

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            # Lightning moves others when the step begins.
            return pin(value).to(self._device, non_blocking=True) if _can_be_pinned(value) else value
        return value if isinstance(value, PackedSequence) else with_values(value, [*map(self._copy, values_of(value))])


def pin(value: Any) -> Any:
    """Copy the tensors of a batch to pinned memory, from which copies to a device do not stop the host."""
    if isinstance(value, Tensor):
        return value.pin_memory() if _can_be_pinned(value) and not value.is_pinned() else value
    return value if isinstance(value, PackedSequence) else with_values(value, [*map(pin, values_of(value))])


def _can_be_pinned(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided


def copies_to(device: torch.device, module: LightningModule) -> StreamCopies | None:
    """Return early copies to a device; None if hooks of the user see a batch before it is copied, or on the CPU."""
    sources = [source for source in (module, getattr(module.trainer, "datamodule", None)) if source is not None]
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device")
    if not has_streams(device) or any(is_overridden(hook, source) for hook in hooks for source in sources):
        return None
    return StreamCopies(device)


def has_streams(device: torch.device) -> bool:
    """Return True if copies to a device can run beside its other work."""
    return device.type not in ("cpu", "mps")


class _ClosedError(BaseException):
    """Ends the thread from within the code of a dataset, which may catch any `Exception`."""


@dataclass(frozen=True, slots=True)
class _Item:
    """A fetched batch, or the error of its fetch."""

    result: tuple[Any, Any] | None = None  # batch and number of samples
    error: BaseException | None = None
    event: torch.Event | None = None  # the end of the copies
    loader_states: list[Any] | None = None
    has_drawn: bool = False  # from a generator of the process, as far as that can be seen


class _FetchThread:
    """A thread that calls a function until it raises, at most so many times, and keeps a few results ready."""

    def __init__(self, fetch: Callable[[], _Item], device: torch.device, size: int, limit: float) -> None:
        self._fetch = fetch
        self._device = device
        self._size = size
        self._limit = limit
        self._items: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._is_closed = self._has_ended = self._is_awaited = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def take(self) -> _Item | None:
        """Return the next item, or None if there is none any more; wait for the thread."""
        with self._changed:
            self._is_awaited = True
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._items or self._has_ended)
            finally:
                self._is_awaited = False
            item = self._items.popleft() if self._items else None
            self._changed.notify_all()
        return item

    def close(self) -> None:
        """End the thread after the fetch under way, and drop what it has fetched."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_JOIN_LIMIT)

    def _wait_until_awaited(self) -> None:
        """Wait until the training loop waits for the batch that is being fetched."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._is_awaited and not self._items))
            if self._is_closed:
                raise _ClosedError

    def _run(self) -> None:
        try:
            # A later draw of random numbers happens at the same place among the draws of the training steps as
            # without this thread.
            with current_device(self._device), before_random_numbers(self._wait_until_awaited):
                self._fetch_all()
        except _ClosedError:
            pass
        except BaseException as error:  # it belongs to the step that needs the batch
            self._add(_Item(error=error))
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _fetch_all(self) -> None:
        number = 0
        while number < self._limit:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._size)
                if self._is_closed:
                    return
            item = self._fetch()
            number += 1
            self._add(item)
            if item.has_drawn:
                return

    def _add(self, item: _Item) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()


class Prefetcher:
    """Fetches up to `size` training batches ahead of their use, in a thread whose current device is `device`.

    The first batches of an iteration are fetched in the main thread. If the second fetch draws from a generator of the
    process, which the training step uses too, all are. `copies` start copying a batch when it has been fetched, and
    `prepare` changes it before.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        rng: ResumableRng | None = None,
        copies: StreamCopies | None = None,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        self._size = size
        self._device = device
        self._rng = rng
        self._copies = copies
        self._prepare = prepare
        self._thread: _FetchThread | None = None
        self._is_refused = False
        self._fetched = 0
        self._limit = float("inf")

    def begin(self, limit: int | None) -> None:
        """Begin an iteration of at most `limit` batches."""
        self.close()
        self._fetched, self._limit = 0, float("inf") if limit is None else limit

    def next(self, fetch: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return the next batch and its number of samples; `fetch` is the same function in the whole iteration."""
        if self._thread is not None:
            item = self._thread.take()
            if item is not None:
                return self._hand_over(item)
            self._thread = None
            if self._rng is not None:
                self._rng.loader_states = None  # the thread has not fetched more than was used
        is_checked = self._fetched == _IN_MAIN_THREAD - 1 and not self._is_refused
        before = capture_rng_state(self._device) if is_checked else None
        fetched = fetch()
        self._fetched += 1
        if before is not None and capture_rng_state(self._device) != before:
            self._refuse("fetching a batch draws random numbers from generators of the process")
        is_resuming = self._rng is not None and self._rng.is_resuming  # which sets the states of generators back
        if self._fetched >= _IN_MAIN_THREAD and not (self._is_refused or is_resuming):
            self._start(fetch)
        return fetched

    def close(self) -> None:
        """End the thread; generators of loaders get the states that belong to the last batch that was used."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
        if self._rng is not None and self._rng.loader_states is not None:
            restore_states(find_loader_rngs(self._rng.loaders), self._rng.loader_states)
            self._rng.loader_states = None

    def _start(self, fetch: Callable[[], tuple[Any, Any]]) -> None:
        if self._fetched >= self._limit:
            return
        if self._rng is not None:
            self._rng.loader_states = self._capture_loaders()
        remaining = self._limit - self._fetched
        self._thread = _FetchThread(lambda: self._fetch_item(fetch), self._device, self._size, remaining)

    def _capture_loaders(self) -> list[Any] | None:
        return None if self._rng is None else capture_states(find_loader_rngs(self._rng.loaders))

    def _fetch_item(self, fetch: Callable[[], tuple[Any, Any]]) -> _Item:
        """Fetch a batch, and start its copies. Runs in the thread."""
        before = _plain_states()
        batch, samples = fetch()
        has_drawn = _plain_states() != before
        event = None
        if self._prepare is not None:
            batch = self._prepare(batch)
        if self._copies is not None:
            batch, event = self._copies.start(batch)
        return _Item((batch, samples), None, event, self._capture_loaders(), has_drawn)

    def _hand_over(self, item: _Item) -> tuple[Any, Any]:
        self._fetched += 1
        if self._rng is not None:
            self._rng.loader_states = item.loader_states  # None after an error, when the thread has ended
        if item.error is not None:
            raise item.error
        assert item.result is not None
        if item.event is not None and self._copies is not None:
            self._copies.finish(item.result[0], item.event)
        if item.has_drawn:
            self._refuse("`random` or a global function of NumPy was used while a thread fetched a batch")
        return item.result

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        rank_zero_warn(
            f"`prefetch={self._size}` is off from now on: {reason}. Training steps may draw from the same generators,"
            " so that random numbers would depend on timing. Set `num_workers=1` in the loader, or draw from a"
            " generator of the dataset's own."
        )


def _plain_states() -> tuple[Any, Any]:
    """Return the states of the generators whose use in a thread cannot be noticed beforehand."""
    state = capture_rng_state()
    return state["python"], state["numpy"]
