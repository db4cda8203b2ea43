"""RNG state of a process and of its data loaders, and the states of all ranks in a checkpoint."""

import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from lightning_ddp_ext._devices import get_rng_state, seed_rng, set_rng_state
from lightning_ddp_ext.distributed.exchange import gather_bytes, to_bytes
from lightning_ddp_ext.distributed.serialization import unpack

_CPU = torch.device("cpu")
_SPREADING = 0x9E3779B97F4A7C15  # odd and without pattern, so that its multiples spread over all seeds


def capture_rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """Return the RNG state of Python, NumPy, torch and a device, as plain values that `==` compares."""
    of_numpy: Any = numpy.random.get_state(legacy=True)
    kind, keys, *more = of_numpy
    of_torch = {one.type: _bytes_of(get_rng_state(one)) for one in _devices(device)}
    return {"python": random.getstate(), "numpy": (kind, keys.tobytes(), *more), **of_torch}


def restore_rng_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Restore the result of `capture_rng_state` for the same kind of device."""
    kind, keys, *more = state["numpy"]
    random.setstate(state["python"])
    # Checkpoints of earlier versions have numbers instead of bytes.
    numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32) if isinstance(keys, bytes) else keys, *more))
    for one in _devices(device):
        set_rng_state(_from_bytes(state[one.type]), one)


@contextmanager
def preserved_rng_state(device: torch.device | None = None) -> Iterator[dict[str, Any]]:
    """Restore the RNG state after the block, which gets that state."""
    states = capture_rng_state(device)
    try:
        yield states
    finally:
        restore_rng_state(states, device)


def _devices(device: torch.device | None) -> list[torch.device]:
    """Return the devices from which a process on a device draws: the CPU, and the device itself."""
    return [_CPU] if device is None or device.type == "cpu" else [_CPU, device]


def _bytes_of(state: Tensor) -> bytes:
    return state.numpy().tobytes()


def _from_bytes(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


class SharedRandomNumbers:
    """Draws the same random numbers from torch on all ranks in a block, independent of earlier draws."""

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._seed = seed  # the same on every rank
        self._devices = _devices(device)
        self._others: list[Tensor] | None = None  # in a block, the states that are not in use

    @contextmanager
    def shared(self, number: int) -> Iterator[None]:
        """Draw the shared numbers of block `number`, the same on every rank; restore the RNG state afterwards."""
        around = self._others  # of the enclosing block of own numbers, or None
        self._others = [*map(get_rng_state, self._devices)]
        for device in self._devices:
            # Spread over all seeds, so that runs with neighbouring seeds do not share numbers.
            seed_rng((self._seed + number * _SPREADING) % 2**63, device)
        try:
            yield
        finally:
            self._exchange()
            self._others = around

    @contextmanager
    def own(self) -> Iterator[None]:
        """Draw this rank's own numbers in a block inside `shared`; elsewhere this has no effect."""
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
        now = [*map(get_rng_state, self._devices)]
        for state, device in zip(self._others, self._devices, strict=True):
            set_rng_state(state, device)
        self._others = now


LoaderRng = (
    torch.Generator
    | numpy.random.Generator
    | numpy.random.RandomState
    | random.Random
    | DistributedSampler[Any]  # its generator is made from its seed in each epoch
)

_KINDS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random, DistributedSampler)
_PARTS = ("batch_sampler", "dataset", "sampler")  # of any class


def find_loader_rngs(sources: Iterable[object], excluded: Iterable[object] = ()) -> list[LoaderRng]:
    """Return the generators in loaders and in their samplers and datasets, each once, in the order of attributes."""
    found: dict[int, LoaderRng] = {}
    seen = {id(part) for part in excluded}
    for source in sources:
        found.update((id(generator), generator) for generator in _search(source, seen))
    return list(found.values())


def _search(owner: object, seen: set[int]) -> Iterator[LoaderRng]:
    seen.add(id(owner))
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        # A list of datasets begins with a dataset; a list of samples is not searched.
        is_list = isinstance(value, list | tuple) and value and isinstance(value[0], Dataset)
        for part in value if is_list else (value,):
            if isinstance(part, _KINDS) and not isinstance(part, random.SystemRandom):  # it has no state
                yield part
            if id(part) not in seen and (isinstance(part, DataLoader | Dataset | Sampler) or name in _PARTS):
                yield from _search(part, seen)


def capture_states(generators: Sequence[LoaderRng]) -> list[Any]:
    """Return the kind and the state of each generator, as plain values."""
    return [[_kind(generator), _state(generator)] for generator in generators]


def restore_states(generators: Sequence[LoaderRng], captured: Sequence[Any]) -> None:
    """Restore the result of `capture_states`, unless loaders have made generators of other kinds meanwhile."""
    if [_kind(generator) for generator in generators] == [kind for kind, _ in captured]:
        for generator, (_, state) in zip(generators, captured, strict=True):
            _restore(generator, state)


def seed_all(generators: Sequence[LoaderRng], seed: int) -> None:
    """Seed generators with a number below 2 ** 32."""
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
        return "DistributedSampler"  # also of the subclass that `ddp_join` uses
    own = generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator
    return f"{type(generator).__name__}, {type(own).__name__}"


def _state(generator: LoaderRng) -> Any:
    if isinstance(generator, DistributedSampler):
        return generator.seed
    if isinstance(generator, torch.Generator):
        return _bytes_of(generator.get_state())
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.Generator):
        return _without_arrays(generator.bit_generator.state)
    return _without_arrays(generator.get_state(legacy=False))


def _restore(generator: LoaderRng, state: Any) -> None:
    if isinstance(generator, DistributedSampler):
        generator.seed = state
    elif isinstance(generator, torch.Generator):
        generator.set_state(_from_bytes(state))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _without_arrays(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, numpy.ndarray | numpy.generic) else state


class SeededRng:
    """Random numbers from a seed, drawn in blocks: independent of all other draws of this process."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: Any = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw these numbers from the generators of Python, NumPy and torch in a block."""
        with preserved_rng_state():
            if self._states is None:
                random.seed(self._seed)
                numpy.random.seed(self._seed % 2**32)
                torch.default_generator.manual_seed(self._seed)
            else:
                restore_rng_state(self._states)
            try:
                yield
            finally:
                self._states = capture_rng_state()


@contextmanager
def drawing_alike(seed: int, sampler: object) -> Iterator[None]:
    """Draw the same random numbers on all ranks in a block, also from the generators of a sampler."""
    generators = find_loader_rngs([sampler])
    states = capture_states(generators)
    try:
        with SeededRng(seed).drawing():
            seed_all(generators, seed)
            yield
    finally:
        restore_states(generators, states)


def gather_states(state: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the compressed state of each rank on rank 0, which writes it, and an empty list on the other ranks.

    Two collectives. Ranks other than rank 0 handle their own state only.
    """
    own = zlib.compress(_bytes_of(to_bytes(state)), level=1)
    rows = gather_bytes(_from_bytes(own), group, target=0)
    kept: dict[bytes, Tensor] = {}  # so that torch writes equal states once
    return [kept.setdefault(_bytes_of(row), row.clone()) for row in rows]


def load_state(saved: Any) -> Any:
    """Return the state of one rank from a checkpoint; earlier versions saved it uncompressed."""
    if not isinstance(saved, Tensor):
        return saved
    return unpack(_from_bytes(zlib.decompress(_bytes_of(saved))))[0]
