"""RNG state of a process and of its data loaders."""

import base64
import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

_PYTHON_WORDS = 625  # of the Mersenne Twister: 624 and the index of the next one
_NUMPY_WORDS = 624
_SPREADING = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_NONE = float("nan")  # of a Gaussian number that is kept for the next call


def capture_rng_state(device: torch.device | None = None) -> Tensor:
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


def restore_rng_state(states: Tensor, device: torch.device | None = None) -> None:
    """Set the generators back.

    Args:
        states: What `capture_rng_state` returned.
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


LoaderRng = (
    torch.Generator
    | numpy.random.Generator
    | numpy.random.RandomState
    | random.Random
    | DistributedSampler[Any]  # which draws anew from its seed
)

_KINDS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random, DistributedSampler)
_PARTS = ("batch_sampler", "dataset", "sampler")  # whatever class they have


def find_loader_rngs(sources: Iterable[object]) -> list[LoaderRng]:
    """Return the generators that are attributes of loaders, samplers and datasets, or of such within them, each once.

    Args:
        sources: Loaders or samplers.

    Returns:
        Them, in an order that is the same whenever the sources are made the same way.
    """
    found: dict[int, LoaderRng] = {}
    seen: set[int] = set()
    for source in sources:
        found.update((id(generator), generator) for generator in _search(source, seen))
    return list(found.values())


def _search(owner: object, seen: set[int]) -> Iterator[LoaderRng]:
    seen.add(id(owner))
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        # Lists of datasets begin with one; those of samples are not gone through.
        is_list = isinstance(value, list | tuple) and value and isinstance(value[0], Dataset)
        for part in value if is_list else (value,):
            if isinstance(part, _KINDS) and not isinstance(part, random.SystemRandom):  # which has no state
                yield part
            if id(part) not in seen and (isinstance(part, DataLoader | Dataset | Sampler) or name in _PARTS):
                yield from _search(part, seen)


def capture_states(generators: Sequence[LoaderRng]) -> list[Any]:
    """Return the kind and the state of each generator, as numbers and text."""
    return [[_kind(generator), _state(generator)] for generator in generators]


def restore_states(generators: Sequence[LoaderRng], captured: Sequence[Any]) -> None:
    """Set generators back to what `capture_states` returned of them, or of others of the same kinds.

    Where kinds differ, nothing is done: loaders may make generators while they are iterated over.
    """
    if [_kind(generator) for generator in generators] == [kind for kind, _ in captured]:
        for generator, (_, state) in zip(generators, captured, strict=True):
            _restore(generator, state)


def seed_all(generators: Sequence[LoaderRng], seed: int) -> None:
    """Seed generators.

    Args:
        generators: The generators.
        seed: Below 2 ** 32.
    """
    for generator in generators:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, DistributedSampler):
            generator.seed = seed
        elif isinstance(generator, numpy.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.seed(seed)


def _kind(generator: LoaderRng) -> str:
    if isinstance(generator, DistributedSampler):
        return "DistributedSampler"  # of which `ddp_join` has a class of its own
    own = generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator
    return f"{type(generator).__name__}, {type(own).__name__}"


def _state(generator: LoaderRng) -> Any:
    if isinstance(generator, DistributedSampler):
        return generator.seed
    if isinstance(generator, torch.Generator):
        return base64.b64encode(generator.get_state().numpy().tobytes()).decode()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.Generator):
        return _without_arrays(generator.bit_generator.state)
    return _without_arrays(generator.get_state(legacy=False))


def _restore(generator: LoaderRng, state: Any) -> None:
    if isinstance(generator, DistributedSampler):
        generator.seed = state
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _without_arrays(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, numpy.ndarray | numpy.generic) else state
