"""State that all replicas of a process share: generators, the cache of parametrizations, optimizer settings."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_ext._compat.torch import parametrization_cache, version_of
from lightning_ddp_ext._devices import get_rng_state, set_rng_state
from lightning_ddp_ext.errors import UnsupportedFeatureError


class SharedState:
    """Decides whether replicas run one after another because a step uses state that several of them share.

    Side by side they would draw from a shared generator in an order that changes from run to run, and activation
    checkpointing, which rewinds it, would recompute with other masks. `parametrize.cached()` identifies a tensor by the
    master's module, so replicas would use each other's tensors. Each step runs in order at first, and after any use.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        repeated = [device for device, count in Counter(devices).items() if count > 1 and device.type != "cpu"]
        self._devices = [torch.device("cpu"), *repeated] if len(devices) > 1 else []
        self._is_used = False
        self._watched: set[str] = set()
        self.watch()

    def forces_order(self, step: str) -> bool:
        """Return True if replicas must run this step one after another."""
        return bool(self._devices) and (self._is_used or step not in self._watched)

    def watch(self) -> None:
        """Remember the shared state before a step, until its first use."""
        self._states = {} if self._is_used else {device: get_rng_state(device) for device in self._devices}
        self._cache = parametrization_cache()

    def notice_use(self, step: str) -> bool:
        """Return True, and warn, if a step is the first to use shared state; call after `watch` and the step."""
        self._watched.add(step)
        if self._is_used or not self._devices:
            return False
        drawn = [device for device, state in self._states.items() if not torch.equal(state, get_rng_state(device))]
        if drawn:
            use = f"draws random numbers from the generator of {drawn[0]}, which several replicas share"
        elif parametrization_cache() is not self._cache:  # leaving `cached()` puts an empty one in its place
            use = "uses `torch.nn.utils.parametrize.cached()`, whose cache all replicas share"
        else:
            return False
        self._is_used = True
        warnings.warn(
            f"`{step}` {use}. They run one after another from now on, so that seeds, activation checkpointing and"
            " cached tensors keep their meaning.",
            stacklevel=2,
        )
        return True

    def restore(self) -> None:
        """Restore the states of the generators from before the step."""
        for device, state in self._states.items():
            set_rng_state(state, device)

    def forget(self) -> None:
        """Watch every step again, because the module has changed."""
        self._watched.clear()


@contextmanager
def refuse_changed_settings(optimizers: Sequence[Optimizer], step: str) -> Iterator[None]:
    """Refuse a step that changes settings of optimizers, such as learning rates; changes inside a list go unnoticed."""
    before = [_settings(optimizer) for optimizer in optimizers]
    yield
    for optimizer, old in zip(optimizers, before, strict=True):
        new = _settings(optimizer)
        if new == old:
            continue
        for index, key in {**old, **new}:
            if old.get((index, key)) != new.get((index, key)):
                raise UnsupportedFeatureError(
                    f"`param_groups[{index}]['{key}']` of the optimizer {type(optimizer).__name__} was changed"
                    f" inside `{step}`, which every replica does again. Change it in `on_train_batch_start` or"
                    " `on_train_batch_end`, or return a scheduler from `configure_optimizers`."
                )


def _settings(optimizer: Optimizer) -> dict[tuple[int, str], Any]:
    """Return each setting by group and key: numbers, texts and tuples as they are, other objects by identity."""
    return {
        (index, key): _comparable(len(value) if key == "params" else value)
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
    }


def _comparable(value: Any) -> Any:
    if isinstance(value, (int, float, str, tuple)):  # faster than a union
        return value
    return id(value), version_of(value) if isinstance(value, Tensor) else None
