"""`all_gather` of tensors whose first dimension differs between ranks, under the Trainer and under Fabric."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import convert_to_tensors
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor

from lightning_ddp_ext.batches.containers import walk
from lightning_ddp_ext.distributed.exchange import gather_different, list_ranks
from lightning_ddp_ext.errors import RanksOutOfStepError

_NO_ROWS = [0]  # shape of `torch.empty(0)` and `torch.tensor([])`, which stand for no rows of any shape and dtype
_SHOWN = 3  # tensors of a rank, in a message
_WARNINGS = WarningCache()


class GatherMixin:
    """Mixin before Lightning's strategy that gathers tensors of different sizes, all tensors of a container at once."""

    cpu_group: dist.ProcessGroup | None = None  # of all ranks, for CPU tensors if the default group has no backend

    def sizes_group(self) -> dist.ProcessGroup | None:
        """Return a group of the ranks that gather in the default group, in which the host need not wait for devices."""
        return None if "cpu" in dist.get_backend_config() else self.cpu_group

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False, is_left_out: bool = False) -> Any:
        """Gather a tensor, or the tensors of a container; the result lacks those of a rank that is left out.

        Results have the shape (ranks, ...), as under Lightning, or (1, rows of all ranks, ...) if ranks have different
        numbers of rows. Raise `RanksOutOfStepError` on all ranks if anything else differs.
        """
        tensors: list[Tensor] = []
        apply_to_collection(tensor, Tensor, tensors.append)
        keys = [str(key) for part in walk(tensor) if isinstance(part, Mapping) for key in part]
        own = [keys, [[str(one.dtype)[6:], one.device.type, *one.shape] for one in tensors]]
        sizes_group = self.sizes_group() if group in (None, dist.group.WORLD) else group
        # One message for all tensors, before the first is sent: gloo aborts a process that receives other sizes than it
        # expects, and a rank that has fewer tensors than another would leave it waiting.
        of_ranks = gather_different(None if is_left_out else own, sizes_group)
        present = dist.get_process_group_ranks(sizes_group)

        def stack(one: Tensor) -> Tensor:
            rows: Tensor = super(GatherMixin, self).all_gather(one, group, sync_grads)  # type: ignore[misc]
            # Not by a list of indices, which the host would copy to the device.
            return rows if len(rows) == len(present) else torch.stack([rows[rank] for rank in present])

        given = [] if is_left_out else tensors
        of_tensors = map(stack, given) if len(of_ranks) == 1 else _gather(given, of_ranks, stack, sync_grads, present)
        gathered = iter([*of_tensors])
        return apply_to_collection(tensor, Tensor, lambda _: next(gathered))


def _gather(
    tensors: Sequence[Tensor],
    of_ranks: Sequence[Any],
    stack: Callable[[Tensor], Tensor],
    sync_grads: bool,
    members: Sequence[int],
) -> Iterator[Tensor]:
    """Yield the tensors of the ranks that have a description, a list of keys and one of types with shapes."""
    rows = {rank: row for rank, row in enumerate(of_ranks) if row}
    columns = [*zip_longest(*(forms for _, forms in rows.values()))]
    common = [_common_form(column) for column in columns]
    if None in common or len({str(names) for names, _ in rows.values()}) > 1:
        # The first tensor that differs, unless a rank has fewer.
        first = next((n for n, column in enumerate(columns) if common[n] is None and None not in column), 0)
        texts: dict[str, list[int]] = {}
        for rank, (names, forms) in rows.items():
            shown = [f"{tuple(shape)} of {name} on {device}" for name, device, *shape in forms[first : first + _SHOWN]]
            texts.setdefault(", ".join([*names, *shown]) or "none", []).append(members[rank])
        got = "; ".join(f"{text} on {list_ranks(ranks)}" for text, ranks in texts.items())
        raise RanksOutOfStepError(
            f"rank {dist.get_rank()}: `all_gather` needs equally many tensors on every rank, under the"
            f" same keys, that differ in the first dimension only, got {got}. Concatenate the tensors of a list, and"
            " pad other dimensions, before you gather."
        )
    tensors = tensors or [torch.empty(0)] * len(columns)  # a rank that is left out takes part without rows
    for tensor, (name, device, *shape), column in zip(tensors, common, columns, strict=True):
        if [*tensor.shape] == _NO_ROWS:
            # With a gradient, since the backward pass of other ranks waits for the one of this rank.
            dtype, size = getattr(torch, name), [0, *shape[1:]][: len(shape)]
            needs_gradient = sync_grads and dtype.is_floating_point
            tensor = torch.zeros(size, dtype=dtype, device=device, requires_grad=needs_gradient)
        sizes = [form[2] for form in column] if shape else []
        if shape and len(tensor) < max(sizes):
            tensor = torch.cat([tensor, tensor.new_zeros(max(sizes) - len(tensor), *shape[1:])])
        stacked = stack(tensor)
        parts = [stacked[rank][:size] if shape else stacked[rank] for rank, size in zip_longest(rows, sizes)]
        if len({*sizes}) > 1:
            _WARNINGS.warn(
                "`all_gather` got different numbers of rows from the ranks, which cannot be stacked. It returns one row"
                " with the rows of all ranks, in their order: `mean()`, `flatten(0, 1)` and `torch.cat` give the value"
                " of one process, but indices of the first dimension are not ranks."
            )
        yield torch.stack(parts) if len({*sizes}) < 2 else torch.cat(parts)[None]


def _common_form(forms: Sequence[Any]) -> Any:
    """Return the form of tensors with rows; None if they differ in more than the first dimension, or one is missing."""
    filled = [form for form in forms if form and form[2:] != _NO_ROWS] or forms
    kinds = {form and (*form[:2], len(form), *form[3:]) for form in filled}
    has_missing = None in forms or (len(filled[0]) == 2 and len(filled) < len(forms))
    return None if has_missing or len(kinds) > 1 else filled[0]


def gather_at_once(owner: Any, strategy_of: Callable[[Any], Any]) -> None:
    """Have `all_gather` of a class of Lightning pass whole containers to a `GatherMixin`, not one tensor at a time."""
    original = owner.all_gather

    @functools.wraps(original)
    def all_gather(self: Any, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if not (isinstance(strategy_of(self), GatherMixin) and dist.is_initialized()):
            return original(self, data, group, sync_grads)
        return strategy_of(self).all_gather(convert_to_tensors(data, device=self.device), group, sync_grads)

    owner.all_gather = all_gather
