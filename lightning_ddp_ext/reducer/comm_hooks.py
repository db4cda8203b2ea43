"""All-reduce of gradient buckets, directly or by a communication hook."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.distributed.backends import runs_on_streams
from lightning_ddp_ext.reducer.buckets import GradientBucket

CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]

_TAKE_GROUPS = tuple(f"torch.distributed.algorithms.ddp_comm_hooks.{kind}" for kind in ("default", "quantization"))


def takes_group(comm_hook: CommHook | None) -> bool:
    """Return True if the first argument of a hook is a process group, as of torch's stateless hooks."""
    return getattr(comm_hook, "__module__", "").startswith(_TAKE_GROUPS)


class BucketTransport:
    """Adds up buckets over ranks, several at a time, with an all-reduce or a communication hook."""

    def __init__(self, group: dist.ProcessGroup, comm_hook: CommHook | None, comm_state: object) -> None:
        # A hook returns the mean over the ranks; this factor on the gradients makes it their sum.
        self.factor = 1 if comm_hook is None else dist.get_world_size(group)
        self.is_hook = comm_hook is not None
        self._group = group
        self._comm_hook = comm_hook
        self._comm_state = group if comm_state is None and takes_group(comm_hook) else comm_state
        self.keeps_state = not isinstance(self._comm_state, dist.ProcessGroup | None)
        self._in_flight: list[tuple[GradientBucket, Any]] = []

    def send(self, bucket: GradientBucket) -> None:
        """Start to reduce a bucket."""
        if self._comm_hook is None:
            work: Any = dist.all_reduce(bucket.buffer_with_payload(), group=self._group, async_op=True)
        else:
            if not runs_on_streams(dist.get_backend_config(self._group), bucket.buffer().device.type):
                self.wait_for_gradients()  # threads of gloo run hooks' callbacks in any order: one bucket at a time
            work = self._comm_hook(self._comm_state, bucket)
        self._in_flight.append((bucket, work))

    def wait_for_gradients(self) -> None:
        """Wait for all buckets in flight, on the device if it has streams."""
        for bucket, work in self._in_flight:
            result = work.wait()
            if self._comm_hook is not None:
                reduced = result[0] if isinstance(result, list | tuple) else result
                if reduced.data_ptr() != bucket.buffer().data_ptr():
                    bucket.set_buffer(reduced)
        self._in_flight.clear()

    def forget(self) -> None:
        """Drop the buckets in flight, after an error."""
        self._in_flight.clear()
