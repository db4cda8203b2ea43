"""Attributes in which a step keeps what it has seen, for the next step."""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import STRUCTURE
from lightning_ddp_ext.consistency import value_to_text
from lightning_ddp_ext.errors import ImpossibleError
from lightning_ddp_ext.verification.gradient_fit import GradientFit
from lightning_ddp_ext.verification.operations import Line, is_own_file
from lightning_ddp_ext.verification.replay import ReplayedStep

_Place = tuple[str, str]  # name of a module, and of its attribute
_MISSING = object()


def find_states(
    run: Callable[..., ReplayedStep], whole: ReplayedStep, part: ReplayedStep, tolerance: float
) -> list[tuple[str, Line | None]]:
    """Return the attributes that depend on the batch and change the gradient of the next step, and who sets them.

    `run` runs the step on the whole batch again, on a module that `prepare` changes before.
    """
    after, of_part = _attributes(whole.module), _attributes(part.module)
    changed = [place for place, value in after.items() if _text(value) != _text(of_part.get(place))]
    if not changed:
        return []

    def run_after(places: Sequence[_Place]) -> ReplayedStep:
        def prepare(module: nn.Module) -> None:
            for place in places:
                _set(module, place, after[place])

        return run(prepare=prepare)

    found = []
    try:
        following = run_after(changed).gradients
        for place in changed:
            without = run_after([one for one in changed if one != place]).gradients
            if GradientFit(following, [without]).difference([1.0]) > tolerance:
                found.append((".".join(filter(None, place)), _find_setter(run, place)))
    except ImpossibleError:  # a step that cannot run again
        return []
    return found


def _attributes(module: nn.Module) -> dict[_Place, Any]:
    return {
        (name, key): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in STRUCTURE
    }


def _text(value: Any) -> str:
    return value_to_text([*value] if isinstance(value, deque) else value)


def _set(module: nn.Module, place: _Place, value: Any) -> None:
    """Set an attribute to a copy of a value."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
    elif isinstance(value, list | dict | set | deque):
        value = value.copy()
    setattr(module.get_submodule(place[0]), place[1], value)


def _find_setter(run: Callable[..., ReplayedStep], place: _Place) -> Line | None:
    """Return the first line after which an attribute has another value."""
    lines: list[Line] = []  # that have run before the change
    state: dict[str, Any] = {}

    def text() -> str:
        return _text(vars(state["module"]).get(place[1], _MISSING))

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if "changed" in state or not is_own_file(frame.f_code.co_filename):
            return None
        if text() != state["before"]:
            state["changed"] = True
        else:
            lines[:] = [Line(frame.f_code.co_filename, frame.f_lineno)]
        return trace

    def prepare(module: nn.Module) -> None:
        state["module"] = module.get_submodule(place[0])
        state["before"] = text()
        sys.settrace(trace)

    try:
        run(prepare=prepare)
    finally:
        sys.settrace(None)
    return lines[0] if "changed" in state and lines else None
