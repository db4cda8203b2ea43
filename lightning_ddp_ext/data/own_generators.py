"""Random generators that loaders, samplers and datasets were given, beside those of the process."""

import base64
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

OwnGenerator = torch.Generator | numpy.random.Generator | numpy.random.RandomState | random.Random


def find_generators(*sources: object, among: Any = DataLoader | Dataset | Sampler) -> list[OwnGenerator]:
    """Return the generators that are attributes of loaders, or of samplers and datasets within them, each once.

    Args:
        sources: Loaders, or samplers.
        among: Kinds of attributes that are searched too.

    Returns:
        Them, in an order that is the same whenever the loaders are made the same way.
    """
    found: dict[int, OwnGenerator] = {}
    seen: set[int] = set()
    for source in sources:
        found.update((id(generator), generator) for generator in _search(source, among, seen))
    return list(found.values())


def _search(owner: object, among: Any, seen: set[int]) -> Iterator[OwnGenerator]:
    seen.add(id(owner))
    for value in list(getattr(owner, "__dict__", {}).values()):
        # The first tells lists of datasets from those of samples.
        is_list = isinstance(value, list | tuple) and value and isinstance(value[0], Dataset)
        for part in value if is_list else (value,):
            if isinstance(part, OwnGenerator) and not isinstance(part, random.SystemRandom):  # which has no state
                yield part
            elif isinstance(part, among) and id(part) not in seen:
                yield from _search(part, among, seen)


def capture_states(generators: Sequence[OwnGenerator]) -> list[Any]:
    """Return the kind and the state of each generator, as numbers and text."""
    return [[type(generator).__name__, _state(generator)] for generator in generators]


def restore_states(generators: Sequence[OwnGenerator], captured: Sequence[Any]) -> bool:
    """Set generators back to what `capture_states` returned, of them or of others of the same kinds.

    Returns:
        Whether the kinds are the same; otherwise nothing has been done.
    """
    if [type(generator).__name__ for generator in generators] != [kind for kind, _ in captured]:
        return False
    for generator, (_, state) in zip(generators, captured, strict=True):
        _restore(generator, state)
    return True


def _state(generator: OwnGenerator) -> Any:
    if isinstance(generator, torch.Generator):
        return base64.b64encode(generator.get_state().numpy().tobytes()).decode()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.Generator):
        return _without_arrays(generator.bit_generator.state)
    return _without_arrays(generator.get_state(legacy=False))


def _restore(generator: OwnGenerator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
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
