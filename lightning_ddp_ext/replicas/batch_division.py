"""The decision of `balanced_dp` how many samples of a batch each replica gets."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_ddp_ext._devices import are_deterministic, reports_memory
from lightning_ddp_ext.batches.balance_controller import BalanceController
from lightning_ddp_ext.batches.chunk_sizes import Balance, ChunkRule
from lightning_ddp_ext.batches.device_memory import PeakMemory
from lightning_ddp_ext.replicas.replicated_step import BatchRecord

_NAME = '`balance="auto"`'
_CHECKPOINT_KEY = "lightning_ddp_ext.balanced_dp"


class BatchDivision:
    """Maps a batch size to one chunk size per replica, from the strategy's options or the times of earlier batches."""

    def __init__(self, gpu0_batch_size: int | None, split: Sequence[float] | None, balance: Balance | None) -> None:
        self._rule = ChunkRule(gpu0_batch_size, split, balance)
        self._controller: BalanceController | None = None
        self._saved: dict[str, Any] | None = None
        self._peaks = PeakMemory()
        self._unread: deque[BatchRecord] = deque()  # whose times are not known, because the devices are behind the host
        self._batches = 0
        self._ran_in_order = False
        self._has_shown_order = False

    def check(self, devices: Sequence[torch.device]) -> None:
        """Check that there are as many proportions as devices."""
        self._rule.check_number(len(devices))

    def start(self, devices: Sequence[torch.device]) -> None:
        """Create the controller if balance is automatic, with the shares of a loaded checkpoint if they fit."""
        saved, self._saved = self._saved, None
        is_auto = self._rule.is_auto or (self._rule.is_free and len(set(devices)) == len(devices))
        if not is_auto or len(devices) == 1:
            return
        if are_deterministic():
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
        if self._controller is not None:
            return self._controller.split_sizes(batch_size)
        return self._rule.divide(batch_size, num_replicas)

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
            limits = self._peaks.observe(record.sizes, devices)
            self._controller.limits = self._controller.limits if limits is None else limits
        self._unread.append(record)
        while self._unread and self._unread[0].is_done():
            finished = self._unread.popleft()
            decision = self._controller.observe(finished.sizes, finished.seconds)
            if decision is None:
                continue
            rank_zero_info(f"{_NAME}, batch {self._batches}: {decision}.")
            if decision.before != decision.after:
                self._unread.clear()  # these batches were divided by the shares before

    def forget_peaks(self) -> None:
        """Ignore the peaks of memory so far, because the devices have computed other batches than training batches."""
        self._peaks.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the entries to add to a checkpoint: none, unless balance is automatic."""
        return {} if self._controller is None else {_CHECKPOINT_KEY: self._controller.state_dict()}

    def load_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Keep the state in a checkpoint for `start`."""
        self._saved = checkpoint.get(_CHECKPOINT_KEY)
