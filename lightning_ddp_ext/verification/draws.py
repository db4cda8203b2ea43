"""Random numbers of torch in a step: a part of a batch gets the ones that the whole batch has for its samples."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext._compat.torch import OperationMode

_MIXED = re.compile("dropout|attention|perm")  # operations whose results are not random numbers of single samples
Drawn = tuple[str, Tensor]
"""Name of an operation, and its random numbers."""


class Draws(OperationMode):  # type: ignore[misc]
    """Notes the random numbers of a block, and replaces the ones of a part of a batch.

    Args:
        whole: What the whole batch has drawn; None in the block of the whole batch.
        begin: Where the part begins, as a fraction of the whole batch.
        end: Where the part ends.

    Attributes:
        taken: The draws, in order.
    """

    def __init__(self, whole: Sequence[Drawn] | None = None, begin: float = 0.0, end: float = 1.0) -> None:
        super().__init__()
        self._whole, self._begin, self._end = whole, begin, end
        self.taken: list[Drawn] = []
        self._differs = False

    @property
    def is_matched(self) -> bool:
        """Whether the block has drawn what the whole batch has."""
        return self._whole is None or (not self._differs and len(self.taken) == len(self._whole))

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.note(func, output)
        return output

    def note(self, func: Any, output: Any) -> None:
        """Note, and maybe replace, what an operation has drawn, if it draws."""
        drawn = output[0] if isinstance(output, tuple) and output else output
        name, place = func.name(), len(self.taken)
        if torch.Tag.nondeterministic_seeded not in func.tags or _MIXED.search(name) or not isinstance(drawn, Tensor):
            return
        if self._whole is not None:
            same_name, whole = self._whole[place] if place < len(self._whole) else ("", drawn)
            rows = self._rows(whole, drawn) if name == same_name else None
            if rows is None:
                self._differs = True
            else:
                drawn.copy_(rows)
        self.taken.append((name, drawn.clone()))

    def _rows(self, whole: Tensor, drawn: Tensor) -> Tensor | None:
        """Return the numbers of the part; along other dimensions, it may have less padding than the whole batch."""
        is_cut, is_same = False, whole.shape == drawn.shape
        if whole.dim() != drawn.dim():
            return None
        for dim, (size, own) in enumerate(zip(whole.shape, drawn.shape, strict=True)):
            begin, end = round(size * self._begin), round(size * self._end)
            if own != size and own == end - begin and not is_cut:
                whole, is_cut = whole.narrow(dim, begin, own), True
            elif own <= size:
                whole = whole.narrow(dim, 0, own)
            else:
                return None
        return whole if is_cut or is_same else None
