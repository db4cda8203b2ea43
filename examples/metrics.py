"""Every way of measuring and logging inside a step has the same values on one device and on three replicas.

Run it with `python examples/metrics.py`. Each replica updates separate metrics with its chunk. After the step these are
merged into the metrics of the module, so that metrics that are not means over samples are correct as well.
"""

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics as tm
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import classification, wrappers

from lightning_ddp_ext import BalancedDataParallelStrategy

CLASSES = 3


class Trend(tm.Metric):
    """A custom metric whose updates need the whole state, and the batches in order."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("trend", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Move a little towards the mean of a batch."""
        self.trend = 0.9 * self.trend + 0.1 * values.mean()

    def compute(self) -> Tensor:
        """Return the trend."""
        return self.trend


class Measured(pl.LightningModule):
    """Classifies points; `step` and `epoch` in the keys name the rate of logging."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.accuracy = classification.MulticlassAccuracy(CLASSES)  # states that are summed
        self.auroc = classification.MulticlassAUROC(CLASSES)  # lists of all scores
        self.largest = tm.MaxMetric()
        self.pearson = tm.PearsonCorrCoef()  # states that cannot be merged one by one
        self.trend = Trend()
        self.named = nn.ModuleDict({"mean": tm.MeanMetric(), "smallest": tm.MinMetric()})
        group = [kind(CLASSES) for kind in (classification.MulticlassPrecision, classification.MulticlassRecall)]
        self.group = tm.MetricCollection([*group, classification.MulticlassF1Score(CLASSES)])  # share one state
        self.range = wrappers.MinMaxMetric(classification.MulticlassAccuracy(CLASSES))
        self.by_class = wrappers.ClasswiseWrapper(classification.MulticlassRecall(CLASSES, average=None))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the cross-entropy of a batch, and measure it in every way."""
        points, labels = batch
        logits = self.network(points)
        loss = functional.cross_entropy(logits, labels)
        scores, heights = logits.detach().softmax(-1), points[:, 1]
        self.accuracy(scores, labels)
        self.auroc.update(scores, labels)
        self.largest.update(heights)
        self.pearson(points[:, 0], heights)
        self.trend(heights)
        self.named["mean"](loss.detach(), weight=len(labels))
        self.named["smallest"](heights)
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        self.log_dict({"loss": loss, "own size": loss}, **both, batch_size=len(labels))
        self.log("highest", heights.max(), **both, reduce_fx="max")
        self.log("sum", heights.sum(), **both, reduce_fx="sum")
        self.log_dict({"accuracy": self.accuracy, "pearson": self.pearson, "trend": self.trend}, **both)
        self.log_dict({"auroc": self.auroc, "largest": self.largest}, on_step=False, on_epoch=True)
        self.log_dict({"mean": self.named["mean"], "smallest": self.named["smallest"]}, **both)
        # `forward` returns the value of the chunk, but the logged value is the value of the batch.
        self.log_dict({f"group {key}": value for key, value in self.group(scores, labels).items()}, **both)
        self.log_dict({f"range {key}": value for key, value in self.range(scores, labels).items()}, **both)
        self.log_dict(self.by_class(scores, labels), **both)
        upper = heights > 1
        if upper.any():  # not on every replica
            self.log("upper", heights[upper].mean(), on_step=False, on_epoch=True, batch_size=int(upper.sum()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def train(strategy: Any, devices: int) -> dict[str, float]:
    """Train for three epochs, the last batch of each smaller than the others; return the last logged values."""
    pl.seed_everything(0, verbose=False)
    points = torch.randn(236, 2, dtype=torch.float64)
    labels = torch.bucketize(points.sum(1) + 0.5 * torch.randn(236), torch.tensor([-0.7, 0.7]))
    module = Measured()
    for metric in module.modules():
        if isinstance(metric, tm.Metric):
            metric.set_dtype(torch.float64)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, precision="64-true", max_epochs=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(points, labels), batch_size=32))
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    one = train("auto", devices=1)
    three = train(BalancedDataParallelStrategy(split=[1, 2, 3]), devices=3)
    print(f"{'key':36} {'one device':>13} {'three replicas':>15} {'difference':>11}")
    for key, value in one.items():
        print(f"{key:36} {value:13.9f} {three[key]:15.9f} {abs(value - three[key]):11.1e}")
    if one.keys() != three.keys() or any(not abs(one[key] - three[key]) <= 1e-9 for key in one):
        raise SystemExit("the two runs differ")
