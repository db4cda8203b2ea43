"""How many samples of a batch fit into the memory of accelerators, from the peaks of training batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_ddp_ext._devices import available_memory, memory_statistics, restart_peak
from lightning_ddp_ext.batches.balance_controller import WINDOW

_USABLE = 0.9  # of the available memory: allocators fragment, and batches differ


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
        memory = memory_statistics(device)
        held, peak = memory.memory_allocated(device), memory.max_memory_allocated(device)
        return cls(available_memory(device), held, peak, largest_chunk)

    @property
    def most_samples(self) -> int | None:
        """Number of samples that fit; None if no chunk has been measured yet."""
        if not self.largest_chunk or self.peak <= self.held:
            return None
        per_sample = (self.peak - self.held) / self.largest_chunk
        return max(0, int((_USABLE * self.available - self.held) / per_sample))


class PeakMemory:
    """Measures the peaks of windows of training batches, without evaluation between them."""

    def __init__(self) -> None:
        # Chunk sizes of the batches since the peaks of memory were restarted; None if other batches have peaks as well.
        self._measured: list[Sequence[int]] | None = None

    def observe(self, sizes: Sequence[int], devices: Sequence[torch.device]) -> list[int | None] | None:
        """Add the chunk sizes of a training batch; at the end of a window, return how many samples fit each device."""
        limits: list[int | None] | None = None
        if self._measured is not None:
            self._measured.append(sizes)
            if len(self._measured) < WINDOW:
                return None
            largest = map(max, zip(*self._measured, strict=True))
            limits = [DeviceMemory.read(*pair).most_samples for pair in zip(devices, largest, strict=True)]
        for device in devices:
            restart_peak(device)
        self._measured = []
        return limits

    def forget(self) -> None:
        """Ignore the peaks so far, because the devices have computed other batches than training batches."""
        self._measured = None
