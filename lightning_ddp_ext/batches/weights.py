"""Weights of the parts of a batch, for combining their losses, gradients and logged values, and counters of samples."""

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, get_args

from lightning_ddp_ext.batches.label_weights import TokenCount

_Name = Literal["samples", "tokens", "equal", "sum"]
WeightBy = _Name | Callable[[Any], float]


class WeightRule:
    """A checked `weight_by`: the weight of a batch or chunk, and whether losses are added up or averaged.

    `inform` is called once with a sentence on the weights, if a batch has to show what they are.
    """

    def __init__(self, weight_by: WeightBy, inform: Callable[[str], None]) -> None:
        names = get_args(_Name)
        if not callable(weight_by) and weight_by not in names:
            raise ValueError(
                f"`weight_by` must be one of {', '.join(map(repr, names))} or a callable `batch -> float`, got"
                f' {weight_by!r}. Use "samples" for a loss that is a mean over samples.'
            )
        self.is_sum = weight_by == "sum"  # losses are sums: gradients are added up, not averaged
        self.is_by_samples = weight_by == "samples"
        self.function = TokenCount() if weight_by == "tokens" else weight_by if callable(weight_by) else None
        self._inform: Callable[[str], None] | None = inform
        self._has_warned = False

    def weigh(self, batch: Any, samples: float) -> float:
        """Return the weight of a batch or chunk with this number of samples."""
        if self.function is None:
            return float(samples) if self.is_by_samples else 1.0
        weight = float(self.function(batch))
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"`weight_by` returned {weight} for a batch. Return a finite number of at least 0, such as its number"
                " of samples or tokens."
            )
        if self._inform is not None and isinstance(self.function, TokenCount) and self.function.finding is not None:
            self._inform(f"{self.function.finding}.")
            self._inform = None
        return weight

    def normalize(self, weights: Sequence[float]) -> list[float]:
        """Return the factors of the parts' losses: the weights of sums, else divided by their total; all may be 0."""
        total = 1.0 if self.is_sum else sum(weights)
        return [weight / total if total else 0.0 for weight in weights]

    def warn_of_skip(self, part: str) -> None:
        """Warn, the first time only, that `training_step` has returned None on `part`, such as `"rank 1"`."""
        message = (
            f"`training_step` returned None on {part}, whose samples have no weight in the gradient of this step."
            " Ignore this if it is on purpose. Log with `sync_dist=True` before returning None, if at all."
        )
        if not self._has_warned:
            warnings.warn(message, category=UserWarning, stacklevel=3)
        self._has_warned = True


class SampleCounters:
    """Recognises numbers that each part of a batch has raised by its number of samples.

    With parts of one sample, a counter of samples looks like a counter of steps: earlier steps decide.
    """

    def __init__(self) -> None:
        self._known: set[Hashable] = set()

    def recognise(self, key: Hashable, raised: Sequence[float], sizes: Sequence[float]) -> bool:
        """Return True if the number called `key` counts samples, given by how much each part has raised it."""
        if list(raised) != list(sizes) or (set(sizes) == {1} and key not in self._known):
            return False
        self._known.add(key)
        return True
