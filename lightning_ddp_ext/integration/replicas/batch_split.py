"""How `balanced_dp` shares a batch: the user's choice, and what has been measured."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_ddp_ext.arguments import check_integer
from lightning_ddp_ext.integration.replicas.auto_balance import AutoBalance
from lightning_ddp_ext.integration.replicas.replicated_step import BatchRecord
from lightning_ddp_ext.parallel.batches.chunking import even_chunks, first_limited_chunks, proportional_chunks

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
