"""The decision of `balanced_dp` how many samples of a batch each replica gets."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_ddp_ext._devices import reports_memory, restart_peak
from lightning_ddp_ext._validation import check_integer
from lightning_ddp_ext.batches.balance_controller import WINDOW, BalanceController
from lightning_ddp_ext.batches.chunk_sizes import even_chunks, first_limited_chunks, proportional_chunks
from lightning_ddp_ext.replicas.replicated_step import BatchRecord

_NAME = '`balance="auto"`'
_CHECKPOINT_KEY = "lightning_ddp_ext.balanced_dp"
_USABLE = 0.9  # of the available memory: allocators fragment, and batches differ


class BatchDivision:
    """Maps a batch size to one chunk size per replica, from the strategy's options or the times of earlier batches."""

    def __init__(self, gpu0_batch_size: int | None, split: Sequence[float] | None, balance: str | None) -> None:
        given = {"gpu0_batch_size": gpu0_batch_size, "split": split, "balance": balance}
        chosen = [f"`{name}={value!r}`" for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} exclude each other. Keep one of them.")
        if gpu0_batch_size is not None:
            remedy = "Use 0 to keep the first device free of samples."
            check_integer("gpu0_batch_size", gpu0_batch_size, remedy=remedy)
        if split is not None:
            _check_proportions(split)
        if balance is not None and not (isinstance(balance, str) and balance in ("even", "auto")):
            raise ValueError(f'`balance` must be "even" or "auto", got {balance!r}. Use `split` for fixed proportions.')
        self._gpu0_batch_size = gpu0_batch_size
        self._proportions = None if split is None else list(split)
        self._balance = balance
        self._controller: BalanceController | None = None
        self._saved: dict[str, Any] | None = None
        # Chunk sizes of the batches since the peaks of memory were restarted; None if other batches have peaks as well.
        self._measured: list[list[int]] | None = None
        self._unread: deque[BatchRecord] = deque()  # whose times are not known, because the devices are behind the host
        self._batches = 0
        self._ran_in_order = False
        self._has_shown_order = False

    def check(self, devices: Sequence[torch.device]) -> None:
        """Check that there are as many proportions as devices."""
        if self._proportions is not None and len(self._proportions) != len(devices):
            raise ValueError(
                f"`split={self._proportions}` has {len(self._proportions)} entries for {len(devices)} devices."
                " Give one proportion per device."
            )

    def start(self, devices: Sequence[torch.device]) -> None:
        """Create the controller if balance is automatic, with the shares of a loaded checkpoint if they fit."""
        saved, self._saved = self._saved, None
        is_free = self._balance is None and self._proportions is None and self._gpu0_batch_size is None
        is_auto = self._balance == "auto" or (is_free and len(set(devices)) == len(devices))
        if not is_auto or len(devices) == 1:
            return
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            self._controller = None
            rank_zero_info(f"{_NAME} is off and batches are shared evenly: it would not be deterministic.")
            return
        if self._controller is None:
            self._controller = BalanceController(len(devices))
        if saved is not None and len(saved["shares"]) == len(devices):
            self._controller.load_state_dict(saved)
        elif saved is not None:
            rank_zero_info(f"{_NAME} starts with even chunks: the checkpoint has {len(saved['shares'])} replicas.")

    def split_sizes(self, batch_size: int, num_replicas: int) -> list[int]:
        """Return how many samples of a batch each replica gets."""
        if self._proportions is not None:
            return proportional_chunks(batch_size, self._proportions)
        if self._gpu0_batch_size is not None:
            return first_limited_chunks(batch_size, num_replicas, self._gpu0_batch_size)
        if self._controller is not None:
            return self._controller.split_sizes(batch_size)
        return even_chunks(batch_size, num_replicas)

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
                rank_zero_info(f"{_NAME} keeps the chunks as they are: the replicas run one after another.")
            return
        # Replicas of one device share its memory; on the CPU they share the memory of the process.
        if len(set(devices)) == len(devices) and all(map(reports_memory, devices)):
            self._observe_memory(record.sizes, devices, self._controller)
        self._unread.append(record)
        while self._unread and self._unread[0].is_done():
            finished = self._unread.popleft()
            decision = self._controller.observe(finished.sizes, finished.seconds)
            if decision is None:
                continue
            rank_zero_info(f"{_NAME}, batch {self._batches}: {decision}.")
            if decision.before != decision.after:
                self._unread.clear()  # these batches were divided by the shares before

    def _observe_memory(self, sizes: list[int], devices: Sequence[torch.device], controller: BalanceController) -> None:
        """Set limits from the peaks of a window of training batches, without evaluation between them."""
        if self._measured is not None:
            self._measured.append(sizes)
            if len(self._measured) < WINDOW:
                return
            largest = map(max, zip(*self._measured, strict=True))
            memories = [DeviceMemory.read(*pair) for pair in zip(devices, largest, strict=True)]
            controller.limits = [memory.most_samples for memory in memories]
        for device in devices:
            restart_peak(device)
        self._measured = []

    def forget_peaks(self) -> None:
        """Ignore the peaks of memory so far, because the devices have computed other batches than training batches."""
        self._measured = None

    def state_dict(self) -> dict[str, Any]:
        """Return the entries to add to a checkpoint: none, unless balance is automatic."""
        return {} if self._controller is None else {_CHECKPOINT_KEY: self._controller.state_dict()}

    def load_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Keep the state in a checkpoint for `start`."""
        self._saved = checkpoint.get(_CHECKPOINT_KEY)


def _check_proportions(split: object) -> None:
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise TypeError(f"`split` must be a sequence of numbers, got {split!r}. Use for example [2, 3, 3].")
    numbers = all(isinstance(part, int | float) and not isinstance(part, bool) for part in split)
    if not numbers or any(not 0 <= part < math.inf for part in split) or not 0 < sum(split) < math.inf:
        raise ValueError(
            f"`split` must hold non-negative numbers, not all zero, got {list(split)!r}. Use for example [2, 3, 3]."
        )


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of an accelerator between two batches, and the largest chunk that it has computed."""

    available: int  # held by this process, or free
    held: int  # in use between batches: parameters, gradients, optimizer state
    peak: int
    largest_chunk: int

    @classmethod
    def read(cls, device: torch.device, largest_chunk: int) -> "DeviceMemory":
        """Read the memory of an accelerator."""
        memory = torch.accelerator
        free, _ = memory.get_memory_info(device)
        available = free + memory.memory_reserved(device)
        held, peak = memory.memory_allocated(device), memory.max_memory_allocated(device)
        return cls(available, held, peak, largest_chunk)

    @property
    def most_samples(self) -> int | None:
        """Number of samples that fit; None if no chunk has been measured yet."""
        if not self.largest_chunk or self.peak <= self.held:
            return None
        per_sample = (self.peak - self.held) / self.largest_chunk
        return max(0, int((_USABLE * self.available - self.held) / per_sample))
