"""How a result on a whole batch follows from the results on its parts."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["same", "rows", "sum", "mean", "none", "unknown"]
# Operations that order values or choose among them.
CHOICES = re.compile("(a|arg|cum|nan)?(max|min|median|sort|topk|kthvalue|quantile|unique)")


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation of a result on the whole batch to the results on the parts.

    Attributes:
        kind: `"same"` on all; `"rows"` are those of the parts together; their `"sum"`, or a weighted `"mean"`; `"none"`
            of these; `"unknown"` if no number says.
        weights: Of a mean, which add up to 1.
    """

    kind: Kind
    weights: tuple[float, ...] = ()


class Relations:
    """Finds relations.

    Args:
        sizes: Number of samples of each part.
        tolerance: Largest difference that rounding explains, relative to the largest number of a result.
    """

    def __init__(self, sizes: Sequence[int], tolerance: float) -> None:
        self._tolerance = tolerance
        total = sum(sizes)
        self.by_samples = tuple(size / total for size in sizes)
        # Weights of means, by what they are divided by: numbers that are sums over the parts, seen so far.
        self.known: list[tuple[float, ...]] = [self.by_samples]

    def find(self, name: str, whole: Tensor, parts: Sequence[Tensor], is_backward: bool) -> Relation:
        """Return the relation of the result of an operation."""
        if any(part.dim() != whole.dim() or part.dtype != whole.dtype for part in parts) or whole.is_sparse:
            return Relation("unknown")
        split = [
            dim for dim in range(whole.dim())
            if any(part.shape[dim] != whole.shape[dim] for part in parts)
        ]  # fmt: skip
        if len(parts) == 1:
            # An iteration over samples may add to what earlier ones have made.
            is_same = not split and self._are_close(parts[0].double(), whole.double())
            return Relation("same" if is_same else "unknown")
        if any(whole.shape[dim] != sum(part.shape[dim] for part in parts) for dim in split):
            return Relation("none" if CHOICES.fullmatch(name) and whole.is_floating_point() else "unknown")
        if len(split) == 1:
            self._learn([part.shape[split[0]] for part in parts])
        if not whole.is_floating_point():
            return self._of_integers(whole, parts, split)
        if not all(one.isfinite().all() for one in (whole, *parts)):
            return Relation("unknown")
        whole, parts = whole.double(), [part.double() for part in parts]
        if len(split) > 1:
            return Relation("none")
        if split:
            is_made = self._are_rows(whole, parts, split[0], is_backward, not CHOICES.fullmatch(name))
            return Relation("rows" if is_made else "none")
        return self._of_equal_shapes(whole, parts)

    def _of_integers(self, whole: Tensor, parts: Sequence[Tensor], split: Sequence[int]) -> Relation:
        """Integers may be positions, which differ: they say something only if they are equal or sums."""
        if split:
            return Relation("unknown")
        if all(torch.equal(whole, part) for part in parts):
            return Relation("same")
        if whole.dtype != torch.bool and torch.equal(whole, sum(parts[1:], parts[0])):
            if whole.numel() == 1:
                self._learn([part.item() for part in parts])
            return Relation("sum")
        return Relation("unknown")

    def _of_equal_shapes(self, whole: Tensor, parts: Sequence[Tensor]) -> Relation:
        if all(self._are_close(part, whole) for part in parts):
            return Relation("same")
        stacked = torch.stack([part.flatten() for part in parts], dim=1)
        flat = whole.flatten()
        if self._are_close(stacked.sum(1), flat):
            if whole.numel() == 1:
                self._learn([part.item() for part in parts])
            return Relation("sum")
        for weights in self.known:
            if self._are_close(stacked @ flat.new_tensor(weights), flat):
                return Relation("mean", weights)
        fitted = self.fit(stacked, flat)
        if fitted is not None and min(fitted) > -self._tolerance and abs(sum(fitted) - 1) < self._tolerance:
            return Relation("mean", fitted)
        return Relation("none")

    def _learn(self, counts: Sequence[float]) -> None:
        """Note what means may be divided by."""
        total = sum(counts)
        if min(counts) < 0 or not 0 < total < math.inf:
            return
        weights = tuple(count / total for count in counts)
        if not any(all(map(math.isclose, weights, one)) for one in self.known):
            self.known.append(weights)

    def _are_close(self, one: Tensor, other: Tensor) -> bool:
        if not one.numel():
            return True
        largest = float(torch.maximum(one.abs().max(), other.abs().max()))
        return float((one - other).abs().max()) <= self._tolerance * largest

    def fit(self, parts: Tensor, whole: Tensor) -> tuple[float, ...] | None:
        """Return the factors of columns `parts` whose sum is `whole`; None if they are not unique or there are none."""
        if len(whole) <= parts.shape[1]:
            return None
        found = torch.linalg.lstsq(parts, whole[:, None], driver="gelsd")
        if int(found.rank) < parts.shape[1] or not self._are_close((parts @ found.solution)[:, 0], whole):
            return None
        return tuple(found.solution[:, 0].tolist())

    def _are_rows(self, whole: Tensor, parts: Sequence[Tensor], dim: int, may_scale: bool, any_order: bool) -> bool:
        """Return True if the slices of the whole along a dimension are those of the parts, maybe in another order.

        In a backward pass each part may have a factor, since a mean over a part divides by less.
        """
        if may_scale:
            parts = [
                part * float((piece * part).sum() / square) if (square := part.square().sum()) else part
                for piece, part in zip(torch.split(whole, [part.shape[dim] for part in parts], dim), parts, strict=True)
            ]
        together = torch.cat([*parts], dim)
        if self._are_close(together, whole):
            return True
        if not any_order:
            return False
        # Rows in another order have the same projections, as of packed sequences or of time-major features.
        rows = [one.movedim(dim, 0).reshape(one.shape[dim], -1) for one in (whole, together)]
        direction = torch.linspace(1.0, 2.0, rows[0].shape[1], dtype=whole.dtype, device=whole.device)
        one, other = ((row @ direction).sort().values for row in rows)
        return self._are_close(one, other)
