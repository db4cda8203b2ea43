"""Which gradients travel together."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_ddp_ext.parallel.gradients.bucket import GradientBucket

_FIRST_BYTES = 2**20  # the first bucket is small, so that communication starts early; as in torch
_REVIEW = 100  # synchronisations between two looks at what is still used


class GradientLayout:
    """The buckets, which grow with what has been used anywhere; the same on every rank at any time.

    It starts empty. Parameters that some rank has used and that are in no bucket yet get new ones at the end: in the
    first step, when a layer is thawed, when a head is used for the first time. Buckets most of which no rank has used
    for a while are dissolved; what is used of them enters again.

    Args:
        parameters: All parameters, the same on every rank.
        apart: Numbers of those that are never in a bucket.
        bucket_cap_mb: Largest size of a bucket in MiB.
        group: The ranks.

    Attributes:
        buckets: In the order in which they are sent.
        bucket_of: The bucket of each parameter.
        loose: Numbers of parameters that are in no bucket and may get one.
        cap: Largest size of a bucket in bytes.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], apart: Container[int], bucket_cap_mb: float, group: dist.ProcessGroup
    ) -> None:
        self.buckets: list[GradientBucket] = []
        self.bucket_of: list[GradientBucket | None] = [None] * len(parameters)
        self.loose = {member for member in range(len(parameters)) if member not in apart}
        self._parameters = parameters
        self.cap = int(bucket_cap_mb * 2**20)
        self._group = group
        self._recently_used = [0.0] * len(parameters)
        self._synchronizations = 0

    def grow(self, used: Sequence[float], order: Sequence[int], source: int) -> list[GradientBucket]:
        """Make buckets for parameters that were used for the first time.

        Args:
            used: Above 0 for what any rank has used; the same on every rank.
            order: In which this rank's gradients became ready.
            source: The rank whose order counts.

        Returns:
            The new buckets.
        """
        new = sorted((member for member in self.loose if used[member]), reverse=True)
        if not new:
            return []
        begin = len(self.buckets)
        self._append(self._divide(self._agree_on_order(new, order, source)))
        return self.buckets[begin:]

    def dissolve_idle(self, used: Sequence[float]) -> None:
        """Dissolve buckets of which too little is used, now and then.

        Args:
            used: Above 0 for what any rank has used in this synchronisation; the same on every rank.
        """
        self._synchronizations += 1
        self._recently_used = list(map(max, self._recently_used, used))
        if self._synchronizations % _REVIEW:
            return
        idle = [bucket for bucket in self.buckets if 2 * self._used_bytes(bucket) < bucket.nbytes]
        self._recently_used = [0.0] * len(self._recently_used)
        for bucket in idle:
            self.loose.update(bucket.members)
            for member in bucket.members:
                self.bucket_of[member] = None
        self.buckets = [bucket for bucket in self.buckets if bucket not in idle]
        for index, bucket in enumerate(self.buckets):
            bucket.renumber(index)
        self._mark_last()

    def state(self) -> dict[str, Any]:
        """Return what is in which bucket, and what else `load` needs; numbers and lists, the same on every rank."""
        return {
            "buckets": [bucket.members for bucket in self.buckets],
            "recently_used": [member for member, used in enumerate(self._recently_used) if used],
            "synchronizations": self._synchronizations,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Have the buckets of a layout with the same parameters; while there are none."""
        self._append(state["buckets"])
        for member in state["recently_used"]:
            self._recently_used[member] = 1.0
        self._synchronizations = state["synchronizations"]

    def _append(self, divided: Iterable[Sequence[int]]) -> None:
        for members in divided:
            bucket = GradientBucket(len(self.buckets), [self._parameters[member] for member in members], members)
            self.buckets.append(bucket)
            for member in members:
                self.bucket_of[member] = bucket
            self.loose.difference_update(members)
        self._mark_last()

    def _used_bytes(self, bucket: GradientBucket) -> int:
        return sum(
            parameter.nbytes
            for member, parameter in zip(bucket.members, bucket.params, strict=True)
            if self._recently_used[member]
        )

    def _agree_on_order(self, new: list[int], order: Sequence[int], source: int) -> list[int]:
        # A parameter is complete when its last gradient has come; one that the source did not use goes last.
        last = {member: position for position, member in enumerate(order)}
        positions = torch.tensor([last.get(member, len(order)) for member in new])
        dist.broadcast(positions, group=self._group, group_src=source)
        return [member for _, member in sorted(zip(positions.tolist(), new, strict=True), key=lambda pair: pair[0])]

    def _divide(self, members: Sequence[int]) -> list[list[int]]:
        """Divide parameters in order into lists of one type and device, each up to the size of a bucket."""
        divided: list[list[int]] = []
        unfinished: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for member in members:
            parameter = self._parameters[member]
            kind = (parameter.dtype, parameter.device)
            current = unfinished.setdefault(kind, [])
            current.append(member)
            cap = min(self.cap, _FIRST_BYTES) if not self.buckets and not divided else self.cap
            if sum(self._parameters[other].nbytes for other in current) >= cap:
                divided.append(unfinished.pop(kind))
        return divided + list(unfinished.values())

    def _mark_last(self) -> None:
        for bucket in self.buckets:
            bucket.last = bucket is self.buckets[-1]
