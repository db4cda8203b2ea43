"""State that all replicas of a process share: the CPU's RNG, the cache of parametrizations, optimizer settings."""

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
    """Decides whether replicas run one after another because several draw from the CPU's generator.

    Side by side they would draw in an order that changes from run to run, and activation checkpointing, which rewinds
    the generator, would recompute with other masks. Each step runs in order the first time, and always after any draw.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._is_shared = sum(device.type == "cpu" for device in devices) > 1
        self._is_drawn_from = False
        self._watched: set[str] = set()

    def forces_order(self, step: str) -> bool:
        """Return True if replicas must run this step one after another."""
        return self._is_shared and (self._is_drawn_from or step not in self._watched)

    @contextmanager
    def watch(self, step: str) -> Iterator[None]:
        """Notice whether a step draws random numbers."""
        if not self._is_shared or self._is_drawn_from:
            yield
            return
        before = torch.get_rng_state()
        yield
        self._watched.add(step)
        if not torch.equal(before, torch.get_rng_state()):
            self._is_drawn_from = True
            warnings.warn(
                f"`{step}` draws random numbers, for which all replicas on the CPU share one generator. They run one"
                " after another from now on, so that seeds and activation checkpointing keep their meaning.",
                stacklevel=2,
            )

    def forget(self) -> None:
        """Watch every step again, because the module has changed."""
        self._watched.clear()


class SharedParametrizationCache:
    """Decides whether replicas run one after another because a step uses `parametrize.cached()`.

    The cache identifies a tensor by the master's module in every replica, so replicas side by side would use each
    other's tensors. Each step of a parametrized module runs in order the first time, and always if it used the cache.
    """

    def __init__(self, master: nn.Module) -> None:
        self._may_be_used = any(map(is_parametrized, master.modules()))
        self._used: dict[str, bool] = {}

    def forces_order(self, step: str) -> bool:
        """Return True if replicas must run this step one after another."""
        return self._may_be_used and self._used.get(step, True)

    @contextmanager
    def watch(self, step: str, in_order: bool) -> Iterator[None]:
        """Notice whether a step uses the cache; refuse a step that used it while replicas ran side by side."""
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


@contextmanager
def refuse_changed_settings(optimizers: Sequence[Optimizer], step: str) -> Iterator[None]:
    """Refuse a step that changes settings of optimizers, such as learning rates; changes inside a list go unnoticed."""
    before = [_settings(optimizer) for optimizer in optimizers]
    yield
    for optimizer, old in zip(optimizers, before, strict=True):
        new = _settings(optimizer)
        for place in {**old, **new}:
            if place not in old or place not in new or not _is_same(old[place], new[place]):
                index, key = place
                raise UnsupportedFeatureError(
                    f"`param_groups[{index}]['{key}']` of the optimizer {type(optimizer).__name__} was changed"
                    f" inside `{step}`, which every replica does again. Change it in `on_train_batch_start` or"
                    " `on_train_batch_end`, or return a scheduler from `configure_optimizers`."
                )


def _settings(optimizer: Optimizer) -> dict[tuple[int, str], tuple[Any, int | None]]:
    """Return each setting by group and key, with the version of a tensor; for parameters their number."""
    return {
        (index, key): (len(value) if key == "params" else value, value._version if isinstance(value, Tensor) else None)
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
    }


def _is_same(before: tuple[Any, int | None], after: tuple[Any, int | None]) -> bool:
    (old, old_version), (new, new_version) = before, after
    if old is new:
        return old_version == new_version
    # An array has no single truth value.
    return isinstance(old, int | float | str | tuple) and isinstance(new, type(old)) and bool(old == new)
