"""Chunks that follow what each device has been measured to manage."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_ddp_ext.parallel.replicas.balancing import WINDOW, BalanceController, Decision
from lightning_ddp_ext.parallel.replicas.memory import advice, measure

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
