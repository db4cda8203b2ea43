"""Random generators that loaders, samplers and datasets have of their own, beside those of the process."""

import base64
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

OwnGenerator = (
    torch.Generator
    | numpy.random.Generator
    | numpy.random.RandomState
    | random.Random
    | DistributedSampler[Any]  # which draws anew from its seed
)

_KINDS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random, DistributedSampler)
_PARTS = ("batch_sampler", "dataset", "sampler")  # whatever class they have


def find_generators(sources: Iterable[object]) -> list[OwnGenerator]:
    """Return the generators that are attributes of loaders, samplers and datasets, or of such within them, each once.

    Args:
        sources: Loaders or samplers.

    Returns:
        Them, in an order that is the same whenever the sources are made the same way.
    """
    found: dict[int, OwnGenerator] = {}
    seen: set[int] = set()
    for source in sources:
        found.update((id(generator), generator) for generator in _search(source, seen))
    return list(found.values())


def _search(owner: object, seen: set[int]) -> Iterator[OwnGenerator]:
    seen.add(id(owner))
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        # Lists of datasets begin with one; those of samples are not gone through.
        is_list = isinstance(value, list | tuple) and value and isinstance(value[0], Dataset)
        for part in value if is_list else (value,):
            if isinstance(part, _KINDS) and not isinstance(part, random.SystemRandom):  # which has no state
                yield part
            if id(part) not in seen and (isinstance(part, DataLoader | Dataset | Sampler) or name in _PARTS):
                yield from _search(part, seen)


def capture_states(generators: Sequence[OwnGenerator]) -> list[Any]:
    """Return the kind and the state of each generator, as numbers and text."""
    return [[_kind(generator), _state(generator)] for generator in generators]


def restore_states(generators: Sequence[OwnGenerator], captured: Sequence[Any]) -> None:
    """Set generators back to what `capture_states` returned of them, or of others of the same kinds.

    Where kinds differ, nothing is done: loaders may make generators while they are iterated over.
    """
    if [_kind(generator) for generator in generators] == [kind for kind, _ in captured]:
        for generator, (_, state) in zip(generators, captured, strict=True):
            _restore(generator, state)


def seed_all(generators: Sequence[OwnGenerator], seed: int) -> None:
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


def _kind(generator: OwnGenerator) -> str:
    if isinstance(generator, DistributedSampler):
        return "DistributedSampler"  # of which `ddp_join` has a class of its own
    own = generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator
    return f"{type(generator).__name__}, {type(own).__name__}"


def _state(generator: OwnGenerator) -> Any:
    if isinstance(generator, DistributedSampler):
        return generator.seed
    if isinstance(generator, torch.Generator):
        return base64.b64encode(generator.get_state().numpy().tobytes()).decode()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.Generator):
        return _without_arrays(generator.bit_generator.state)
    return _without_arrays(generator.get_state(legacy=False))


def _restore(generator: OwnGenerator, state: Any) -> None:
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
