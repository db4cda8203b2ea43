"""Models that were not written for this package."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy
from tests.parity import relative_difference, seeded, train


class HuggingFaceBert(LightningModule):
    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.model = transformers.BertForSequenceClassification(config)

    def training_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        self.log("loss", outputs.loss)
        return outputs.loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def tokens():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 50, (19, 12), generator=generator)
    mask = (torch.arange(12) < torch.randint(3, 13, (19, 1), generator=generator)).long()
    labels = torch.randint(0, 3, (19,), generator=generator)
    rows = zip(ids, mask, labels, strict=True)
    return DataLoader([{"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in rows], batch_size=8)


class Recurrent(LightningModule):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        sequences, labels = batch
        _, (hidden, _) = self.lstm(sequences)
        return functional.cross_entropy(self.head(hidden[-1]), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def sequences():
    generator = torch.Generator().manual_seed(5)
    rows = [
        (torch.randn(6, 5, generator=generator, dtype=torch.float64), torch.randint(0, 3, (), generator=generator))
        for _ in range(19)
    ]
    return DataLoader(rows, batch_size=8)


class Detector(LightningModule):
    """Batches are lists of images of several sizes and of targets with several boxes."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3)

    def training_step(self, batch, batch_idx):
        images, targets = batch
        losses = [
            (self.features(image).mean() - target["boxes"].sum()) ** 2
            for image, target in zip(images, targets, strict=True)
        ]
        return torch.stack(losses).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def images():
    generator = torch.Generator().manual_seed(5)
    rows = [
        (
            torch.randn(3, 5 + i % 3, 6, generator=generator, dtype=torch.float64),
            {"boxes": torch.rand(i % 4, 4, generator=generator, dtype=torch.float64), "name": f"image {i}"},
        )
        for i in range(19)
    ]
    return DataLoader(rows, batch_size=8, collate_fn=lambda samples: tuple(zip(*samples, strict=True)))


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
@pytest.mark.parametrize(("model", "loader"), [(HuggingFaceBert, tokens), (Recurrent, sequences), (Detector, images)])
@pytest.mark.parametrize("options", [{"split": [1, 3]}, {"gpu0_batch_size": 0}])
def test_gradients_equal_one_device(model, loader, options):
    single = train(seeded(model), loader=loader(), max_epochs=1)
    parallel = train(seeded(model), BalancedDataParallelStrategy(**options), 2, loader=loader(), max_epochs=1)
    equal = train(
        seeded(model), BalancedDataParallelStrategy(split=[1, 3], weight_by="equal"), 2, loader=loader(), max_epochs=1
    )
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12
    assert relative_difference(equal.gradients.after_backward, single.gradients.after_backward) > 1e-3
