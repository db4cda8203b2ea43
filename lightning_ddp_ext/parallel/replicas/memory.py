"""How much memory devices have, and how many samples fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_GIB = 2**30
_USABLE = 0.9  # of what is free: allocators fragment, and batches differ


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device, in bytes.

    Attributes:
        device: Its name.
        available: What this process can have: what it holds and what is free.
        held: In use between batches: parameters, gradients, optimizer state.
        peak: Most that was in use so far.
        largest_chunk: Most samples the device has had.
    """

    device: str
    available: int
    held: int
    peak: int
    largest_chunk: int

    @property
    def per_sample(self) -> float:
        """Bytes that a sample takes during a batch."""
        return (self.peak - self.held) / self.largest_chunk if self.largest_chunk else 0.0

    @property
    def most_samples(self) -> int | None:
        """How many samples fit; None if nothing has been measured yet."""
        if self.per_sample <= 0:
            return None
        return max(0, int((_USABLE * self.available - self.held) / self.per_sample))


def measure(device: torch.device, largest_chunk: int) -> DeviceMemory | None:
    """Read the memory of a device between two batches.

    Args:
        device: The device.
        largest_chunk: Most samples it has had.

    Returns:
        Its memory, or None for devices other than CUDA's: replicas on the CPU share theirs.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        device=str(device),
        available=free + torch.cuda.memory_reserved(device),
        held=torch.cuda.memory_allocated(device),
        peak=torch.cuda.max_memory_allocated(device),
        largest_chunk=largest_chunk,
    )


def advice(memories: Sequence[DeviceMemory]) -> str | None:
    """Say so if samples alone cannot balance memory, because one device holds too much before it has any.

    Args:
        memories: The memory of every device, the first one's first.

    Returns:
        The numbers and a remedy, or None.
    """
    fullest = max(memories, key=lambda memory: memory.held)
    others = [memory for memory in memories if memory is not fullest]
    if not others or fullest.held <= max(memory.peak for memory in others):
        return None
    highest = max(others, key=lambda memory: memory.peak)
    remedy = "`gpu0_batch_size=0`" if fullest is memories[0] else "a smaller share in `split`"
    return (
        f"{fullest.device} holds {fullest.held / _GIB:.2f} GiB before it has a sample, more than the"
        f" {highest.peak / _GIB:.2f} GiB that {highest.device} needs at most: samples alone cannot balance memory."
        f" Use {remedy} if {fullest.device} runs out of it."
    )
