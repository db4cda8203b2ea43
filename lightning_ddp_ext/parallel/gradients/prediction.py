"""What the last backward pass of the same kind did: when a bucket of gradients is probably complete."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_ddp_ext.parallel.gradients.bucket import GradientBucket

NEVER = -1
_KINDS = 16  # remembered kinds of backward pass; a model with more of them overlaps less


class BackwardPredictor:
    """Counts gradients per parameter, and expects the counts of the last backward pass that began in the same way.

    The parameter that gets the first gradient tells kinds of backward pass apart: those of the two networks of a GAN,
    or of tasks that alternate, begin at different last layers.

    Attributes:
        counts: Gradients that each parameter has had in this synchronisation.
        expected: How many it will have had when it is complete, `NEVER` if nothing is known.
        order: Parameters in the order of their gradients, with repetitions; filled in by the reducer.
    """

    def __init__(self, parameters: int) -> None:
        self.counts = [0] * parameters
        self.expected = [NEVER] * parameters
        self.order: list[int] = []
        self.kind: int | None = None
        self._remembered: dict[int, tuple[list[int], list[int]]] = {}

    def begin(self) -> None:
        """Forget the counts: a synchronisation begins."""
        self.counts[:] = [0] * len(self.counts)
        self.expected[:] = [NEVER] * len(self.expected)
        self.order.clear()
        self.kind = None

    def recognize(self, first: int, buckets: Sequence[GradientBucket]) -> bool:
        """Set what is expected of a backward pass, from the first parameter that has got a gradient.

        Args:
            first: Number of the parameter.
            buckets: Told how many of their parameters are missing.

        Returns:
            Whether such a backward pass is known.
        """
        self.kind = first
        if first not in self._remembered:
            return False
        counts, missing = self._remembered[first]
        self.expected[:] = counts
        for bucket, number in zip(buckets, missing, strict=True):
            bucket.missing = number
        return True

    def learn(self, buckets: Sequence[GradientBucket]) -> None:
        """Remember this backward pass, for the next one of its kind."""
        if self.kind is None:
            return
        known = self._remembered.get(self.kind)
        if known is not None and known[0] == self.counts and len(known[1]) == len(buckets):
            return
        if known is None and len(self._remembered) == _KINDS:
            del self._remembered[next(iter(self._remembered))]
        missing = [sum(self.counts[member] > 0 for member in bucket.members) for bucket in buckets]
        self._remembered[self.kind] = list(self.counts), missing

    def state(self) -> list[list[Any]]:
        """Return what is remembered, as numbers and lists."""
        return [[kind, *remembered] for kind, remembered in self._remembered.items()]

    def load(self, state: Iterable[Sequence[Any]]) -> None:
        """Remember what another predictor did, for the same buckets."""
        self._remembered = {kind: (list(counts), list(missing)) for kind, counts, missing in state}

    def forget(self) -> None:
        """Forget every kind: the buckets are others now."""
        self._remembered.clear()
