"""The operations of a training step in order, with their results and the line of the program that asked for each."""

import functools
import inspect
import linecache
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext._compat.torch import OperationMode
from lightning_ddp_ext.batches.containers import walk

GROUPS = ("c10d::", "_c10d_functional::")  # of the names of collectives
_LIBRARIES = (
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "lightning_utilities",
    __package__.split(".")[0],
)  # fmt: skip
FORKING = str(Path(__file__).with_name("processes.py"))  # the program that calls `verify` is not a part of the step
_INSTALLED = "-packages"
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
_MIXED = re.compile("dropout|attention|perm")  # operations whose results are not random numbers of single samples
Drawn = tuple[str, Tensor]
"""Name of an operation of torch, and its random numbers."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a program, and the one in the user's own files that has called it, if it is installed code."""

    file: str
    number: int
    caller: "Line | None" = field(default=None, compare=False)

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        text = f"{shown}:{self.number}  {linecache.getline(self.file, self.number).strip()}"
        return f"{text}\ncalled by {self.caller}" if self.caller else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation of torch, and copies of its results."""

    name: str  # such as `mm`, or `c10d::allreduce_`, which communicates
    lines: tuple[Line, ...]  # outside of the libraries, the innermost first
    is_backward: bool
    results: tuple[Tensor, ...]
    sources: frozenset[int]  # positions of the earlier operations that it reads
    is_of_batch: bool  # it depends on the batch
    is_computed: bool  # its results are no views, and not left uninitialised

    @property
    def line(self) -> Line | None:
        """The innermost line."""
        return next(iter(self.lines), None)


class Draws(OperationMode):  # type: ignore[misc]
    """Notes the random numbers of a block in `taken`, and gives a part of a batch the numbers of the `whole` batch.

    The part is between the fractions `begin` and `end` of the whole batch.
    """

    def __init__(self, whole: Sequence[Drawn] | None = None, begin: float = 0.0, end: float = 1.0) -> None:
        super().__init__()
        self._whole, self._begin, self._end = whole, begin, end
        self.taken: list[Drawn] = []
        self.permutes = False  # a random order was drawn, which parts of a batch cannot repeat
        self._differs = False

    @property
    def is_matched(self) -> bool:
        """Whether the block has drawn what the whole batch has."""
        return self._whole is None or (not self._differs and len(self.taken) == len(self._whole))

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        drawn = output[0] if isinstance(output, tuple) and output else output
        name, place = func.name(), len(self.taken)
        self.permutes |= "randperm" in name
        if torch.Tag.nondeterministic_seeded not in func.tags or _MIXED.search(name) or not isinstance(drawn, Tensor):
            return output
        if self._whole is not None:
            same_name, whole = self._whole[place] if place < len(self._whole) else ("", drawn)
            rows = self._rows(whole, drawn) if name == same_name else None
            if rows is None:
                self._differs = True
            else:
                drawn.copy_(rows)
        self.taken.append((name, drawn.clone()))
        return output

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


class Recording(Draws):
    """Records the operations of a block, which reads the tensors of a batch; `options` as for `Draws`."""

    def __init__(self, batch: Any, **options: Any) -> None:
        super().__init__(**options)
        self.operations: list[Operation] = []
        self.is_backward = False  # what runs now
        self._batch = {*map(id, _tensors(batch))}
        self._writer: dict[int, int] = {}  # the operation that made a tensor, by its `id`
        self._changes: dict[int, list[int]] = defaultdict(list)  # in-place operations on a storage
        self._kept: list[Tensor] = []  # so that no `id` is used twice

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = _tensors([args, kwargs or {}])
        output = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.name().removeprefix("aten::").partition(".")[0]
        results, place = _tensors(output), len(self.operations)
        sources = {self._writer[id(one)] for one in read if id(one) in self._writer}
        for one in read:
            sources.update(self._changes.get(_storage(one), ()))
        earlier = [self.operations[i] for i in sources]
        in_place = name.endswith("_") and bool(read)
        is_view = not in_place and {*map(_storage, read)} >= {*map(_storage, results)}
        self.operations.append(
            Operation(
                name=name,
                lines=find_lines(),
                is_backward=self.is_backward,
                results=tuple(one.detach().clone() for one in results),
                sources=frozenset(sources),
                is_of_batch=not self._batch  # in objects of an unknown class
                or any(id(one) in self._batch for one in read)
                or any(one.is_of_batch for one in earlier),
                is_computed=not (is_view or "empty" in name),
            )
        )
        for one in results:
            self._writer[id(one)] = place
        for one in _tensors(args[:1]) if in_place else []:  # as the results of collectives
            self._changes[_storage(one)].append(place)
        self._kept += [*read, *results]
        return output

    def leading_to(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the positions of the operations that lead to any of these tensors."""
        found: set[int] = set()
        open_ = [self._writer[id(tensor)] for tensor in tensors if id(tensor) in self._writer]
        while open_:
            one = open_.pop()
            if one not in found:
                found.add(one)
                open_ += self.operations[one].sources
        return found


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in walk(value) if isinstance(one, Tensor)]


def _storage(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor, which its views share."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def find_lines() -> tuple[Line, ...]:
    """Return the lines of the step that belong to no library of `_LIBRARIES`, the innermost first."""
    found, frame = [], inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != FORKING:
        if is_own_file(frame.f_code.co_filename):
            found.append(Line(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    if found and _INSTALLED in found[0].file:
        found[0] = replace(found[0], caller=next((one for one in found if _INSTALLED not in one.file), None))
    return tuple(found)


@functools.cache
def is_own_file(file: str) -> bool:
    """Return True if a source file belongs neither to Python nor to a library of `_LIBRARIES`."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    if any(file.startswith(os.path.dirname(one) + os.sep) for one in files if one):
        return False
    return (not file.startswith(_STANDARD_LIBRARY) or _INSTALLED in file) and Path(file).exists()
