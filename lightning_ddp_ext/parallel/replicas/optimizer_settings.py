"""Settings of optimizers, which all replicas share: a change inside a step is made once per replica."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_ext.errors import UnsupportedFeatureError


class OptimizerSettings:
    """The settings of optimizers before a step, such as learning rates.

    Args:
        optimizers: The optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._before = [(optimizer, _read(optimizer)) for optimizer in optimizers]

    def check_unchanged(self, step: str) -> None:
        """Refuse a step that has changed a setting, or added or removed parameters.

        Args:
            step: Name of the step.

        Raises:
            UnsupportedFeatureError: If a setting is not what it was. Changes inside of a list go unnoticed.
        """
        for optimizer, before in self._before:
            after = _read(optimizer)
            for place in {**before, **after}:
                if place not in before or place not in after or not _is_same(before[place], after[place]):
                    index, key = place
                    raise UnsupportedFeatureError(
                        f"`param_groups[{index}]['{key}']` of the optimizer {type(optimizer).__name__} was changed"
                        f" inside `{step}`, which every replica does again. Change it in `on_train_batch_start` or"
                        " `on_train_batch_end`, or return a scheduler from `configure_optimizers`."
                    )


def _read(optimizer: Optimizer) -> dict[tuple[int, str], tuple[Any, int | None]]:
    """Return each setting by group and key, with the version of a tensor; of parameters, how many there are."""
    return {
        (index, key): (len(value) if key == "params" else value, value._version if isinstance(value, Tensor) else None)
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
    }


def _is_same(before: tuple[Any, int | None], after: tuple[Any, int | None]) -> bool:
    (old, old_version), (new, new_version) = before, after
    if old is new:
        return old_version == new_version
    # Whether arrays are equal is no single answer.
    return isinstance(old, int | float | str | tuple) and isinstance(new, type(old)) and bool(old == new)
