"""The models that are trained, and their data."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from measuring.scenarios import Mode, run_segment

CLASSES = 10
TINY = "60 tiny layers"
MANY = "1,000 tiny parameters"
TOY = "linear layer"
DEEP, SMALL, SMALL_CONV = "8 x 512 MLP", "small MLP", "two convolutions"
_DIFFERENT_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A network, the shape of a sample, and the size of a whole batch, however many devices share it."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int


Batch = tuple[Tensor, Tensor]


def _make_batches(batch_size: int, shape: tuple[int, ...]) -> list[Batch]:
    """Make random inputs and labels beforehand, so that loading costs next to nothing."""
    return [
        (torch.randn(batch_size, *shape), torch.randint(0, CLASSES, (batch_size,))) for _ in range(_DIFFERENT_BATCHES)
    ]


class ReadyBatches(Dataset[Batch]):
    """So many ready batches."""

    def __init__(self, length: int, batches: Sequence[Batch]) -> None:
        self._length, self._batches = length, batches

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index % _DIFFERENT_BATCHES]


class ReadyStream(IterableDataset[Batch]):
    """Ready batches in turn, so many of them or without end; how many cannot be asked."""

    def __init__(self, length: int | None, batches: Sequence[Batch]) -> None:
        super().__init__()
        self._length, self._batches = length, batches

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(itertools.cycle(self._batches), self._length)


def load(length: int | None, batch_size: int, shape: tuple[int, ...], is_sized: bool = False) -> DataLoader[Batch]:
    """Return a loader of so many batches, or without end; it has a length if asked for."""
    batches = _make_batches(batch_size, shape)
    dataset = ReadyBatches(length, batches) if length and is_sized else ReadyStream(length, batches)
    return DataLoader(dataset, batch_size=None)


class RepeatedSamples(Dataset[Tensor]):
    """A few random samples, often repeated."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._samples = torch.randn(64, *shape)

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Tensor:
        return self._samples[index % 64]


def load_samples(batch_size: int, shape: tuple[int, ...]) -> DataLoader[Tensor]:
    """Return a loader that collates samples, whose batches `balanced_ddp` can share."""
    return DataLoader(RepeatedSamples(shape), batch_size)


class Segmented(nn.Module):
    """A stem, segments whose activations are recomputed if `mode` says so, and a head.

    The stem is never recomputed: reentrant checkpointing needs an input that requires a gradient.
    """

    def __init__(self, stem: nn.Module, segments: Iterable[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.mode: Mode = "none"
        self.stem = stem
        self.segments = nn.ModuleList(segments)
        self.head = head

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the scores of the classes."""
        hidden = self.stem(inputs)
        for segment in self.segments:
            hidden = run_segment(segment, hidden, self.mode)
        outputs: Tensor = self.head(hidden)
        return outputs


class _MeanOfTokens(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean(1)


class _Residual(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + super().forward(inputs)
        return outputs


def _transformer() -> nn.Module:
    first, *others = (nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True) for _ in range(3))
    return Segmented(first, others, nn.Sequential(_MeanOfTokens(), nn.Linear(128, CLASSES)))


def _conv() -> nn.Module:
    blocks = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, CLASSES))


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())


def _layers(number: int, width: int) -> Iterator[nn.Sequential]:
    return (_layer(width, width) for _ in range(number))


def _many() -> nn.Module:
    # 500 layers with a weight and a bias each. Without the residuals gradients would fade to denormal numbers.
    segments = [_Residual(*_layers(6, 16)) for _ in range(83)]
    return Segmented(nn.Linear(16, 16), segments, nn.Linear(16, CLASSES))


CASES = {
    "conv net": Case(_conv, (3, 16, 16), 64),
    "transformer": Case(_transformer, (32, 128), 32),
    "MLP": Case(lambda: Segmented(_layer(512, 1024), [_layer(1024, 1024)], nn.Linear(1024, CLASSES)), (512,), 256),
    TINY: Case(lambda: nn.Sequential(nn.Linear(16, 16), *_layers(30, 16), nn.Linear(16, CLASSES)), (16,), 64),
    MANY: Case(_many, (16,), 64),
    TOY: Case(lambda: nn.Linear(4, CLASSES), (4,), 8),
}
REGRESSIONS = {
    DEEP: Case(lambda: nn.Sequential(*_layers(8, 512)), (512,), 32),
    SMALL: Case(lambda: nn.Sequential(_layer(16, 16), nn.Linear(16, 4)), (16,), 8),
    SMALL_CONV: Case(
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)),
        (3, 16, 16),
        16,
    ),
}
