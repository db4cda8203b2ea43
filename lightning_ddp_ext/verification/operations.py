"""The operations of a training step in order, with their results and the line of the program that asked for each."""

import functools
import inspect
import linecache
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from typing_extensions import override

from lightning_ddp_ext._compat.torch import OperationMode
from lightning_ddp_ext.verification.draws import Draws

GROUPS = ("c10d::", "_c10d_functional::")  # of the names of collectives
_LIBRARIES = (
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "torchmetrics",
    "lightning_utilities",
    __package__.split(".")[0],
)
FORKING = str(Path(__file__).with_name("processes.py"))  # the program that calls `verify` is not a part of the step
_INSTALLED = "-packages"
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a program, and the one in the user's own files that has called it, if it is installed code."""

    file: str
    number: int
    caller: "Line | None" = field(default=None, compare=False)

    @property
    def text(self) -> str:
        """The line itself."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        path = Path(self.file)
        return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{self.number}"


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of torch, and copies of its results.

    Attributes:
        name: Name of the operation, such as `mm`, or `c10d::allreduce_`, which communicates.
        lines: Lines outside of torch, Lightning and torchmetrics that have called it, the innermost first.
        module: Name and class of the innermost module whose forward pass is running.
        is_backward: Whether it ran in the backward pass.
        results: Its results, without gradients.
        sources: Positions of the earlier operations that it reads.
        is_of_batch: Whether it depends on the batch.
        is_computed: Whether it computes its results: they are no views, and not left uninitialised.
        is_outside: Whether it reads a tensor of unknown origin, or a view of one, such as numbers that numpy has drawn.
    """

    name: str
    lines: tuple[Line, ...]
    module: str
    is_backward: bool
    results: tuple[Tensor, ...]
    sources: frozenset[int]
    is_of_batch: bool
    is_computed: bool
    is_outside: bool

    @property
    def line(self) -> Line | None:
        """The innermost line."""
        return next(iter(self.lines), None)

    @property
    def communicates(self) -> bool:
        """Whether it is a collective."""
        return self.name.startswith(GROUPS)


class Recording(OperationMode):  # type: ignore[misc]
    """Records the operations of a block.

    Args:
        module: The module that runs, for the names of its modules.
        batch: Tensors of the batch.
        draws: Replaces random numbers.
    """

    def __init__(self, module: nn.Module, batch: Iterable[Tensor], draws: Draws | None = None) -> None:
        super().__init__()
        self.draws = draws or Draws()
        self.operations: list[Operation] = []
        self._is_backward = False
        self._batch = {id(tensor) for tensor in batch}
        self._names = {id(part): f"{name} ({type(part).__name__})" for name, part in module.named_modules() if name}
        self._running: list[str] = []
        self._writer: dict[int, int] = {}  # the operation that made a tensor, by its `id`
        self._changes: dict[int, list[int]] = defaultdict(list)  # in-place operations on a storage
        self._kept: list[Tensor] = []  # so that no `id` is used twice
        self._known = self._batch | {id(one) for one in (*module.parameters(), *module.buffers())}

    @override
    def __enter__(self) -> "Recording":
        before = register_module_forward_pre_hook(self._enter_module)
        after = register_module_forward_hook(self._leave_module, always_call=True)
        self._hooks = before, after
        super().__enter__()
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward pass in a block."""
        self._is_backward = True
        try:
            yield
        finally:
            self._is_backward = False

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        self._running.append(self._names.get(id(module), ""))

    def _leave_module(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._running.pop()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = list(_tensors([args, kwargs or {}]))
        output = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        results = list(_tensors(output))
        self.draws.note(func, output)
        place = len(self.operations)
        sources = {self._writer[id(one)] for one in read if id(one) in self._writer}
        for one in read:
            sources.update(self._changes.get(_storage(one), ()))
        is_of_batch = (
            not self._batch  # in objects of an unknown class
            or any(id(one) in self._batch for one in read)
            or any(self.operations[i].is_of_batch for i in sources)
        )
        in_place = name.endswith("_") and bool(read)
        is_view = not in_place and {*map(_storage, read)} >= {*map(_storage, results)}
        is_computed = not (is_view or "empty" in name)
        module = next(filter(None, reversed(self._running)), "")
        is_outside = any(
            id(one) not in self._writer and id(one) not in self._known and one.numel() > 1 for one in read
        ) or any(self.operations[i].is_outside and not self.operations[i].is_computed for i in sources)
        copies = tuple(one.detach().clone() for one in results)
        where = find_lines(), module, self._is_backward
        self.operations.append(
            Operation(name, *where, copies, frozenset(sources), is_of_batch, is_computed, is_outside)
        )
        for one in results:
            self._writer[id(one)] = place
        for one in _tensors([*args[:1]] if in_place else []):  # as the results of collectives
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])


def _storage(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor, which its views share."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def find_lines() -> tuple[Line, ...]:
    """Return the lines of the step that belong to no library of `_LIBRARIES`, the innermost first."""
    found, frame = [], inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == FORKING:
            break
        if is_own_file(code.co_filename):
            found.append(Line(code.co_filename, frame.f_lineno))
        frame = frame.f_back
    if found and _INSTALLED in found[0].file:
        found[0] = replace(found[0], caller=next((one for one in found if _INSTALLED not in one.file), None))
    return tuple(found)


@functools.cache
def is_own_file(file: str) -> bool:
    """Return True if a source file belongs neither to Python nor to a library of `_LIBRARIES`."""
    is_library = any(file.startswith(folder) for folder in _folders())
    return not is_library and (not file.startswith(_STANDARD_LIBRARY) or _INSTALLED in file) and Path(file).exists()


@functools.cache
def _folders() -> tuple[str, ...]:
    """Return the folders of the libraries that are imported."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return tuple(os.path.dirname(file) + os.sep for file in files if file)
