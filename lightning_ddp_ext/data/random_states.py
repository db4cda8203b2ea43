"""The random generators of a process, as one tensor."""

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor

_PYTHON_WORDS = 625  # of the Mersenne Twister: 624 and the index of the next one
_NUMPY_WORDS = 624
_SPREADING = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_NONE = float("nan")  # of a Gaussian number that is kept for the next call


def capture_random_states(device: torch.device | None = None) -> Tensor:
    """Return the states of the generators of Python, NumPy and torch.

    Args:
        device: A CUDA device whose generator is among them; None or the CPU for none.

    Returns:
        Bytes on the CPU, equally many on every rank with the same kind of device.
    """
    version, words, gauss = random.getstate()
    assert (version, len(words)) == (3, _PYTHON_WORDS)
    of_numpy: Any = numpy.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = of_numpy
    assert (kind, len(keys)) == ("MT19937", _NUMPY_WORDS)
    packed = struct.pack(
        f"<{_PYTHON_WORDS}Id{_NUMPY_WORDS}Iiid",
        *words,
        _NONE if gauss is None else gauss,
        *keys.tolist(),
        position,
        has_gauss,
        cached,
    )
    parts = [torch.frombuffer(bytearray(packed), dtype=torch.uint8), torch.get_rng_state()]
    if device is not None and device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device))
    return torch.cat(parts)


def restore_random_states(states: Tensor, device: torch.device | None = None) -> None:
    """Set the generators back.

    Args:
        states: What `capture_random_states` returned.
        device: The same as there.
    """
    layout = struct.Struct(f"<{_PYTHON_WORDS}Id{_NUMPY_WORDS}Iiid")
    numbers = layout.unpack(states[: layout.size].numpy().tobytes())
    words, gauss = numbers[:_PYTHON_WORDS], numbers[_PYTHON_WORDS]
    random.setstate((3, words, None if gauss != gauss else gauss))
    keys, (position, has_gauss, cached) = numbers[_PYTHON_WORDS + 1 : -3], numbers[-3:]
    of_numpy: Any = ("MT19937", keys, position, has_gauss, cached)
    numpy.random.set_state(of_numpy)
    of_torch = torch.get_rng_state().numel()
    # Copies, because torch needs memory that begins at a multiple of its words.
    torch.set_rng_state(states[layout.size : layout.size + of_torch].clone())
    if device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states[layout.size + of_torch :].clone(), device)


class SharedRandomNumbers:
    """Lets all ranks draw the same random numbers from torch within a block, whatever each has drawn before.

    Args:
        seed: The same on every rank.
        device: A CUDA device whose generator is among torch's; None or the CPU for none.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._seed = seed
        self._generators = [torch.default_generator]
        if device is not None and device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._others: list[Tensor] | None = None  # within a block, the states that are not in use

    @contextmanager
    def shared(self, number: int) -> Iterator[None]:
        """Draw shared numbers in a block. Afterwards the generators are as if nothing had been drawn.

        Args:
            number: The number of the block, the same on every rank. Another block draws other numbers.
        """
        around = self._others  # of a block whose own numbers this one is among, or None
        self._others = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            # Spread over all seeds, so that runs with neighbouring seeds do not share numbers.
            generator.manual_seed((self._seed + number * _SPREADING) % 2**63)
        try:
            yield
        finally:
            self._exchange()
            self._others = around

    @contextmanager
    def own(self) -> Iterator[None]:
        """Draw this rank's own numbers in a block within `shared`; without effect elsewhere."""
        if self._others is None:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        assert self._others is not None
        now = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, self._others, strict=True):
            generator.set_state(state)
        self._others = now
