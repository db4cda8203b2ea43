"""Weighted sums of the gradients of parts, beside the gradient of the whole."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Gradients = Sequence[tuple[str, Tensor]]
"""Gradients of parameters with their names, as vectors in float64."""


class GradientFit:
    """Compares weighted sums of the gradients of the parts with the gradient of the whole batch.

    Attributes:
        fitted: The weights with the least difference; None if they are not unique, or fit any gradient.
    """

    def __init__(self, whole: Gradients, parts: Sequence[Gradients]) -> None:
        self._names, self._numbers = [name for name, _ in whole], [len(one) for _, one in whole]
        self._whole = torch.cat([one for _, one in whole])
        self._parts = torch.stack([torch.cat([one for _, one in part]) for part in parts], dim=1)
        self.fitted: list[float] | None = None
        used = int(((self._parts != 0).any(1) | (self._whole != 0)).sum())
        if used > len(parts) and self._parts.isfinite().all() and self._whole.isfinite().all():
            fit = torch.linalg.lstsq(self._parts, self._whole.unsqueeze(1), driver="gelsd")
            self.fitted = fit.solution.squeeze(1).tolist() if fit.rank == len(parts) else None

    def difference(self, weights: Sequence[float]) -> float:
        """Return the norm of the difference between weighted parts and whole, relative to the norm of the whole."""
        return _relative(self._residual(weights), self._whole)

    def worst(self, weights: Sequence[float]) -> tuple[str, float]:
        """Return the parameter with the largest part of the difference, and its relative difference."""
        split = (torch.split(vector, self._numbers) for vector in (self._residual(weights), self._whole))
        by_name = dict(zip(self._names, zip(*split, strict=True), strict=True))
        name = max(by_name, key=lambda name: float(by_name[name][0].norm()))
        return name, _relative(*by_name[name])

    def _residual(self, weights: Sequence[float]) -> Tensor:
        return self._parts @ torch.tensor(weights, dtype=torch.float64) - self._whole


def _relative(difference: Tensor, whole: Tensor) -> float:
    size, norm = float(difference.norm()), float(whole.norm())
    return size / norm if norm else size and math.inf
