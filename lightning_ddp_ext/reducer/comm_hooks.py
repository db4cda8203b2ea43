"""How a bucket is reduced: all-reduce or a communication hook."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.reducer.buckets import GradientBucket

CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


_TAKE_GROUPS = tuple(f"torch.distributed.algorithms.ddp_comm_hooks.{kind}" for kind in ("default", "quantization"))


def takes_group(comm_hook: CommHook | None) -> bool:
    """Tell whether the first argument of a hook is a process group: of those of torch that keep no state."""
    return getattr(comm_hook, "__module__", "").startswith(_TAKE_GROUPS)


class BucketTransport:
    """Adds buckets up over ranks, several at a time, with an all-reduce or with a communication hook.

    Args:
        group: The ranks.
        comm_hook: A communication hook of torch, which takes the mean over the ranks; None for an all-reduce.
        comm_state: Its first argument. Hooks that take the ranks there are given the group, if this is None.
    """

    def __init__(self, group: dist.ProcessGroup, comm_hook: CommHook | None, comm_state: object) -> None:
        # What gradients are to be multiplied by, so that a hook's mean is the sum that is wanted.
        self.factor = 1 if comm_hook is None else dist.get_world_size(group)
        self.is_hook = comm_hook is not None
        self._group = group
        self._comm_hook = comm_hook
        self._comm_state = group if comm_state is None and takes_group(comm_hook) else comm_state
        self.keeps_state = not isinstance(self._comm_state, dist.ProcessGroup | None)
        self._under_way: list[tuple[GradientBucket, Any]] = []

    def send(self, bucket: GradientBucket) -> None:
        """Begin to add a bucket up."""
        if self._comm_hook is None:
            work: Any = dist.all_reduce(bucket.buffer_with_payload(), group=self._group, async_op=True)
        else:
            if bucket.buffer().device.type == "cpu":
                self.wait_for_gradients()  # CPU futures run hooks' callbacks in any order: one bucket at a time
            work = self._comm_hook(self._comm_state, bucket)
        self._under_way.append((bucket, work))

    def wait_for_gradients(self) -> None:
        """Wait for all that was sent, on the device if it has streams."""
        for bucket, work in self._under_way:
            result = work.wait()
            if self._comm_hook is not None:
                reduced = result[0] if isinstance(result, list | tuple) else result
                if reduced.data_ptr() != bucket.buffer().data_ptr():
                    bucket.set_buffer(reduced)
        self._under_way.clear()

    def forget(self) -> None:
        """Let go of what was sent."""
        self._under_way.clear()
