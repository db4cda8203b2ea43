"""What steps log and communicate while some ranks have no data."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric

from tests.strategies.join_cases.casing import RANK, case, fit, loader
from tests.strategies.join_ranks import Classifier


class InTheStep(Classifier):
    """Logs, gathers and reduces in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = MaxMetric(dist_sync_on_step=True)
        self.mean_rank = MeanMetric()
        self.shared = MeanMetric(dist_sync_on_step=True)
        self.found: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        own = torch.tensor(RANK + 1.0)
        for name in ("mean", "sum", "max", "min"):
            self.log(name, own, sync_dist=True, reduce_fx=name, on_step=True, on_epoch=False)
        self.log("own", own, on_step=True, on_epoch=False)
        self.shared(own.double())
        self.log("shared", self.shared, on_step=True, on_epoch=False)
        scale = self.network[2].bias.sum() * own
        gathered = self.all_gather(scale, sync_grads=True)
        total = own.clone()
        dist.all_reduce(total)
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, f"rank {RANK}")
        self.found.append(
            {
                "rows": len(gathered),
                "rows of a dictionary": len(self.all_gather({"a": own})["a"]),
                "total": total.item(),
                "names": names,
                "largest": self.largest(-own).item(),
            }
        )
        self.mean_rank.update(own)
        self.mean_rank.compute()  # of the ranks that have data
        self.log("mean_rank", self.mean_rank, on_step=False, on_epoch=True)
        return loss + gathered.sum()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("start", RANK + 1.0, sync_dist=True, on_step=True, on_epoch=True)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.log("end", RANK + 1.0, sync_dist=True, on_step=True, on_epoch=False)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", RANK + 1.0, sync_dist=True)


@case
def in_the_step(folder: str) -> Any:
    module = InTheStep()
    made, trace = fit(module)
    metrics = {name: float(value) for name, value in made.callback_metrics.items()}
    return module.found, trace.metrics, metrics, trace.digests


@case
def a_step_that_weighs_nothing(folder: str) -> Any:
    """What is logged in a step counts once per rank with data, where `weight_by` gives 0 on all of them."""

    class Weightless(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            for name in ("mean", "sum", "max", "min"):
                self.log(name, RANK + 1.0, sync_dist=True, reduce_fx=name, on_step=True, on_epoch=False)
            self.log("over_epoch", RANK + 1.0, sync_dist=True, on_step=False, on_epoch=True)
            return self.loss(batch)

    made, trace = fit(Weightless(), loader(4, 4, 2), strategy={"weight_by": lambda batch: 0.0})
    return trace.metrics, float(made.callback_metrics["over_epoch"])


@case
def a_metric_over_epochs(folder: str) -> Any:
    """A rank that never has data for validation."""

    class Measured(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.mean.update(RANK + 1.0)
            self.log("metric", self.mean)

    made, _ = fit(Measured(), loader(2, 2, 2), loader(4, 2, 0), max_epochs=3)
    return float(made.callback_metrics["metric"])
