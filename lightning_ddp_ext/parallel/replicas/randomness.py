"""Random numbers on the CPU, where all threads draw from one generator."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


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
