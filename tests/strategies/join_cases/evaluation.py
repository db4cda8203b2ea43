"""Every sample counts once."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import AUROC, CatMetric, ConfusionMatrix, Metric, PearsonCorrCoef, SpearmanCorrCoef
from torchmetrics.retrieval import RetrievalMAP

from tests.strategies.join_cases.casing import case, trainer
from tests.strategies.join_ranks import samples


class Found(Metric):
    """Keeps what is found in each sample, as detection metrics do: entries of any length."""

    found: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("found", default=[], dist_reduce_fx=None)

    def update(self, scores: Tensor) -> None:
        self.found.extend(row[row > 0].reshape(-1, 1).float() for row in scores)

    def compute(self) -> tuple[float, float, float]:
        sizes = [len(entry) for entry in self.found]
        return float(len(sizes)), float(sum(sizes)), float(sum(entry.double().sum() for entry in self.found))


class Measuring(Callback):
    """A metric that the module does not know of."""

    def __init__(self) -> None:
        self.found = Found()

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.found.update(outputs)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        number, size, _ = self.found.compute()
        module.log_dict({"callback's number": number, "callback's size": size})


class Listing(LightningModule):
    """Has metrics whose states are lists."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(6, 3, bias=False)
        self.found = Found()
        self.means = CatMetric()  # of numbers
        self.metrics = nn.ModuleList([SpearmanCorrCoef(), PearsonCorrCoef(), RetrievalMAP(empty_target_action="skip")])

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.network(batch[1])
        self.found.update(scores)
        self.means.update(scores[0].sum())
        spearman, pearson, retrieval = self.metrics
        spearman.update(scores[:, 0].float(), batch[1][:, 0].float())
        pearson.update(scores[:, 0], batch[1][:, 0])
        retrieval.update(scores[:, 1], batch[2] == 1, indexes=batch[0] % 2)
        return scores

    def on_validation_epoch_end(self) -> None:
        number, size, total = self.found.compute()
        self.log_dict({"number": number, "size": size, "total": total})
        self.log("mean", self.means.compute().mean())
        for metric in self.metrics:
            self.log(type(metric).__name__, torch.nan_to_num(metric.compute()))


def evaluate_lists(number: int, **options: Any) -> dict[str, float]:
    """Validate with so many samples in all, each a batch."""
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(*samples(number)), batch_size=1)
    made = trainer(Measuring(), use_distributed_sampler=True, **options)
    return made.validate(Listing(), data, verbose=False)[0]


@case
def metrics_with_lists(folder: str) -> Any:
    return {number: evaluate_lists(number) for number in range(1, 11)}


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
