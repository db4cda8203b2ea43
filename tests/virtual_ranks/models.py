"""Twelve small models whose training depends on all that virtual ranks have to keep, each with its options."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset

CLASSES, SIZE = 3, 8


class Images(Dataset):
    """Images with noise from every generator of the process, drawn when they are fetched."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.images = torch.randn(number, 1, SIZE, SIZE, generator=generator)
        self.labels = torch.randint(CLASSES, (number,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * (random.random() + numpy.random.rand()) + 0.1 * torch.randn(SIZE)
        return self.images[index] + noise, self.labels[index]


class Classifier(LightningModule):
    """A classifier of images; its optimizer is Adam unless another one is given."""

    def __init__(self, network: nn.Module, optimizer: Callable[..., Any] = torch.optim.Adam, lr: float = 0.01) -> None:
        super().__init__()
        self.network, self.optimizer, self.lr = network, optimizer, lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        loss = functional.cross_entropy(self.network(images.to(self.dtype)), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=self.lr)


class Contrastive(Classifier):
    """Compares two noisy views of the images of a virtual rank with each other."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        views = [functional.normalize(self.network(one + 0.3 * torch.randn_like(one))) for one in (batch[0], batch[0])]
        return functional.cross_entropy(views[0] @ views[1].T / 0.2, torch.arange(len(batch[0])))


class Averaged(Callback):
    """Keeps an exponential moving average of the network, in the module."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        module.average.update_parameters(module.network)


class Orthogonal(torch.optim.Optimizer):
    """Steps along orthogonalised momenta, as Muon does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            update = momentum.mul_(0.9).add_(parameter.grad)
            if update.dim() > 1:
                flat = update.flatten(1) / update.norm().clamp(min=1e-6)
                for _ in range(5):
                    flat = 1.5 * flat - 0.5 * flat @ flat.T @ flat
                update = flat.view_as(update)
            parameter.sub_(update, alpha=self.param_groups[0]["lr"])
        return loss


class Recurrent(nn.Module):
    """Two layers of an LSTM over the rows of an image, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(SIZE, 8, 2, batch_first=True, dropout=0.2), nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.recurrent(images.squeeze(1))[0][:, -1])


class Attention(nn.Module):
    """A layer of a transformer over the rows of an image, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(SIZE, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(SIZE, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer(images.squeeze(1)).mean(1))


def convolutions() -> nn.Module:
    """Return a network with batch normalisation."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))


def perceptron(outputs: int = CLASSES) -> nn.Module:
    """Return a network with dropout."""
    hidden = nn.Sequential(nn.Linear(SIZE * SIZE, 12), nn.Dropout(0.2), nn.Tanh())
    return nn.Sequential(nn.Flatten(), hidden, nn.Linear(12, outputs))


def with_average() -> Classifier:
    """Return a module with a moving average of its network."""
    module = Classifier(perceptron())
    module.average = AveragedModel(module.network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    module.average.requires_grad_(False)
    return module


def uneven_weight(batch: Any) -> float:
    """Return a weight that no type of numbers represents exactly."""
    return float(sum(0.1 + 0.3 * label for label in batch[1].tolist()))


@dataclass(frozen=True)
class Model:
    """A model with options of its trainer and of the strategy, and the number of its samples."""

    make: Callable[[], LightningModule]
    trainer: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], Callback], ...] = ()
    samples: int = 44


MODELS = {
    "convolutions with batch normalisation": Model(lambda: Classifier(convolutions())),
    "transformer with dropout": Model(lambda: Classifier(Attention())),
    "LSTM": Model(lambda: Classifier(Recurrent())),
    "contrastive": Model(lambda: Contrastive(perceptron(6))),
    "bfloat16": Model(lambda: Classifier(perceptron()), {"precision": "bf16-mixed"}),
    "accumulation": Model(
        lambda: Classifier(convolutions()), {"accumulate_grad_batches": 2}, {"weight_by": uneven_weight}
    ),
    "clipping": Model(lambda: Classifier(perceptron(), torch.optim.SGD, lr=0.5), {"gradient_clip_val": 0.2}),
    "activation checkpointing": Model(
        lambda: Classifier(perceptron()), {}, {"activation_checkpointing": nn.Sequential}
    ),
    "moving average": Model(with_average, callbacks=(Averaged,)),
    "orthogonalised momenta": Model(lambda: Classifier(convolutions(), Orthogonal)),
    "float64": Model(lambda: Classifier(convolutions()).double(), {"precision": "64-true"}),
    "last batch of 3": Model(lambda: Classifier(convolutions()), samples=35),
}
