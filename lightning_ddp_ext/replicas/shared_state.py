"""State that all replicas of a process share: generators, the cache of parametrizations, optimizer settings."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from lightning_ddp_ext._compat.torch import parametrization_cache, version_of
from lightning_ddp_ext._devices import get_rng_state
from lightning_ddp_ext.errors import UnsupportedFeatureError


class SharedGenerators:
    """Decides whether replicas run one after another because several draw from the same generator.

    All replicas share the CPU's generator, and replicas of one device share that device's. Side by side they would draw
    in an order that changes from run to run, and activation checkpointing, which rewinds the generator, would recompute
    with other masks. Each step runs in order the first time, and always after any draw.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        repeated = [device for device, count in Counter(devices).items() if count > 1 and device.type != "cpu"]
        self._devices = [torch.device("cpu"), *repeated] if len(devices) > 1 else []
        self._is_drawn_from = False
        self._watched: set[str] = set()

    def forces_order(self, step: str) -> bool:
        """Return True if replicas must run this step one after another."""
        return bool(self._devices) and (self._is_drawn_from or step not in self._watched)

    def states(self) -> dict[torch.device, Tensor]:
        """Return the states of the shared generators until the first draw, and nothing after it."""
        return {} if self._is_drawn_from else {device: get_rng_state(device) for device in self._devices}

    def notice_draws(self, step: str, before: Mapping[torch.device, Tensor]) -> bool:
        """Return True, and warn, if the step is the first to draw random numbers; `before` are the states before it."""
        self._watched.add(step)
        drawn = [device for device, state in before.items() if not torch.equal(state, get_rng_state(device))]
        if drawn:
            self._is_drawn_from = True
            warnings.warn(
                f"`{step}` draws random numbers from the generator of {drawn[0]}, which several replicas share. They"
                " run one after another from now on, so that seeds and activation checkpointing keep their meaning.",
                stacklevel=2,
            )
        return bool(drawn)

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
        (index, key): (
            len(value) if key == "params" else value,
            version_of(value) if isinstance(value, Tensor) else None,
        )
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
    }


def _is_same(before: tuple[Any, int | None], after: tuple[Any, int | None]) -> bool:
    (old, old_version), (new, new_version) = before, after
    if old is new:
        return old_version == new_version
    # An array has no single truth value.
    return isinstance(old, int | float | str | tuple) and isinstance(new, type(old)) and bool(old == new)
