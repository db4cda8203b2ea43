"""Every sample counts once."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import AUROC, CatMetric, ConfusionMatrix

from tests.strategies.join_cases.casing import case, trainer
from tests.strategies.join_ranks import samples


class Evaluated(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(6, 3, bias=False)
        self.auroc = AUROC("multiclass", num_classes=3)
        self.confusion = ConfusionMatrix("multiclass", num_classes=3)
        self.indices = CatMetric()
        self.scores = CatMetric()
        self.collected: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.network(batch[1])
        losses = nn.functional.cross_entropy(scores, batch[2], reduction="none")
        self.auroc.update(scores.softmax(1), batch[2])
        self.confusion.update(scores, batch[2])
        self.indices.update(batch[0])
        self.scores.update(scores)
        self.log("loss", losses.mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("largest", losses.max(), sync_dist=True, reduce_fx="max")
        self.log("number", float(len(losses)), sync_dist=True, reduce_fx="sum")
        return batch[0]

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.collected.extend(outputs.tolist())
        self.log("hook", float(len(outputs)), sync_dist=True, reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        self.log("auroc", self.auroc.compute())
        self.log("seen", float(len(set(self.indices.compute().reshape(-1).tolist()))))
        self.log("scores", float(len(self.scores.compute())))
        self.confusion_matrix = self.confusion.compute().tolist()
        for metric in (self.auroc, self.confusion, self.indices, self.scores):
            metric.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        return batch[0].tolist()


def evaluate(number: int, **options: Any) -> tuple[dict[str, float], Any, list[int]]:
    """Validate with so many samples in all."""
    torch.manual_seed(0)
    module = Evaluated()
    data = DataLoader(TensorDataset(*samples(number)), batch_size=2)
    values = trainer(use_distributed_sampler=True, **options).validate(module, data, verbose=False)[0]
    return values, module.confusion_matrix, module.collected


@case
def evaluation(folder: str) -> Any:
    return {number: evaluate(number) for number in (1, 2, 3, 5, 8, 10)}


@case
def prediction(folder: str) -> Any:
    found = {}
    for number in (1, 2, 7):
        data = DataLoader(TensorDataset(*samples(number)), batch_size=2)
        batches = trainer(use_distributed_sampler=True).predict(Evaluated(), data)
        found[number] = [index for batch in batches or [] for index in batch]
    return found
