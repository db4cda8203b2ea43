"""The models that are trained, and their data."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

CLASSES = 10
TINY = "60 tiny layers"
_DIFFERENT_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A network, and the batch that it is trained on.

    Args:
        build: Makes the network.
        shape: Shape of one sample.
        batch_size: Samples of a whole batch, however many devices share it.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int


class EndlessBatches(IterableDataset[tuple[Tensor, Tensor]]):
    """Ready batches of random inputs and labels in turn, so that loading costs next to nothing."""

    def __init__(self, batch_size: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._batches = [
            (torch.randn(batch_size, *shape), torch.randint(0, CLASSES, (batch_size,)))
            for _ in range(_DIFFERENT_BATCHES)
        ]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.cycle(self._batches)


def load_endlessly(batch_size: int, shape: tuple[int, ...]) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return a loader whose batches never end."""
    return DataLoader(EndlessBatches(batch_size, shape), batch_size=None)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.encoder(inputs).mean(1))
        return outputs


def _conv() -> nn.Module:
    blocks = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, CLASSES))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))


def _tiny() -> nn.Module:
    hidden = [layer for _ in range(30) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, 16), *hidden, nn.Linear(16, CLASSES))


CASES = {
    "conv net": Case(_conv, (3, 16, 16), 64),
    "transformer": Case(_Encoder, (32, 128), 32),
    "MLP": Case(_mlp, (512,), 256),
    TINY: Case(_tiny, (16,), 64),
}
