"""What is concluded from the rounds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from measuring.estimates import Estimate, floor_of_ratio
from measuring.rounds import Measurement, Round

BALANCED = "balanced_dp"
DDP = "ddp"


def name_device(threads: int) -> str:
    """Return the name of the contender with one device and so many threads."""
    return f"one device, threads: {threads}"


@dataclass(frozen=True, slots=True)
class StepResult:
    """The training steps of one model.

    Args:
        measurement: Rounds of all contenders.
        threads: The numbers of threads that were tried on one device.
    """

    measurement: Measurement
    threads: Sequence[int]

    @property
    def devices(self) -> dict[int, str]:
        """The contenders with one device, by their number of threads."""
        return {threads: name_device(threads) for threads in self.threads}

    @property
    def best_device(self) -> str | None:
        """The fastest of the contenders with one device, or None if too few rounds count."""
        return self.measurement.fastest(self.devices.values())

    @property
    def ratio_to_device(self) -> Estimate | None:
        """Time of `balanced_dp` relative to the best one device."""
        best = self.best_device
        return None if best is None else self.measurement.ratio(BALANCED, best)

    @property
    def ratio_to_ddp(self) -> Estimate | None:
        """Time of `balanced_dp` relative to Lightning's `ddp` with as many processes as there are replicas."""
        return self.measurement.ratio(BALANCED, DDP)

    def to_json(self) -> dict[str, Any]:
        """Return the conclusions and everything that was measured."""
        names = [*self.devices.values(), DDP, BALANCED]
        return {
            "best one device": self.best_device,
            "ratio to best one device": estimate_to_json(self.ratio_to_device),
            "ratio to ddp": estimate_to_json(self.ratio_to_ddp),
            "seconds": {name: estimate_to_json(self.measurement.time(name)) for name in names},
            **self.measurement.to_json(),
        }


@dataclass(frozen=True, slots=True)
class OverheadResult:
    """The fits of a model that costs nothing.

    Args:
        measurement: Rounds of all strategies, each with and without logging.
        names: The strategies, the reference first.
        keys: How many values are logged with logging.
    """

    measurement: Measurement
    names: Sequence[str]
    keys: int

    @staticmethod
    def name_contender(name: str, keys: int) -> str:
        """Return what the rounds call a strategy that logs so many keys."""
        return f"{name}, logged keys: {keys}"

    def start_up(self, name: str) -> Estimate | None:
        """Seconds from the call of `fit` until the first step."""
        return self._extra(name, "start_up")

    def first_step(self, name: str) -> Estimate | None:
        """Seconds of the first step."""
        return self._extra(name, "first_step")

    def _extra(self, name: str, time: str) -> Estimate | None:
        contender = self.name_contender(name, 0)
        return self.measurement.estimate(lambda round_: round_[contender].extra[time])

    def step(self, name: str) -> Estimate | None:
        """Seconds of a later step without logging."""
        return self.measurement.time(self.name_contender(name, 0))

    def more_per_step(self, name: str) -> Estimate | None:
        """Seconds of a later step without logging, less those of the reference; None for the reference itself."""
        if name == self.names[0]:
            return None
        ours, reference = self.name_contender(name, 0), self.name_contender(self.names[0], 0)
        return self.measurement.estimate(lambda round_: round_[ours].mean - round_[reference].mean)

    def per_key(self, name: str) -> Estimate | None:
        """Seconds that one logged value adds to a step."""
        without, logging = self.name_contender(name, 0), self.name_contender(name, self.keys)
        return self.measurement.estimate(lambda round_: (round_[logging].mean - round_[without].mean) / self.keys)

    def to_json(self) -> dict[str, Any]:
        """Return the conclusions and everything that was measured."""
        seconds = {
            name: {
                "fit until first step": estimate_to_json(self.start_up(name)),
                "first step": estimate_to_json(self.first_step(name)),
                "step": estimate_to_json(self.step(name)),
                "step minus one device": estimate_to_json(self.more_per_step(name)),
                "logged key": estimate_to_json(self.per_key(name)),
            }
            for name in self.names
        }
        return {"seconds": seconds, **self.measurement.to_json()}


@dataclass(frozen=True, slots=True)
class LockResult:
    """Bare passes in threads.

    Args:
        measurement: Rounds of forward and backward in each of the ways.
    """

    measurement: Measurement

    PASSES: ClassVar[dict[str, tuple[str, ...]]] = {
        "forward": ("forward",),
        "backward": ("backward",),
        "both": ("forward", "backward"),
    }
    WAYS: ClassVar = ((1, 1), (1, 2), (2, 2))  # number of threads, and what the whole batch is divided by

    @staticmethod
    def name_contender(direction: str, threads: int, share: int) -> str:
        """Return what the rounds call passes in so many threads, each with a share of the batch."""
        return f"{direction}, threads: {threads}, batch / {share}"

    def time(self, passes: str, threads: int, share: int) -> Estimate | None:
        """Seconds of forward, backward or both."""
        return self.measurement.estimate(lambda round_: self._seconds(round_, passes, threads, share))

    def ratio(self, passes: str) -> Estimate | None:
        """Time of two threads with half of the batch each, relative to one thread with all of it."""
        return self.measurement.estimate(
            lambda round_: self._seconds(round_, passes, 2, 2) / self._seconds(round_, passes, 1, 1)
        )

    def _seconds(self, round_: Round, passes: str, threads: int, share: int) -> float:
        return sum(round_[self.name_contender(name, threads, share)].mean for name in self.PASSES[passes])

    def floor(self, steps: StepResult) -> float | None:
        """Return the ratio to the best one device that two threads cannot beat; see `floor_of_ratio`.

        Args:
            steps: Training steps of the same model.

        Returns:
            None if too few rounds count, or if one device with one thread was not tried.
        """
        best = steps.best_device
        if best is None or 1 not in steps.threads:
            return None
        estimates = (
            steps.measurement.time(name_device(1)),
            steps.measurement.time(best),
            self.time("both", 1, 1),
            self.time("both", 2, 2),
        )
        known = [estimate.median for estimate in estimates if estimate is not None]
        return floor_of_ratio(*known) if len(known) == len(estimates) else None

    def to_json(self) -> dict[str, Any]:
        """Return the conclusions and everything that was measured."""
        ratios = {passes: estimate_to_json(self.ratio(passes)) for passes in self.PASSES}
        return {"two threads / one thread": ratios, **self.measurement.to_json()}


def estimate_to_json(estimate: Estimate | None) -> dict[str, float] | None:
    """Return the numbers of an estimate by name."""
    return None if estimate is None else asdict(estimate)
