"""Models of HuggingFace, made from a configuration: losses over tokens and over samples."""

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy
from tests.parity import relative_difference, seeded, train


class Wrapped(LightningModule):
    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Gpt2(Wrapped):
    def __init__(self):
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        self.model = transformers.GPT2LMHeadModel(config)


class Wav2Vec(Wrapped):
    """Normalises the weights of a convolution by a parametrization."""

    def __init__(self):
        super().__init__()
        config = transformers.Wav2Vec2Config(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
            conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2, num_labels=3, classifier_proj_size=8, feat_extract_norm="layer",
            apply_spec_augment=False, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
            feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0,
        )  # fmt: skip
        self.model = transformers.Wav2Vec2ForSequenceClassification(config)


def texts():
    generator = torch.Generator().manual_seed(5)
    rows = []
    for _ in range(11):
        length = int(torch.randint(2, 12, (), generator=generator))
        ids = torch.randint(1, 50, (12,), generator=generator)
        kept = torch.arange(12) < length
        rows.append({"input_ids": ids, "attention_mask": kept.long(), "labels": ids.masked_fill(~kept, -100)})
    return DataLoader(rows, batch_size=8)


def sounds():
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(11, 400, generator=generator, dtype=torch.float64)
    return DataLoader([{"input_values": row, "labels": torch.tensor(i % 3)} for i, row in enumerate(rows)], 8)


def labels_that_are_predicted(batch):
    return float((batch["labels"][:, 1:] != -100).sum())  # the first token of a text has nothing before it


def all_labels(batch):
    return float((batch["labels"] != -100).sum())


@pytest.mark.filterwarnings("ignore:`training_step` draws random numbers")  # of sound, for layers that are dropped
@pytest.mark.parametrize(
    ("model", "loader", "weight_by", "wrong", "tolerance"),
    [
        (Gpt2, texts, labels_that_are_predicted, "samples", 1e-6),  # its loss is computed in float32
        (Gpt2, texts, labels_that_are_predicted, all_labels, 1e-6),
        (Wav2Vec, sounds, "samples", "equal", 1e-12),
    ],
)
def test_a_model_trains_as_on_one_device(model, loader, weight_by, wrong, tolerance):
    def fit(strategy, devices):
        return train(seeded(model), strategy, devices, loader=loader(), max_epochs=1)

    single = fit("auto", 1)
    parallel = fit(BalancedDataParallelStrategy(split=[1, 3, 4], weight_by=weight_by), 3)
    expected = single.gradients.after_backward
    assert relative_difference(parallel.gradients.after_backward, expected) < tolerance
    steps = [float(trained.trainer.callback_metrics["loss_step"]) for trained in (parallel, single)]
    assert steps[0] == pytest.approx(steps[1], abs=tolerance)
    other = fit(BalancedDataParallelStrategy(split=[1, 3, 4], weight_by=wrong), 3)
    assert relative_difference(other.gradients.after_backward[:1], expected[:1]) > 1e-3
