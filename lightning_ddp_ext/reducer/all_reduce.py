"""All-reduce of gradients: buckets, directly or by a communication hook, and the rows of sparse gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext.distributed.backends import runs_on_streams
from lightning_ddp_ext.distributed.exchange import gather_integer
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


class SparseGradients:
    """Adds up the gradients of sparse embeddings by gathering their rows, which every backend can do."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        weights = {
            part.weight for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        }
        self.members = frozenset(member for member, parameter in enumerate(parameters) if parameter in weights)
        self._parameters = parameters
        self._group = group

    def reduce(self, used: Sequence[float], factor: float) -> None:
        """Set the gradients that any rank has used to the sum of the ranks; the factor is for this rank's gradients."""
        for member in sorted(self.members):
            if used[member]:
                self._reduce(self._parameters[member], factor)

    def _reduce(self, parameter: nn.Parameter, factor: float) -> None:
        gradient = parameter.grad
        if gradient is None or not factor:
            gradient = torch.sparse_coo_tensor(
                torch.zeros(1, 0, dtype=torch.long, device=parameter.device),
                parameter.detach()[:0],
                parameter.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        dense = gradient.layout == torch.strided
        gradient = gradient.detach() * factor if dense else gradient.detach().coalesce() * factor
        sizes = gather_integer(-1 if dense else gradient.indices().shape[1], self._group)  # a message on the CPU
        if min(sizes) < 0:
            # A dense gradient somewhere, of a layer tied to the embedding: the sum is dense.
            parameter.grad = gradient.to_dense()
            dist.all_reduce(parameter.grad, group=self._group)
            return
        if not max(sizes):
            parameter.grad = gradient
            return
        rows = self._gather_rows(gradient.indices().t(), sizes)
        values = self._gather_rows(gradient.values(), sizes)
        parameter.grad = torch.sparse_coo_tensor(rows.t(), values, parameter.shape, check_invariants=False).coalesce()

    def _gather_rows(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: len(part)] = part
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self._group)
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])
