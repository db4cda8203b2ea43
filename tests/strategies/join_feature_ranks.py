"""What users' code does while ranks have different amounts of data; kept apart because every rank imports it."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import AUROC, CatMetric, ConfusionMatrix, MaxMetric, MeanMetric

from lightning_ddp_ext import DDPJoinStrategy
from lightning_ddp_ext.errors import DDPExtError
from tests.strategies.ddp_modules import Adversaries
from tests.strategies.ddp_ranks import quiet_trainer
from tests.strategies.join_ranks import Classifier, Stream, Trace, digest_of, samples

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
COUNTS = (8, 4, 2)  # samples of each rank, in batches of two
_CASES: dict[str, Callable[[str], Any]] = {}


def case(function: Callable[[str], Any]) -> Callable[[str], Any]:
    _CASES[function.__name__] = function
    return function


def run_cases(folder: str) -> dict[str, Any]:
    """Run every case on this rank; returns what it returns, or the error."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for name, function in _CASES.items():
        seed_everything(0, verbose=False)
        try:
            found[name] = function(folder)
        except (DDPExtError, ArithmeticError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def loader(*counts: int, stream: bool = False) -> DataLoader:
    """This rank's samples, numbered over all ranks."""
    parts = torch.split(torch.arange(sum(counts)), counts)[RANK]
    data = TensorDataset(*(part[parts] for part in samples(sum(counts))))
    return DataLoader(Stream(list(data)) if stream else data, batch_size=2)


def trainer(*callbacks: Callback, strategy: Any = None, **options: Any) -> Trainer:
    return quiet_trainer(
        **{
            "strategy": strategy if isinstance(strategy, str) else DDPJoinStrategy(**(strategy or {})),
            "devices": WORLD_SIZE,
            "precision": "64-true",
            "max_epochs": 1,
            "num_sanity_val_steps": 0,
            "callbacks": list(callbacks),
            **options,
        }
    )


def fit(module: LightningModule, *loaders: Any, **options: Any) -> tuple[Trainer, Trace]:
    trace = Trace()
    made = trainer(trace, *options.pop("callbacks", ()), **options)
    made.fit(module, *(loaders or [loader(*COUNTS)]))
    return made, trace


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


class InTheStep(Classifier):
    """Logs, gathers and reduces in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = MaxMetric(dist_sync_on_step=True)
        self.mean_rank = MeanMetric()
        self.found: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        own = torch.tensor(RANK + 1.0)
        for name in ("mean", "sum", "max", "min"):
            self.log(name, own, sync_dist=True, reduce_fx=name, on_step=True, on_epoch=False)
        self.log("own", own, on_step=True, on_epoch=False)
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


@case
def a_broadcast_from_a_joined_rank(folder: str) -> Any:
    class Broadcasting(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            dist.broadcast(torch.zeros(1), 2)
            return self.loss(batch)

    fit(Broadcasting())


class OddKeys(Classifier):
    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def _log_in(self, hook: str) -> None:
        if RANK == 1 and hook == self.hook:
            self.log("odd", 1.0, sync_dist=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._log_in("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log_in("validation_step")
        super().validation_step(batch, batch_idx)


@case
def keys_that_differ_in_training(folder: str) -> Any:
    fit(OddKeys("training_step"))


@case
def keys_that_differ_in_validation(folder: str) -> Any:
    fit(OddKeys("validation_step"), loader(2, 2, 2), loader(*COUNTS))


@case
def keys_in_another_order(folder: str) -> Any:
    class Shuffled(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            for name in ("a", "b") if RANK else ("b", "a"):
                self.log(name, {"a": 1.0, "b": 2.0}[name], sync_dist=True)

    made, _ = fit(Shuffled(), loader(2, 2, 2), loader(*COUNTS))
    return float(made.callback_metrics["a"]), float(made.callback_metrics["b"])


@case
def batches_that_are_changed(folder: str) -> Any:
    class Changing(Classifier):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            batch["features"] = batch.pop("raw")
            return batch

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.network(batch.pop("features").double()), batch["labels"])

    number = COUNTS[RANK] // 2
    _, features, labels = samples(2 * number)
    batches = [{"raw": features[i : i + 2], "labels": labels[i : i + 2]} for i in range(0, 2 * number, 2)]
    return fit(Changing(), DataLoader(batches, batch_size=None), max_epochs=1)[1].digests


@case
def several_loaders(folder: str) -> Any:
    found = {}
    for mode in ("min_size", "max_size", "max_size_cycle"):

        class Several(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                parts = [part for part in batch.values() if part is not None]
                self.seen.append([part[0].tolist() for part in parts])
                return sum(self.loss(part) for part in parts)

        module = Several()
        combined = CombinedLoader({"a": loader(8, 2, 4), "b": loader(2, 6, 4, stream=mode == "max_size")}, mode)
        _, trace = fit(module, combined, strategy={"weight_by": "ranks"})
        found[mode] = (module.seen, trace.ghosts, trace.digests)
    return found


@case
def normalisation(folder: str) -> Any:
    module = Classifier()
    module.network.insert(1, nn.BatchNorm1d(8))
    return fit(module, max_epochs=2)[1].digests


@case
def manual_optimization(folder: str) -> Any:
    module = Adversaries()
    parts = [part[1][:, :5] for part in loader(*COUNTS)]
    made = trainer(max_epochs=2)
    made.fit(module, DataLoader([(part, part) for part in parts], batch_size=None))
    return made.global_step, [digest_of(module, optimizer) for optimizer in made.optimizers]


@case
def resuming(folder: str) -> Any:
    """Resume in an epoch: before any rank has joined, and in the tail."""
    found = {}
    for steps in (1, 3, 6):
        whole = fit(Classifier(), max_epochs=2)[1].digests
        seed_everything(0, verbose=False)
        saving = ModelCheckpoint(f"{folder}/{steps}", every_n_train_steps=steps, save_top_k=-1)
        fit(Classifier(), max_epochs=2, max_steps=steps, callbacks=[saving], enable_checkpointing=True)
        trace = Trace()
        trainer(trace, max_epochs=2).fit(
            Classifier().double(), loader(*COUNTS), ckpt_path=_broadcast(saving.best_model_path), weights_only=False
        )
        found[steps] = (trace.digests, whole[steps:])
        seed_everything(0, verbose=False)
    return found


def _broadcast(path: str) -> str:
    paths = [path]
    dist.broadcast_object_list(paths, 0)
    return str(paths[0])


@case
def stopping_at_the_shortest(folder: str) -> Any:
    module = Classifier()
    trace = fit(module, strategy={"uneven_inputs": "stop"})[1]
    return trace.ghosts, module.seen, trace.digests


@case
def refusing_uneven_data(folder: str) -> Any:
    fit(Classifier(), strategy={"uneven_inputs": "error"})


@case
def refusing_uneven_streams(folder: str) -> Any:
    fit(Classifier(), loader(*COUNTS, stream=True), strategy={"uneven_inputs": "error"})


@case
def a_failure_in_the_tail(folder: str) -> Any:
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise ArithmeticError("boom")
            return super().training_step(batch, batch_idx)

    fit(Failing())
