"""The loaders of a Fabric, whose steps the same sources make as under a Trainer; an epoch can be resumed."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.loaders.step_loader import FetchedBatch, Participation, StepLoader, StepSource
from lightning_ddp_ext.resume.rng_state import FetchRecord, ResumableRng

EPOCH, USED, RNG = "epoch", "used", "rng"


@dataclass(eq=False, slots=True)
class LoopBatch:
    """The current batch of a loop over a loader."""

    weight: float | None = None  # on this rank; None if it is unknown
    problem: Exception | None = None  # why the weight is unknown, an error once it is needed
    participation: Participation | None = None  # None if every rank has a batch
    shares: Any = None  # the `SharedBatch` of `shares/share_table.py`, if ranks share the batch
    number: int = 0  # of batches that the loader has given
    loops: int = 0  # over parts of the batch
    is_new: bool = False  # since the last backward pass
    has_given_weight: bool = False  # by the user
    is_reweighted: bool = False  # by the user, since the last backward pass
    runs_ahead: bool = False  # the loader has once given a batch before the last one had a backward pass
    has_skipped: bool = False  # the loader has given a batch of another weight that no backward pass followed
    has_evaluated: bool = False  # a loop over another loader has begun and ended since
    has_next_batch: Any = None  # the `HasNextBatch` of the loop, if ranks compare batches one step ahead


class BatchObserver(Protocol):
    """A loop of the user, which a loader tells about its batches."""

    def iterating(self) -> AbstractContextManager[LoopBatch]:
        """Iterate over a loader in the block; the loader changes the `LoopBatch`."""

    def begin_batch(self, current: LoopBatch, batch: Any, fetched: FetchedBatch) -> None:
        """Begin with the next batch of a loader."""

    def end_batch(self, current: LoopBatch) -> None:
        """End the last batch of a loop."""


class FabricLoader:
    """A loader that tells an observer about each batch, and continues an epoch where a checkpoint was saved.

    It has the attributes of the user's loader.
    """

    def __init__(self, loader: Any, source: StepSource, device: torch.device, observer: BatchObserver) -> None:
        self.__dict__.update(getattr(loader, "__dict__", {}))
        self._loader = loader
        self._observer = observer
        self._device = device
        self._rng = ResumableRng(device)
        self._steps = StepLoader([loader], "sequential", source, self._rng)  # of the last iteration
        self._given = 0  # batches, by this process
        self.epochs_begun = 0
        source.prepare(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epochs_begun = self.epochs_begun, self.epochs_begun + 1
        for owner in (self._loader, getattr(self._loader, "batch_sampler", None)):
            sampler: Any = getattr(owner, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        steps = self._steps = copy.copy(self._steps)  # another loop over this loader may not have ended
        rng, is_resuming = self._rng, True
        with self._observer.iterating() as current:
            iter(steps)
            while True:
                if self._rng is not rng:
                    raise UnsupportedFeatureError(
                        "`fabric.load` has changed the position of a loader inside of a loop over it. Leave the loop"
                        " after `fabric.load`, as the next one continues at the position of the checkpoint; or read"
                        " only weights with `fabric.load_raw`."
                    )
                if is_resuming:
                    rng.advance()
                    is_resuming = rng.is_resuming
                step = next(steps, None)
                if step is None:
                    break
                self._given += 1
                current.number = self._given
                self._observer.begin_batch(current, step[0], steps.fetched.popleft())
                yield step[0]
            self._observer.end_batch(current)

    def state(self) -> dict[str, Any]:
        """Return the position in the data, and the RNG state there, as plain values."""
        steps, used = self._steps, self._steps.begun
        epoch = self.epochs_begun - (used is not None)
        own = {EPOCH: epoch, USED: used, RNG: asdict(self._rng.record(used))}
        return own | steps.source.state_dict(steps, is_within_epoch=used is not None)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue at a position."""
        self._rng = ResumableRng(self._device)
        steps = self._steps = StepLoader(self._steps.flattened, "sequential", self._steps.source, self._rng)
        self.epochs_begun, steps.skip = state[EPOCH], state[USED] or 0
        if RNG in state:
            self._rng.resume(FetchRecord(**state[RNG]))
        steps.source.load_state_dict(steps, state, has_rng=RNG in state)
