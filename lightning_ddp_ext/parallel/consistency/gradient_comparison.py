"""How far a weighted sum of the gradients of parts is from the gradient of the whole batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

_ROWS = 2**20  # elements that are compared at a time, in float64


class GradientComparison:
    """Compares gradients of the parts of a batch with the gradient of the whole batch, for any weights of the parts.

    Kept of each parameter is the triangular factor of a QR decomposition, whose columns are the parts and the whole.
    It has the norm of every linear combination of the columns, without the cancellation of scalar products.

    Args:
        parts: Number of parts.
    """

    def __init__(self, parts: int) -> None:
        self._factors: dict[str, Tensor] = {}
        self._parts = parts
        self._elements = 0

    def add(self, name: str, parts: Sequence[Tensor], whole: Tensor) -> None:
        """Add the gradients of one parameter.

        Args:
            name: Name of the parameter.
            parts: Its gradient from each part, flat and real.
            whole: Its gradient from the whole batch, likewise.
        """
        factor = torch.empty(0, self._parts + 1, dtype=torch.float64)
        for rows in zip(*(torch.split(column, _ROWS) for column in (*parts, whole)), strict=True):
            columns = torch.stack([row.detach().cpu().double() for row in rows], dim=1)
            factor = _triangle([factor, columns])
        self._factors[name] = factor
        self._elements += whole.numel()

    def difference(self, weights: Sequence[float]) -> float:
        """Return the norm of the difference of weighted parts and whole, relative to the norm of the whole."""
        return _relative(_triangle([*self._factors.values()]), weights)

    def most_different(self, weights: Sequence[float]) -> tuple[str, float]:
        """Return the parameter with the largest part of the difference, and its own relative difference."""
        norms = {name: _norm(factor, weights) for name, factor in self._factors.items()}
        name = max(norms, key=norms.__getitem__)
        return name, _relative(self._factors[name], weights)

    def fit(self) -> list[float] | None:
        """Return the weights with the least difference; None if several weights or any gradient would fit."""
        factor = _triangle([*self._factors.values()])
        parts, whole = factor[:, :-1], factor[:, -1]
        if self._elements <= self._parts or not factor.isfinite().all():
            return None
        if torch.linalg.matrix_rank(parts) < self._parts:
            return None
        weights: list[float] = torch.linalg.lstsq(parts, whole.unsqueeze(1)).solution.squeeze(1).tolist()
        return weights


def _triangle(blocks: Sequence[Tensor]) -> Tensor:
    factor: Tensor = torch.linalg.qr(torch.cat([*blocks]), mode="r").R
    return factor


def _norm(factor: Tensor, weights: Sequence[float]) -> float:
    return float((factor @ torch.tensor([*weights, -1.0], dtype=factor.dtype)).norm())


def _relative(factor: Tensor, weights: Sequence[float]) -> float:
    difference, whole = _norm(factor, weights), float(factor[:, -1].norm())
    return difference / whole if whole else difference and float("inf")
