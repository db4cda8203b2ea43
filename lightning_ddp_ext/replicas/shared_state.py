"""State that all replicas of a process share: RNG, parametrization caches, optimizer settings."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from lightning_ddp_ext._compat.torch import parametrization_cache
from lightning_ddp_ext.errors import UnsupportedFeatureError


class SharedGenerator:
    """Decides whether replicas must run one after another because they draw from the same generator.

    At the same time they would draw in an order that changes from run to run, and recomputation for activation
    checkpointing, which sets the generator back, would give other masks than the forward pass. So a step runs one
    replica after another the first time; if that has advanced the generator, it stays so, and a warning says it once.

    Args:
        devices: Device of each replica. Devices other than the CPU have generators of their own.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._shared = sum(device.type == "cpu" for device in devices) > 1
        self._drawn = False
        self._watched: set[str] = set()

    def forces_order(self, step: str) -> bool:
        """Tell whether replicas must run one after another.

        Args:
            step: Name of the step, such as `"training_step"`; each is watched separately.
        """
        return self._shared and (self._drawn or step not in self._watched)

    @contextmanager
    def watch(self, step: str) -> Iterator[None]:
        """Notice whether a step draws random numbers."""
        if not self._shared or self._drawn:
            yield
            return
        before = torch.get_rng_state()
        yield
        self._watched.add(step)
        if not torch.equal(before, torch.get_rng_state()):
            self._drawn = True
            warnings.warn(
                f"`{step}` draws random numbers, for which all replicas on the CPU share one generator. They run one"
                " after another from now on, so that seeds and activation checkpointing keep their meaning.",
                stacklevel=2,
            )

    def forget(self) -> None:
        """Watch every step again, because the module has changed."""
        self._watched.clear()


class SharedParametrizationCache:
    """Decides whether replicas must run one after another because a step uses `parametrize.cached()`.

    The cache knows a tensor by the module that was parametrized first, which is the master's for all replicas. At the
    same time they would compute with, and pass backward through, the tensors of another replica. So each step of a
    module with parametrizations runs one replica after another the first time; if that has used the cache, it stays so.

    Args:
        master: The module whose replicas run.
    """

    def __init__(self, master: nn.Module) -> None:
        self._may_be_used = any(map(is_parametrized, master.modules()))
        self._used: dict[str, bool] = {}

    def forces_order(self, step: str) -> bool:
        """Return True if replicas must run a step one after another; each step is watched separately."""
        return self._may_be_used and self._used.get(step, True)

    @contextmanager
    def watch(self, step: str, in_order: bool) -> Iterator[None]:
        """Notice whether a step uses the cache.

        Args:
            step: Name of the step.
            in_order: Whether replicas run one after another.

        Raises:
            UnsupportedFeatureError: If replicas that ran at the same time have used it.
        """
        if not self._may_be_used:
            yield
            return
        before = parametrization_cache()
        try:
            yield
        finally:
            used = parametrization_cache() is not before  # leaving `cached()` puts an empty one in its place
            if used and not in_order:
                raise UnsupportedFeatureError(
                    f"`{step}` uses `torch.nn.utils.parametrize.cached()`, whose cache all replicas share, but did not"
                    " in its first batch, so they ran at the same time. Use it for every batch, or not at all."
                )
        if used and not self._used.get(step):
            warnings.warn(
                f"`{step}` uses `torch.nn.utils.parametrize.cached()`, whose cache all replicas share. They run one"
                " after another from now on.",
                stacklevel=2,
            )
        self._used[step] = used or self._used.get(step, False)


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
