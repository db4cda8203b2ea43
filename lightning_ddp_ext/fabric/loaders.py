"""The loaders of a Fabric: their batches are counted, ranks may iterate in lockstep, and an epoch can be resumed."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import sized_len

from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.ranks.loaders import CountedLoader, FetchedBatch, StepParticipation
from lightning_ddp_ext.resume.resumable_loader import FetchRecord, ResumableRng

if TYPE_CHECKING:
    from lightning_ddp_ext.fabric.strategies import DDPCheckpointStrategy

EPOCH, USED, RNG = "epoch", "used", "rng"
Batches = Iterable[tuple[Any, float | None]]
Steps = Iterable[tuple[Any, FetchedBatch]]


@dataclass(eq=False, slots=True)
class LoopBatch:
    """The current batch of a loop over a loader."""

    weight: float | None = None  # on this rank; None if it is unknown
    problem: Exception | None = None  # why the weight is unknown, an error once it is needed
    participation: StepParticipation | None = None  # None if every rank has a batch
    shares: Any = None  # the `SharedBatch` of `shares/table.py`, if ranks share the batch
    number: int = 0  # of batches that the loader has given
    is_new: bool = False  # since the last backward pass
    has_given_weight: bool = False  # by the user
    is_reweighted: bool = False  # by the user, since the last backward pass
    runs_ahead: bool = False  # the loader has once given a batch before the last one had a backward pass
    has_skipped: bool = False  # the loader has given a batch of another weight that no backward pass followed
    has_evaluated: bool = False  # a loop over another loader has begun and ended since
    has_next_batch: Any = None  # the `HasNextBatch` of the loop, if ranks compare batches one step ahead


class FabricLoader:
    """A loader that tells its strategy about each batch, and continues an epoch where a checkpoint was saved.

    It has the attributes of the user's loader.
    """

    def __init__(self, loader: Any, strategy: "DDPCheckpointStrategy") -> None:
        self.__dict__.update(getattr(loader, "__dict__", {}))
        self._loader = loader
        self._strategy = strategy
        self._rng = ResumableRng(strategy.root_device)
        self._given = 0  # batches, by this process
        self._epoch = 0  # iterations that have begun
        self._used: int | None = None  # batches of this epoch that the loop has got; None between epochs
        self._skip = 0
        self._steps = strategy.number_of_steps(sized_len(loader))

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError("the number of batches is not known on every rank")
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        epoch, self._epoch = self._epoch, self._epoch + 1
        for owner in (self._loader, getattr(self._loader, "batch_sampler", None)):
            sampler: Any = getattr(owner, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        self._used = skip
        rng = self._rng
        with self._strategy.iterating() as current:
            steps = iter(self._make_steps(skip, current))
            while True:
                if self._rng is not rng:
                    raise UnsupportedFeatureError(
                        "`fabric.load` has changed the position of a loader inside of a loop over it. Leave the loop"
                        " after `fabric.load`, as the next one continues at the position of the checkpoint; or read"
                        " only weights with `fabric.load_raw`."
                    )
                rng.advance()
                step = next(steps, None)
                if step is None:
                    break
                self._used += 1
                self._given += 1
                current.number = self._given
                self._strategy.begin_batch(current, *step)
                yield step[0]
            self._used = None
            self._strategy.end_batch(current)

    def _make_steps(self, skip: int, current: LoopBatch) -> Steps:
        """Return the steps of this epoch after the first `skip`."""
        return self._strategy.lockstep(self._fetch(skip, current), self._loader, skip, current)

    def _fetch(self, skip: int, current: LoopBatch) -> Iterator[tuple[Any, float | None]]:
        counts: list[int | None] = []
        loader, length = CountedLoader(self._loader, counts), sized_len(self._loader)
        looks_ahead = current.has_next_batch is not None
        # This rank may have had fewer batches than there were steps.
        own_skip = skip if looks_ahead or length is None else min(skip, length)
        for batch in self._rng.iterate(loader, [self._loader], own_skip, looks_ahead):
            yield batch, counts.pop()

    def state(self) -> dict[str, Any]:
        """Return the position in the data, and the RNG state there, as plain values."""
        is_between = self._used is None
        epoch = self._epoch if is_between else self._epoch - 1
        return {EPOCH: epoch, USED: self._used, RNG: asdict(self._rng.record(self._used))}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue at a position."""
        self._epoch, self._skip = state[EPOCH], state[USED] or 0
        self._used = None
        self._rng = ResumableRng(self._strategy.root_device)
        if RNG in state:
            self._rng.resume(FetchRecord(**state[RNG]))


def without_first(batches: Batches, skip: int) -> Iterator[tuple[Any, FetchedBatch]]:
    """Yield batches of ranks that have equally many, without the first `skip`."""
    rest = iter(batches)
    deque(islice(rest, skip), maxlen=0)
    return ((batch, FetchedBatch(samples)) for batch, samples in rest)
