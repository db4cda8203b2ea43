"""`all_gather` of tensors whose first dimension differs between ranks, under the Trainer and under Fabric."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor

from lightning_ddp_ext._lightning import Fabric, LightningModule, convert_to_tensors
from lightning_ddp_ext.batches.containers import walk
from lightning_ddp_ext.distributed.exchange import gather_different
from lightning_ddp_ext.errors import RanksOutOfStepError

_NO_ROWS = [0]  # shape of `torch.empty(0)` and `torch.tensor([])`, which stand for no rows of any shape and dtype
_WARNINGS = WarningCache()


class GatherMixin:
    """Mixin before Lightning's strategy that gathers tensors of different sizes, all tensors of a container at once."""

    cpu_group: dist.ProcessGroup | None = None  # of all ranks, for CPU tensors if the default group has no backend

    def sizes_group(self) -> dist.ProcessGroup | None:
        """Return a group of the ranks that gather in the default group, in which the host need not wait for devices."""
        return None if "cpu" in dist.get_backend_config() else self.cpu_group

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False, is_left_out: bool = False) -> Any:
        """Gather a tensor, or the tensors of a container.

        A rank without data under Fabric's `ddp_join` is left out: it takes part without rows. Results have the shape
        (ranks, ...), as under Lightning, or (1, rows of all ranks, ...) if ranks have different numbers of rows. Raise
        `RanksOutOfStepError` on all ranks if anything else differs.
        """
        tensors: list[Tensor] = []
        apply_to_collection(tensor, Tensor, tensors.append)
        keys = ", ".join(str(key) for part in walk(tensor) if isinstance(part, Mapping) for key in part)
        own = [[keys, str(one.dtype).removeprefix("torch."), one.device.type, *one.shape] for one in tensors]
        sizes_group = self.sizes_group() if group in (None, dist.group.WORLD) else group
        # One message for all tensors, before the first is sent: gloo aborts a process that receives other sizes than it
        # expects, and a rank that has fewer tensors than another would leave it waiting.
        of_ranks = gather_different(None if is_left_out else own, sizes_group)
        present = dist.get_process_group_ranks(sizes_group or dist.group.WORLD)  # torch 2.6 knows no None

        def stack(one: Tensor) -> Tensor:
            rows: Tensor = super(GatherMixin, self).all_gather(one, group, sync_grads)  # type: ignore[misc]
            # Not by a list of indices, which the host would copy to the device.
            return rows if len(rows) == len(present) else torch.stack([rows[rank] for rank in present])

        given = [] if is_left_out else tensors
        gathered = iter([*(map(stack, given) if len(of_ranks) == 1 else _gather(given, of_ranks, stack, present))])
        return apply_to_collection(tensor, Tensor, lambda _: next(gathered))


def _gather(
    tensors: Sequence[Tensor], of_ranks: Sequence[Any], stack: Callable[[Tensor], Tensor], members: Sequence[int]
) -> Iterator[Tensor]:
    """Yield the tensors of the ranks that have sent the keys, type and shape of each tensor."""
    rows = {index: row for index, row in enumerate(of_ranks) if row is not None}
    for number, column in enumerate(zip_longest(*rows.values())):
        filled = [form for form in column if form and form[3:] != _NO_ROWS] or column
        kinds = {form and (*form[:3], len(form), *form[4:]) for form in filled}
        _, name, device, *shape = filled[0] or [None] * 3
        if None in column or len(kinds) > 1 or (not shape and len(filled) < len(column)):
            forms = (form and (*form[:3], tuple(form[3:])) for form in column)
            got = "; ".join(f"{form} on rank {members[index]}" for index, form in zip(rows, forms, strict=True))
            raise RanksOutOfStepError(
                f"rank {dist.get_rank()}: `all_gather` needs equally many tensors on every rank, under the same keys,"
                f" that differ in the first dimension only, got {got}. Concatenate the tensors of a list, and pad other"
                " dimensions, before you gather."
            )
        tensor = tensors[number] if tensors else torch.empty(0)  # a rank that is left out takes part without rows
        if [*tensor.shape] == _NO_ROWS:
            dtype, size = getattr(torch, name), [0, *shape[1:]][: len(shape)]
            # With a gradient, since the backward pass of other ranks waits for the one of this rank.
            tensor = torch.zeros(size, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)
        sizes = [form[3] for form in column] if shape else []
        if shape and len(tensor) < max(sizes):
            tensor = torch.cat([tensor, tensor.new_zeros(max(sizes) - len(tensor), *shape[1:])])
        stacked = stack(tensor)
        parts = [stacked[index][:size] if shape else stacked[index] for index, size in zip_longest(rows, sizes)]
        if len({*sizes}) > 1:
            _WARNINGS.warn(
                "`all_gather` got different numbers of rows from the ranks, and returns one row with the rows of all"
                " ranks, in their order. `mean()`, `flatten(0, 1)` and `torch.cat` give the value of one process, but"
                " indices of the first dimension are not ranks."
            )
        yield torch.stack(parts) if len({*sizes}) < 2 else torch.cat(parts)[None]


def _at_once(original: Any) -> Any:
    """Return an `all_gather` for a class of Lightning that passes containers to a `GatherMixin` as a whole."""

    @functools.wraps(original)
    def all_gather(self: Any, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        strategy = getattr(self, "trainer", self).strategy
        if not (isinstance(strategy, GatherMixin) and dist.is_initialized()):
            return original(self, data, group, sync_grads)
        return strategy.all_gather(convert_to_tensors(data, device=self.device), group, sync_grads)

    return all_gather


for owner in (Fabric, LightningModule):
    owner.all_gather = _at_once(owner.all_gather)  # type: ignore[method-assign]
