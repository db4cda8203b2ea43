"""Images of different sizes with different numbers of boxes: a mean over boxes needs a weight by boxes.

Run it with `python examples/detection_batches.py`. In a mean over boxes, the weight of a chunk is its number of boxes,
not its number of images. `weight_by` takes a function that returns it; with the default weights the gradient differs
from the gradient of one device.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy

Target = dict[str, Tensor]
Batch = tuple[tuple[Tensor, ...], tuple[Target, ...]]


def scenes(number: int = 60) -> list[tuple[Tensor, Target]]:
    """Generate noisy images with 1 to 6 bright rectangles; the brightness is the class."""
    generator = torch.Generator().manual_seed(0)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    data = []
    for _ in range(number):
        image = 0.1 * torch.randn(1, between(20, 32), between(20, 32), generator=generator, dtype=torch.float64)
        boxes, labels = [], []
        for _ in range(between(1, 6)):
            height, width, label = between(3, 9), between(3, 9), between(0, 2)
            top, left = between(0, image.shape[1] - height), between(0, image.shape[2] - width)
            image[:, top : top + height, left : left + width] += 1.0 + label
            boxes.append([top, left, height, width])
            labels.append(label)
        data.append(
            (image, {"boxes": torch.tensor(boxes).reshape(-1, 4).long(), "labels": torch.tensor(labels).long()})
        )
    return data


def collate(samples: list[tuple[Tensor, Target]]) -> Batch:
    """Collate images of different shapes into tuples."""
    return tuple(zip(*samples, strict=True))  # type: ignore[return-value]


class CentreDetector(pl.LightningModule):
    """Predicts the class and the size of each box at its centre; independent of the strategy."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 8, 5, padding=2), nn.SiLU(), nn.Conv2d(8, 16, 5, padding=2), nn.SiLU()]
        self.network = nn.Sequential(*layers, nn.Conv2d(16, 3 + 2, 1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the mean over the boxes of all images."""
        predicted, boxes, labels = [], [], []
        for image, target in zip(*batch, strict=True):
            top, left, height, width = target["boxes"].T
            predicted.append(self.network(image[None])[0][:, top + height // 2, left + width // 2].T)
            boxes.append(target["boxes"][:, 2:].to(image) / 10)
            labels.append(target["labels"])
        outputs, sizes, classes = torch.cat(predicted), torch.cat(boxes), torch.cat(labels)
        loss = functional.cross_entropy(outputs[:, :3], classes) + functional.smooth_l1_loss(outputs[:, 3:], sizes)
        accuracy = (outputs[:, :3].argmax(1) == classes).double().mean()
        self.log_dict({"loss": loss, "accuracy": accuracy}, on_step=False, on_epoch=True, batch_size=len(classes))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class FirstGradient(pl.Callback):
    """Keeps the gradient of the first batch."""

    gradient: Tensor | None = None

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the gradient, flat."""
        if self.gradient is None:
            self.gradient = torch.cat([p.grad.flatten().clone() for p in pl_module.parameters() if p.grad is not None])


def train(strategy: Any, devices: int) -> dict[str, Tensor]:
    """Train from the same start; return the loss and the gradient of the first batch."""
    pl.seed_everything(0, verbose=False)
    module, first = CentreDetector(), FirstGradient()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, precision="64-true", max_epochs=5, callbacks=[first],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(scenes(), batch_size=8, collate_fn=collate))
    parameters = nn.utils.parameters_to_vector(module.parameters()).detach()
    assert first.gradient is not None
    return {"first gradient": first.gradient, "parameters": parameters, **trainer.callback_metrics}


def count_boxes(batch: Batch) -> float:
    """Return the weight of a chunk in a mean over boxes."""
    return float(sum(len(target["boxes"]) for target in batch[1]))


if __name__ == "__main__":
    weights: dict[str, str | Callable[[Batch], float]] = {"count_boxes": count_boxes, '"samples"': "samples"}
    expected = train("auto", devices=1)
    print(f"one device: loss {expected['loss']:.6f}, accuracy {expected['accuracy']:.6f}")
    largest = {}
    for name, weight_by in weights.items():
        found = train(BalancedDataParallelStrategy(split=[1, 2, 3], weight_by=weight_by), devices=3)
        differences = {key: float((found[key] - value).abs().max()) for key, value in expected.items()}
        print(f"three replicas, weight_by={name}: loss {found['loss']:.6f}; differences to one device:")
        print("   ", ", ".join(f"{key} {difference:.1e}" for key, difference in differences.items()))
        largest[name] = max(differences.values())
    if largest["count_boxes"] > 1e-9 or largest['"samples"'] < 1e-3:
        raise SystemExit("the runs do not compare as they should")
