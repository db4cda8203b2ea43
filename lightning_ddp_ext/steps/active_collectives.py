"""Collectives among the active ranks in the uneven phase."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ddp_ext._compat.torch import replaced_collectives
from lightning_ddp_ext._compat.torchmetrics import forget_computed
from lightning_ddp_ext.distributed.exchange import destroy_group, list_ranks, own_group
from lightning_ddp_ext.errors import RankJoinedError

_Handler = Callable[..., Any]
_Group = dist.ProcessGroup
_CPU = torch.device("cpu")


class ActiveRankCollectives:
    """Runs collectives on the active ranks only, although the user's code issues them on a group of all ranks.

    Parts of joined ranks are zeros, or None for objects. A root that has joined gets no result, since it runs no code
    that would use it. In the process group `own`, joined ranks take part themselves.
    """

    def __init__(self, own: dist.ProcessGroup, timeout: timedelta | None = None, device: torch.device = _CPU) -> None:
        self._own = own
        self._timeout = timeout
        self._device = device
        self.group: dist.ProcessGroup | None = None  # of the active ranks, in a block of `redirect` only
        self._active: tuple[int, ...] = ()
        self._group: dist.ProcessGroup | None = None
        self._metrics: list[Metric] = []

    def prepare(self, active: tuple[int, ...], module: nn.Module) -> None:
        """Make the group of the active ranks, in ascending order, for a step. Call on every rank at the same point."""
        self._metrics = [one for one in module.modules() if isinstance(one, Metric) and one.process_group is None]
        for metric in self._metrics:
            forget_computed(metric)
        if active == self._active:
            return
        if self._device.type != "cpu":
            # NCCL destroys one communicator and splits another, whose collectives have to be complete.
            torch.accelerator.synchronize(self._device)
        self.close()  # each group costs connections, and a communicator with memory on a device
        self._group = own_group(self._timeout, active)
        self._active = active

    def close(self) -> None:
        """Destroy the group."""
        if dist.is_initialized() and dist.get_rank() in self._active:
            destroy_group(self._group)
        self._active, self._group = (), None

    @contextmanager
    def redirect(self) -> Iterator[None]:
        """Redirect the collectives of this block, in every thread, and set `group`. Call on an active rank."""
        if self.group is not None:
            yield
            return
        assert self._group is not None
        self.group = self._group
        for metric in self._metrics:
            metric.process_group = self._group
        redirect = ProcessGroupRedirect(self._active, self._group, self._own)
        try:
            with replaced_collectives(redirect.find, redirect.resolve, redirect.refuse_new_groups):
                yield
        finally:
            self.group = None
            for metric in self._metrics:
                metric.process_group = None
                forget_computed(metric)


class ProcessGroupRedirect:
    """Redirects the methods of process groups to the group of active ranks. Ranks are global ranks."""

    _HANDLERS: ClassVar[Mapping[str, str]] = {
        "allreduce": "_all_reduce",
        "allreduce_coalesced": "_all_reduce",
        "barrier": "_all_reduce",
        "monitored_barrier": "_all_reduce",
        "broadcast": "_from_root",
        "scatter": "_scatter",
        "reduce": "_reduce",
        "gather": "_gather",
        "allgather": "_all_gather",
        "reduce_scatter": "_reduce_scatter",
        "alltoall": "_all_to_all",
        "all_gather_single": "_all_gather_single",
        "reduce_scatter_single": "_reduce_scatter_single",
        "alltoall_base": "_all_to_all_single",
        "all_to_all_single": "_all_to_all_single",
        "send": "_message",
        "recv": "_message",
    }

    def __init__(self, active: tuple[int, ...], group: _Group, own: dist.ProcessGroup) -> None:
        self._active = active
        self._group = group
        self._own = {own.group_name, group.group_name}

    def find(self, group: _Group, name: str) -> _Handler | None:
        """Return the replacement of a method, `replacement(original, group, *args, **kwargs)`, or None to keep it."""
        if not self._concerns(group):
            return None
        unknown = partial(self._refuse_unknown, name)
        return cast(_Handler, getattr(self, self._HANDLERS.get(name, ""), unknown))

    def resolve(self, group: _Group) -> dist.ProcessGroup:
        """Return the group on which a functional collective runs."""
        return self._group if self._concerns(group) else group

    def refuse_new_groups(self) -> None:
        """Raise, because all ranks would have to take part in making a process group."""
        raise self._error("a new process group needs every rank")

    def _refuse_unknown(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Raise, because it is unknown which ranks a method needs."""
        raise self._error(f"`ProcessGroup.{name}` is not known to work among some of the ranks")

    def _concerns(self, group: _Group) -> bool:
        if group.group_name in self._own:
            return False
        members = set(dist.get_process_group_ranks(group))
        if members <= set(self._active):
            return False
        if not members >= set(self._active):
            raise self._error(f"a process group of {list_ranks(sorted(members))} has only some of the active ranks")
        return True

    def _error(self, problem: str) -> RankJoinedError:
        joined = sorted(set(range(dist.get_world_size())) - set(self._active))
        have = "has" if len(joined) == 1 else "have"
        return RankJoinedError(
            f"rank {dist.get_rank()}: {problem}, but {list_ranks(joined)} {have} run out of data. Issue it outside of"
            ' the step, where every rank takes part, or train with `uneven_inputs="stop"`.'
        )

    def _positions(self, group: _Group) -> list[int]:
        members = dist.get_process_group_ranks(group)
        return [members.index(rank) for rank in self._active]

    def _root(self, group: _Group, options: Any) -> int:
        return int(dist.get_process_group_ranks(group)[options.rootRank])

    def _all_reduce(self, original: _Handler, group: _Group, *args: Any, **kwargs: Any) -> Any:
        return original(self._group, *args, **kwargs)

    def _from_root(self, original: _Handler, group: _Group, *args: Any) -> Any:
        *tensors, options = args
        root = self._root(group, options)
        if root not in self._active:
            raise self._error(f"this collective sends from rank {root}")
        options.rootRank = self._active.index(root)
        return original(self._group, *tensors, options)

    def _scatter(self, original: _Handler, group: _Group, outputs: Any, inputs: Any, options: Any) -> Any:
        if self._root(group, options) not in self._active:
            # The gradient of an all-gather arrives as a scatter from each rank.
            for output in outputs:
                output.zero_()
            return _Completed()
        positions = self._positions(group)
        chosen = [[parts[position] for position in positions] if parts else parts for parts in inputs]
        return self._from_root(original, group, outputs, chosen, options)

    def _to_root(self, original: _Handler, group: _Group, options: Any, *tensors: Any) -> Any:
        root = self._root(group, options)
        options.rootRank = self._active.index(root) if root in self._active else 0
        return original(self._group, *tensors, options)

    def _reduce(self, original: _Handler, group: _Group, tensors: list[Tensor], options: Any) -> Any:
        if self._root(group, options) not in self._active:
            tensors = [tensor.clone() for tensor in tensors]  # the rank that replaces the root keeps its tensors
        return self._to_root(original, group, options, tensors)

    def _gather(self, original: _Handler, group: _Group, outputs: Any, inputs: Any, options: Any) -> Any:
        if self._root(group, options) not in self._active and self._active[0] == dist.get_rank():
            chosen = [[torch.empty_like(inputs[0]) for _ in self._active]]
        else:
            chosen = [self._active_parts(group, parts) if parts else parts for parts in outputs]
        return self._to_root(original, group, options, chosen, inputs)

    def _active_parts(self, group: _Group, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of the active ranks, and set the other parts to zero."""
        positions = self._positions(group)
        for position, part in enumerate(parts):
            if position not in positions:
                part.zero_()
        return [parts[position] for position in positions]

    def _all_gather(self, original: _Handler, group: _Group, outputs: Any, inputs: Any, *rest: Any) -> Any:
        return original(self._group, [self._active_parts(group, parts) for parts in outputs], inputs, *rest)

    def _reduce_scatter(self, original: _Handler, group: _Group, outputs: Any, inputs: Any, *rest: Any) -> Any:
        positions = self._positions(group)
        return original(self._group, outputs, [[parts[position] for position in positions] for parts in inputs], *rest)

    def _all_to_all(self, original: _Handler, group: _Group, outputs: Any, inputs: Any, *rest: Any) -> Any:
        positions = self._positions(group)
        chosen = [inputs[position] for position in positions]
        return original(self._group, self._active_parts(group, outputs), chosen, *rest)

    def _all_gather_single(self, original: _Handler, group: _Group, output: Tensor, given: Tensor, *rest: Any) -> Any:
        parts = self._active_parts(group, output.view(-1).chunk(group.size()))
        return self._group.allgather([parts], [given.reshape(-1)], *rest)

    def _reduce_scatter_single(
        self, original: _Handler, group: _Group, output: Tensor, given: Tensor, *rest: Any
    ) -> Any:
        parts = given.reshape(-1).chunk(group.size())
        chosen = torch.cat([parts[position] for position in self._positions(group)])
        work = original(self._group, output.view(-1), chosen, *rest)
        work.wait()
        return work

    def _all_to_all_single(
        self,
        original: _Handler,
        group: _Group,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        *rest: Any,
    ) -> Any:
        positions = self._positions(group)
        outputs = self._active_parts(group, torch.split(output, list(output_sizes) or len(output) // group.size()))
        inputs = torch.split(given, list(input_sizes) or len(given) // group.size())
        chosen = [inputs[position] for position in positions]
        received = torch.cat([torch.empty_like(part) for part in outputs])
        sizes = [len(part) for part in outputs], [len(part) for part in chosen]
        work = original(self._group, received, torch.cat(chosen), *sizes, *rest)
        work.wait()
        for part, value in zip(outputs, torch.split(received, sizes[0]), strict=True):
            part.copy_(value)
        return work

    def _message(self, original: _Handler, group: _Group, tensors: Any, peer: int, *rest: Any) -> Any:
        rank = dist.get_process_group_ranks(group)[peer]
        if rank not in self._active:
            raise self._error(f"a message to or from rank {rank} cannot arrive")
        return original(group, tensors, peer, *rest)


class _Completed:
    """The work of a collective that need not run."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
