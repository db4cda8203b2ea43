"""RNG state of a process and of its data loaders, and the states of all ranks in a checkpoint."""

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from lightning_ddp_ext._devices import get_rng_state, seed_rng, set_rng_state
from lightning_ddp_ext.distributed.exchange import gather_bytes, to_bytes
from lightning_ddp_ext.distributed.serialization import unpack

T = TypeVar("T")

LOOKAHEAD = 2  # batches that are fetched ahead at most: one by the loop, one to know if this rank has a next batch
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
    numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *more))
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


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy, torch on the CPU, and of a device."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    for one in _devices(device):
        seed_rng(seed, one)


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
                seed_generators(self._seed)
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


RngState = dict[str, Any]
"""The result of `capture_rng_state`, and under `"loaders"` of `capture_states`."""


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """The RNG states that a rank needs to resume at its position in the data; plain values for a checkpoint."""

    has_begun: bool  # within an epoch
    start: RngState  # at the start of the epoch's iteration
    ahead: tuple[RngState, ...]  # before the fetch of each batch that has not been used yet
    now: RngState


class ResumableRng:
    """Restores the RNG state of this process while a run that resumes within an epoch fetches its batches.

    Loaders draw when an iteration begins (order, seeds of workers) and during a fetch (transforms). So a resumed run
    begins the iteration from the RNG state at the start of the epoch; fetches the used batches once more; fetches each
    batch that was ahead from the RNG state before its first fetch; and restores the RNG state of the interruption, in
    generators that are attributes of loaders, samplers and datasets too.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._resumed: FetchRecord | None = None
        self._has_begun = self._has_replayed = self._has_advanced = False
        self.is_bypassed = False  # loaders resume by themselves, and nothing is replayed
        self.loaders: list[Any] = []  # of the current iteration
        # Of the generators in loaders after the fetch of the last batch that was used, if a thread fetches ahead.
        self.loader_states: list[Any] | None = None
        self._start = self.capture()
        self._states: deque[RngState] = deque(maxlen=LOOKAHEAD)
        self._fetched = self._used = 0
        self.looks_ahead = True  # batches are fetched before they are used; may be set until the first fetch

    def resume(self, record: FetchRecord) -> None:
        """Let the next iteration continue at the position of a record."""
        self._resumed = record

    def advance(self) -> None:
        """Restore the RNG state of the interruption. Call before every step and its fetch."""
        is_first, self._has_advanced = not self._has_advanced, True
        if self._resumed is None:
            return
        if self._has_replayed or self.is_bypassed:
            self._finish_replay(self._resumed)  # other code may have drawn since the replay
        elif self._has_begun and not self._resumed.has_begun:
            self._resumed = None
        elif is_first and not self._has_begun:
            self._restore(self._resumed.now)

    def advance_between_epochs(self) -> None:
        """Restore the RNG state of the interruption, and abandon an iteration that has begun; instead of `advance`."""
        if self._resumed is not None:
            self._restore(self._resumed.now)
        self._resumed = None
        self._has_advanced = True

    def record(self, used: int | None, keeps_loaders: bool = True) -> FetchRecord:
        """Return the record for `used` batches of this epoch, None between epochs."""
        now = self.capture()
        if used is None:
            # Other loaders in the next epoch have other generators.
            now = now if keeps_loaders else {**now, "loaders": []}
            return FetchRecord(False, now, (), now)
        if self._resumed is not None and not self._has_begun:
            return replace(self._resumed, now=now)
        ahead = max(0, self._fetched - used) if self.looks_ahead else 0
        return FetchRecord(True, self._start, tuple(self._states)[len(self._states) - ahead :], now)

    def begin(self, loaders: Iterable[object], used: int = 0, looks_ahead: bool = True) -> None:
        """Prepare an iteration over loaders, of which the first `used` batches will be skipped."""
        self.loaders = list(loaders)
        if self._resumed is not None:
            if self._has_advanced:  # other code, such as a validation, may have drawn since `advance`
                now = {**self.capture(), "loaders": self._resumed.now["loaders"]}  # `advance` did not know the loaders
                self._resumed = replace(self._resumed, now=now)
            self._restore(self._resumed.start)
            if self._has_advanced and not self._resumed.has_begun:
                self._resumed = None
        self._has_begun = True
        self._start = self.capture()
        self._states.clear()
        self._fetched, self._used, self.looks_ahead = 0, used, looks_ahead

    def fetch(self, fetch_next: Callable[[], T]) -> T:
        """Fetch the next batch from its RNG state."""
        self._seek()
        state = self.capture() if self.looks_ahead else None
        try:
            batch = fetch_next()
        except StopIteration:
            if self._resumed is not None:
                self._finish_replay(self._resumed)
            raise
        self._fetched += 1
        if state is not None:
            self._states.append(state)
        self._seek()
        return batch

    def iterate(
        self, source: Iterable[T], loaders: Iterable[object], used: int = 0, looks_ahead: bool = True
    ) -> Iterator[T]:
        """Begin an iteration over a source, and return its batches, each fetched by `fetch` if need be."""
        self.begin(loaders, used, looks_ahead)
        batches = iter(source)
        if looks_ahead or self._resumed is not None:
            return self._fetch_all(batches)
        return iter(batches.__next__, object())  # a `CombinedLoader` would begin again with each `iter`

    def _fetch_all(self, batches: Iterator[T]) -> Iterator[T]:
        while True:
            try:
                batch = self.fetch(batches.__next__)
            except StopIteration:
                return
            yield batch

    def capture(self) -> RngState:
        """Return the RNG state of this process and of its loaders."""
        ahead = self.loader_states
        loaders = capture_states(find_loader_rngs(self.loaders)) if ahead is None else ahead
        return {**capture_rng_state(self._device), "loaders": loaders}

    @property
    def is_resuming(self) -> bool:
        """Whether RNG states will be restored."""
        return self._resumed is not None

    def _restore(self, state: RngState) -> None:
        restore_rng_state(state, self._device)
        restore_states(find_loader_rngs(self.loaders), state["loaders"])

    def _seek(self) -> None:
        """Restore the RNG state of the next batch's first fetch or, after the last of these, of the interruption."""
        resumed, ahead = self._resumed, self._fetched - self._used
        if resumed is None or not resumed.has_begun or ahead < 0:
            return
        if ahead < len(resumed.ahead):
            self._restore(resumed.ahead[ahead])
        else:
            self._finish_replay(resumed)

    def _finish_replay(self, resumed: FetchRecord) -> None:
        """Restore the RNG state of the interruption; `advance` does it once more if no step has been made yet."""
        self._restore(resumed.now)
        self._has_replayed = True
        if self._has_advanced:
            self._resumed = None


def gather_states(state: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the compressed state of each rank on rank 0, which writes it, and an empty list on the other ranks.

    Two collectives. Ranks other than rank 0 handle their own state only.
    """
    own = zlib.compress(_bytes_of(to_bytes(state)), level=1)
    rows = gather_bytes(_from_bytes(own), group, target=0)
    kept: dict[bytes, Tensor] = {}  # so that torch writes equal states once
    return [kept.setdefault(_bytes_of(row), row.clone()) for row in rows]


def load_state(saved: Tensor) -> Any:
    """Return the state of one rank from an entry of `gather_states`."""
    return unpack(_from_bytes(zlib.decompress(_bytes_of(saved))))[0]
