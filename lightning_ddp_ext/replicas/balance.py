"""The controller that moves samples towards faster devices."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_ddp_ext._validation import check_integer
from lightning_ddp_ext.batches.chunk_sizes import even_chunks, first_limited_chunks, proportional_chunks
from lightning_ddp_ext.replicas.replicated_step import BatchRecord

WINDOW = 7  # batches behind each decision: an average over fewer followed single slow batches
LONGEST_WINDOW = 112
SUSTAINED = 5  # batches of a window that must show the imbalance
START_AT = 0.10  # imbalance from which samples are moved ...
STOP_AT = 0.05  # ... until it is below this


@dataclass(frozen=True, slots=True)
class Decision:
    """What the controller has decided, and why.

    Attributes:
        before: Chunk sizes so far.
        after: Chunk sizes from now on; the same if it has settled.
        reason: The measurement behind it, in words.
    """

    before: list[int]
    after: list[int]
    reason: str


class BalanceController:
    """Finds the proportions in which replicas finish a batch at the same time.

    Imbalance is how much longer the slowest replica takes than the mean, of the median times of 7 batches of full size.
    Above 10 %, if 5 of the 7 batches show it, each replica's share becomes proportional to its measured throughput
    (samples per second), and it is measured again, until the imbalance is below 5 % or whole samples allow no better.
    A move that has lowered neither the imbalance nor the time of the slowest replica is taken back. After that, and
    whenever it has to move again after it had settled, decisions rest on twice as many batches. Every replica keeps at
    least one sample, or it could not be measured any more.

    Args:
        num_replicas: Number of replicas.
    """

    def __init__(self, num_replicas: int) -> None:
        self._shares = [1.0 / num_replicas] * num_replicas
        self._limits: list[int | None] = [None] * num_replicas
        # Shares, slowest time and imbalance before the last move.
        self._previous: tuple[list[float], float, float] | None = None
        self._window: deque[list[float]] = deque()
        self._length = WINDOW
        self._sizes: list[int] = []
        self._warm = False
        self._moving = False
        self._has_moved = False
        self._settled = False
        self._batch_size = 0
        self._smaller = 0  # batches in a row below the full size

    @property
    def shares(self) -> list[float]:
        """Each replica's share of a batch; they add up to 1."""
        return list(self._shares)

    def chunk_sizes(self, batch_size: int) -> list[int]:
        """Share a batch.

        Args:
            batch_size: Number of samples.

        Returns:
            One chunk size per replica, within the limits where the others have room.
        """
        return self._cut(batch_size, self._shares)

    def limit(self, limits: Sequence[int | None]) -> None:
        """Set the most samples that each replica has memory for; None for no limit."""
        self._limits = list(limits)

    def _cut(self, batch_size: int, shares: Sequence[float]) -> list[int]:
        replicas = len(shares)
        if batch_size < replicas:
            return proportional_chunks(batch_size, shares)
        sizes = [1 + chunk for chunk in proportional_chunks(batch_size - replicas, _above_one(batch_size, shares))]
        return _within(sizes, self._limits)

    def observe(self, sizes: Sequence[int], seconds: Sequence[float]) -> Decision | None:
        """Take in one training batch.

        Args:
            sizes: Number of samples of each replica.
            seconds: Time that each replica took, forward and backward.

        Returns:
            A decision where one was made, to be logged.
        """
        sizes = list(sizes)
        batch_size = sum(sizes)
        self._smaller = self._smaller + 1 if batch_size < self._batch_size else 0
        if (0 < self._smaller < WINDOW) or not all(sizes):
            return None  # the last batch of an epoch, or one that could not be cut as planned
        if self._smaller:  # not the last one of an epoch: batches have become smaller
            self._batch_size = 0
        if batch_size > self._batch_size or sizes != self._sizes:
            self._batch_size, self._sizes = batch_size, sizes
            self._previous = None  # times of other batches are no measure for these
            self._window.clear()
            self._warm = False
        if not self._warm:  # the first batch of a new size allocates memory and chooses kernels
            self._warm = True
            return None
        self._window.append(list(seconds))
        if len(self._window) < self._length:
            return None
        decision = self._decide()
        if self._window:
            self._window.popleft()
        return decision

    def _decide(self) -> Decision | None:
        times = [median(column) for column in zip(*self._window, strict=True)]
        slowest = max(times)
        imbalance = slowest / fmean(times) - 1
        previous, self._previous = self._previous, None
        # A move that made the batch shorter is kept, whatever it did to the ratio; so is one that met a busier machine.
        if previous is not None and slowest >= previous[1] and imbalance >= previous[2]:
            self._length = min(2 * self._length, LONGEST_WINDOW)
            self._moving = False
            return self._move(
                previous[0],
                f"the slowest replica took {_ms([previous[1]])} before, {previous[2]:.0%} longer than the mean, and"
                f" takes {_ms([slowest])} now, {imbalance:.0%} longer",
            )
        threshold = STOP_AT if self._moving else START_AT
        if imbalance <= threshold or not self._is_sustained(times.index(slowest), threshold):
            return self._settle(f"the slowest replica takes {imbalance:.0%} longer than the mean ({_ms(times)})")
        throughputs = [size / time for size, time in zip(self._sizes, times, strict=True)]
        shares = [throughput / sum(throughputs) for throughput in throughputs]
        sizes = self._cut(self._batch_size, shares)
        expected = max(size / throughput for size, throughput in zip(sizes, throughputs, strict=True))
        if sizes == self._sizes or expected >= slowest:
            within = "" if all(limit is None for limit in self._limits) else " within the memory"
            return self._settle(f"whole samples{within} allow no better than {_ms(times)}")
        if self._settled and self._has_moved:
            self._length = min(2 * self._length, LONGEST_WINDOW)
        self._previous, self._moving, self._has_moved = (self._shares, slowest, imbalance), True, True
        return self._move(
            shares,
            f"replica {times.index(slowest)} takes {imbalance:.0%} longer than the mean ({_ms(times)}, medians of"
            f" {len(self._window)} batches)",
        )

    def _is_sustained(self, slowest: int, threshold: float) -> bool:
        shown = [seconds[slowest] > (1 + threshold) * fmean(seconds) for seconds in self._window]
        return sum(shown) * WINDOW >= SUSTAINED * len(shown)

    def _move(self, shares: list[float], reason: str) -> Decision:
        before = self._sizes
        self._shares, self._settled = shares, False
        self._sizes = self._cut(self._batch_size, shares)
        self._window.clear()
        self._warm = False
        return Decision(before, self._sizes, reason)

    def _settle(self, reason: str) -> Decision | None:
        self._moving = False
        if self._settled:
            return None
        self._settled = True
        return Decision(self._sizes, self._sizes, reason)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold, in plain numbers."""
        return {"shares": list(self._shares), "batches": self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state.

        Raises:
            ValueError: If it is that of another number of replicas.
        """
        if len(state["shares"]) != len(self._shares):
            raise ValueError(f"the state is that of {len(state['shares'])} replicas, not of {len(self._shares)}.")
        self._shares, self._length = list(state["shares"]), state["batches"]


def _above_one(batch_size: int, shares: Sequence[float]) -> list[float]:
    """What is left of the shares when every replica has got one sample."""
    left = [max(batch_size * share - 1, 0.0) for share in shares]
    return left if any(left) else [1.0] * len(shares)


def _within(sizes: Sequence[int], limits: Sequence[int | None]) -> list[int]:
    """Give what is above a replica's limit to those that have room; what nobody has room for stays where it is."""
    kept = [size if limit is None else min(size, limit) for size, limit in zip(sizes, limits, strict=True)]
    excess = sum(sizes) - sum(kept)
    while excess:
        room = [
            index for index, limit in enumerate(limits) if kept[index] and (limit is None or kept[index] < limit)
        ] or [index for index in range(len(kept)) if kept[index] < sizes[index]]
        smallest = min(room, key=lambda index: kept[index] / sizes[index])
        kept[smallest] += 1
        excess -= 1
    return kept


def _ms(seconds: Sequence[float]) -> str:
    return " and ".join(f"{1000 * value:.1f}" for value in seconds) + " ms"


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


_NAME = '`balance="auto"`'


class AutoBalance:
    """Feeds the controller with training batches, and says what it decides.

    Args:
        devices: Device of each replica.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._controller = BalanceController(len(devices))
        self._largest_chunks = [0] * len(self._devices)
        self._batches = 0
        self._in_order = 0  # batches in a row
        self._said: set[str] = set()

    def chunk_sizes(self, batch_size: int) -> list[int]:
        """Share a batch, see `BalanceController.chunk_sizes`."""
        return self._controller.chunk_sizes(batch_size)

    def observe(self, sizes: Sequence[int], seconds: Sequence[float], in_order: bool) -> None:
        """Take in one training batch.

        Args:
            sizes: Number of samples of each replica.
            seconds: Time that each replica took.
            in_order: Whether the replicas ran one after another: moving samples would gain nothing.
        """
        self._batches += 1
        self._in_order = self._in_order + 1 if in_order else 0
        if in_order:
            if self._in_order > 1:  # the first batch always runs in order, to see whether it draws random numbers
                self._say_once(f"{_NAME} keeps the chunks as they are: the replicas run one after another.")
            return
        self._largest_chunks = [max(pair) for pair in zip(self._largest_chunks, sizes, strict=True)]
        if self._batches % WINDOW == 0:
            self._read_memory()
        decision = self._controller.observe(sizes, seconds)
        if decision is not None:
            rank_zero_info(_describe(decision, self._batches))

    def _read_memory(self) -> None:
        if len(set(self._devices)) < len(self._devices):
            return  # replicas of one device share its memory, whoever has the samples
        memories = [
            memory
            for device, largest in zip(self._devices, self._largest_chunks, strict=True)
            if (memory := measure(device, largest)) is not None
        ]
        if len(memories) < len(self._devices):
            return
        self._controller.limit([memory.most_samples for memory in memories])
        text = advice(memories)
        if text is not None and "memory" not in self._said:
            self._said.add("memory")
            rank_zero_warn(f"{_NAME}: {text}", category=UserWarning)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(text)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        return self._controller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state; one of another number of replicas says nothing about these, and is left aside."""
        if len(state["shares"]) == len(self._devices):
            self._controller.load_state_dict(state)
        else:
            rank_zero_info(f"{_NAME} starts even: the checkpoint is that of {len(state['shares'])} replicas.")


def _describe(decision: Decision, batches: int) -> str:
    after = ", ".join(map(str, decision.after))
    if decision.after == decision.before:
        return f"{_NAME}, batch {batches}: settled at {after}; {decision.reason}."
    return f"{_NAME}, batch {batches}: {', '.join(map(str, decision.before))} -> {after}; {decision.reason}."


_CHECKPOINT_KEY = "lightning_ddp_ext.balanced_dp"


class BatchSplit:
    """Maps a batch size to one chunk size per device.

    Args:
        gpu0_batch_size: See `BalancedDataParallelStrategy`.
        split: See `BalancedDataParallelStrategy`.
        balance: See `BalancedDataParallelStrategy`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range, or more than one is given.
    """

    def __init__(self, gpu0_batch_size: int | None, split: Sequence[float] | None, balance: str | None) -> None:
        given = {"gpu0_batch_size": gpu0_batch_size, "split": split, "balance": balance}
        chosen = [f"`{name}={value!r}`" for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} exclude each other. Keep one of them.")
        if gpu0_batch_size is not None:
            remedy = "Use 0 to keep the first device free of samples."
            check_integer("gpu0_batch_size", gpu0_batch_size, remedy=remedy)
        _check_proportions(split)
        if balance is not None and not (isinstance(balance, str) and balance in ("even", "auto")):
            raise ValueError(f'`balance` must be "even" or "auto", got {balance!r}. Use `split` for fixed proportions.')
        self._gpu0_batch_size = gpu0_batch_size
        self._proportions = None if split is None else list(split)
        self._balance = balance
        self._auto: AutoBalance | None = None
        self._saved: dict[str, Any] | None = None

    def check(self, devices: Sequence[torch.device]) -> None:
        """Check that there are as many proportions as devices.

        Raises:
            ValueError: If there are not.
        """
        if self._proportions is not None and len(self._proportions) != len(devices):
            raise ValueError(
                f"`split={self._proportions}` has {len(self._proportions)} entries for {len(devices)} devices."
                " Give one proportion per device."
            )

    def start(self, devices: Sequence[torch.device]) -> None:
        """Start balancing automatically if that was chosen, with the state of the checkpoint if there is one."""
        saved, self._saved = self._saved, None
        distinct = len(set(devices)) == len(devices)
        fixed = self._proportions is not None or self._gpu0_batch_size is not None
        wanted = self._balance == "auto" or (self._balance is None and not fixed and distinct)
        if not wanted or len(devices) == 1:
            return
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            self._auto = None
            rank_zero_info('`balance="auto"` is off and batches are shared evenly: it would not be deterministic.')
            return
        self._auto = self._auto or AutoBalance(devices)
        if saved is not None:
            self._auto.load_state_dict(saved)

    def sizes(self, batch_size: int, devices: Sequence[torch.device]) -> list[int]:
        """Return how many samples of a batch each device gets."""
        if self._proportions is not None:
            return proportional_chunks(batch_size, self._proportions)
        if self._gpu0_batch_size is not None:
            return first_limited_chunks(batch_size, len(devices), self._gpu0_batch_size)
        if self._auto is not None:
            return self._auto.chunk_sizes(batch_size)
        return even_chunks(batch_size, len(devices))

    def observe(self, record: BatchRecord) -> None:
        """Learn from a training batch."""
        if self._auto is not None:
            self._auto.observe(record.sizes, record.seconds, record.in_order)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold: nothing, unless batches are balanced automatically."""
        return {} if self._auto is None else {_CHECKPOINT_KEY: self._auto.state_dict()}

    def load_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Keep the state of a checkpoint for the start."""
        self._saved = checkpoint.get(_CHECKPOINT_KEY)


def _check_proportions(split: object) -> None:
    if split is None:
        return
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise TypeError(f"`split` must be a sequence of numbers, got {split!r}. Use for example [2, 3, 3].")
    numbers = all(isinstance(part, int | float) and not isinstance(part, bool) for part in split)
    if not numbers or any(not 0 <= part < math.inf for part in split) or not 0 < sum(split) < math.inf:
        raise ValueError(
            f"`split` must hold non-negative numbers, not all zero, got {list(split)!r}. Use for example [2, 3, 3]."
        )
