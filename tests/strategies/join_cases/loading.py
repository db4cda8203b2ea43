"""Batches and loaders."""

from typing import Any
from unittest import mock

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_ext.join import combined_loader
from tests.strategies.join_cases.casing import COUNTS, RANK, case, fit, loader
from tests.strategies.join_ranks import Classifier, Stream, samples


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
def batches_that_cannot_be_copied(folder: str) -> Any:
    """Features of a network that is part of the data, from which torch copies nothing."""

    class Remembering(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.on_shadow_ranks: list[list[int]] = []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.strategy.is_shadow:
                self.on_shadow_ranks.append(batch[0].tolist())

    number = COUNTS[RANK]
    indices, features, labels = samples(number)
    scale = torch.ones((), requires_grad=True)
    batches = [
        (10 * RANK + indices[i : i + 2], features[i : i + 2] * scale, labels[i : i + 2]) for i in range(0, number, 2)
    ]
    module = Remembering()
    digests = fit(module, DataLoader(batches, batch_size=None), max_epochs=1)[1].digests
    return digests, module.on_shadow_ranks


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
        _, trace = fit(module, combined, strategy={"weight_by": "equal"})
        found[mode] = (module.seen, trace.shadow_ranks, trace.digests)
    return found


@case
def what_stopping_leaves_out(folder: str) -> Any:
    """Of loaders with 4, 3 and 1 batches."""
    dropping = DataLoader(loader(8, 5, 2).dataset, batch_size=2, drop_last=True)
    kinds = {
        "sized": (loader(8, 5, 2), {}),
        "limited": (loader(8, 5, 2), {"limit_train_batches": 2}),
        "without last batches": (dropping, {}),
        "streams": (loader(8, 5, 3, stream=True), {"limit_train_batches": 4}),
        "finished batches": (DataLoader(Stream(list(loader(8, 5, 2))), batch_size=None), {"limit_train_batches": 4}),
        "with short last batches": (loader(4, 3, 2), {}),
    }
    found = {}
    for name, (given, options) in kinds.items():
        with mock.patch.object(combined_loader, "rank_zero_info") as said:
            fit(Classifier(), given, strategy={"uneven_inputs": "stop"}, **options)
        found[name] = [call.args[0] for call in said.call_args_list]
    return found


@case
def stopping_at_the_shortest(folder: str) -> Any:
    module = Classifier()
    trace = fit(module, strategy={"uneven_inputs": "stop"})[1]
    return trace.shadow_ranks, module.seen, trace.digests
