"""The tensors that make up the state of a training, by names that people recognise."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_ext.consistency.setups import find_ignored


def name_training_state(
    module: nn.Module, optimizers: Sequence[Optimizer] = (), *, buffers: bool = True, ignore: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Return parameters, buffers, the state of optimizers and their settings, such as learning rates.

    Args:
        module: The module whose parameters and buffers count.
        optimizers: The optimizers. Their state is named after the module's parameters.
        buffers: Whether buffers count.
        ignore: Names of parameters and buffers, as the module names them, to leave out; `*` stands for any characters.
            Those that belong to a rank alone are left out in any case, see `find_ignored`.

    Returns:
        The tensors, not copied. Numbers are tensors of their own, int64 or float64.
    """
    ignored = find_ignored(module)

    def counts(name: str) -> bool:
        return name not in ignored and not any(fnmatchcase(name, pattern) for pattern in ignore)

    state: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if counts(name):
            state[f"parameter `{name}`"] = parameter
    if buffers:
        for name, buffer in module.named_buffers():
            if counts(name):
                state[f"buffer `{name}`"] = buffer
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for path, owner, value in _entries_of(optimizer, names):
            if owner is None or counts(owner):
                state[f"{path} in optimizer {number}"] = value
    return state


def _entries_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, str | None, Tensor]]:
    """Name the entries of an optimizer, with the parameter each belongs to."""
    for number, group in enumerate(optimizer.param_groups):
        for key, value in _flatten({key: value for key, value in group.items() if key != "params"}):
            yield f"`{key}` of group {number}", None, value
        for position, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"parameter {position} of group {number}")
            # `state` is a defaultdict: asking it would add an entry.
            for key, value in _flatten(optimizer.state.get(parameter, {})):
                yield f"`{key}` of `{name}`", name, value


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Find the tensors and numbers in nested containers; anything else has no bits that could be compared."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Number):
        precise = torch.complex128 if isinstance(value, complex) else torch.float64
        yield path, torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else precise)
    elif isinstance(value, Mapping):
        # Sorted: a state that was loaded may have its keys in another order.
        for key in sorted(value, key=str):
            yield from _flatten(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for position, entry in enumerate(value):
            yield from _flatten(entry, f"{path}[{position}]")
