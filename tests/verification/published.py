"""Bugs of public projects, made again in a few lines; the line that `verify` has to name ends with `# here`."""

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from tests.verification.modules import Module, losses, make_data

IGNORED = -100


def make_validation(number=12):
    data = make_data(repeats=2).dataset
    return DataLoader(TensorDataset(*(part[:number] for part in data.tensors)), batch_size=4)


def tokens(labels):
    """Return labels of three tokens of each sample; some are ignored."""
    wide = torch.stack([labels, (labels + 1) % 4, (labels + 2) % 4], dim=1)
    return wide.masked_fill(wide < labels[:, None], IGNORED)


class ByHand(Module):
    """Steps by manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class OfTokens(Module):
    """Predicts three tokens of each sample."""

    def token_losses(self, batch):
        logits = self(batch[0])[:, None].expand(-1, 3, -1)
        labels = tokens(batch[1])
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none"), labels


class Validating(Module):
    """Keeps the checkpoint with the least `val_loss`."""

    def __init__(self, compute=None):
        super().__init__(compute)
        self.samples = 12

    def val_dataloader(self):
        return make_validation(self.samples)

    def configure_callbacks(self):
        return [ModelCheckpoint(monitor="val_loss")]

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


# ---------------------------------------------------------------- gradients


class GatheredWithoutGradient(Module):
    """Lightly 1977: the cross-correlation of all ranks has gradients of the own rank's samples only."""

    def training_step(self, batch, batch_idx):
        one, other = self(batch[0]), self(batch[0] + 0.1)
        one, other = (view - 0.5 for view in (one, other))
        correlation = one.T @ other / len(one)
        if dist.is_initialized():
            correlation = correlation / world_size()
            dist.all_reduce(correlation)
        return (correlation - torch.eye(4, dtype=correlation.dtype)).square().sum()  # here


class MeanOverAtoms(Module):
    """Fairchem 269: each rank takes the mean over the atoms of its own systems."""

    def training_step(self, batch, batch_idx):
        atoms = 1 + batch[1]
        return (losses(self(batch[0]), batch[1]) * atoms).sum() / atoms.sum()  # here


class MeanOverTokens(OfTokens):
    """Verl 5203: each rank divides by its own number of tokens."""

    def training_step(self, batch, batch_idx):
        each, labels = self.token_losses(batch)
        return each.sum() / (labels != IGNORED).sum()  # here


class MeanOfMicroBatches(ByHand, OfTokens):
    """LitGPT 1927: the mean over tokens of each half of a batch, and their mean."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for half in zip(*(part.chunk(2) for part in batch), strict=True):
            each, labels = self.token_losses(half)
            loss = each.sum() / (labels != IGNORED).sum()  # here
            self.manual_backward(loss / 2)
        optimizer.step()


class TimesRanks(Module):
    """LibreYOLO 488: a mean, times the number of ranks."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.trainer.world_size  # here


class DividedByRanks(Module):
    """bGPT 5: a loss that is divided by the number of ranks although the gradient is a mean."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / world_size()  # here


class BoxesOfAllRanks(Module):
    """EDA, in BUTD-DETR 48: divides by the boxes of all ranks, but not by their mean per rank."""

    def training_step(self, batch, batch_idx):
        boxes = batch[1].sum().double()  # here
        if dist.is_initialized():
            dist.all_reduce(boxes)
        return (losses(self(batch[0]), batch[1]) * batch[1]).sum() / self.per_rank(boxes)

    def per_rank(self, boxes):
        return boxes


class BoxesPerRank(BoxesOfAllRanks):
    """The same without the bug."""

    def per_rank(self, boxes):
        return boxes / world_size()


class PenaltyTimesRanks(Module):
    """MagFace 12: one term of the loss grows with the number of ranks."""

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        penalty = logits.square().mean()
        return functional.cross_entropy(logits, batch[1]) + 0.1 * world_size() * penalty  # here


class WithoutSynchronization(ByHand):
    """nerv 1, HydraGNN 136: gradients that do not pass through the module of DDP."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for parameter, gradient in zip(
            (used := [*self.first.parameters(), *self.last.parameters()]),
            torch.autograd.grad(loss, used),
            strict=True,
        ):
            parameter.grad = gradient
        self.optimizers().step()


class LateSynchronization(ByHand):
    """build-nanogpt 30: the switch for the last micro-batch comes after its forward pass."""

    def training_step(self, batch, batch_idx):
        optimizer, model = self.optimizers(), self.trainer.strategy.model
        optimizer.zero_grad()
        for half in zip(*(part.chunk(2) for part in batch), strict=True):
            model.require_backward_grad_sync = False
            self.manual_backward(super().training_step(half, batch_idx) / 2)
        optimizer.step()


class LearningRateByPosition(Module):
    """nnue-pytorch 512: a schedule that counts the steps of all ranks."""

    def training_step(self, batch, batch_idx):
        progress = (1 + batch_idx) * world_size()
        temperature = 1 / (1 + progress)
        return functional.cross_entropy(self(batch[0]) * temperature, batch[1])  # here


class WithoutBoxes(Module):
    """Lightly Train 446, D-FINE: a rank whose batch has no boxes leaves out a collective of the others."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        boxes = (batch[0][:, 0] > batch[0][:, 0].mean()).sum() * (self.global_rank == 0)
        if boxes and dist.is_initialized():
            dist.all_reduce(boxes)  # here
        return loss


class Dead(Module):
    """Automodel 3701: weights that nobody has initialised, so that the gradient is zero on any number of devices."""

    def forward(self, features):
        return super().forward(features) * 0


# ---------------------------------------------------------------- samples


class SameOrder(torch.utils.data.Sampler):
    """ColBERT 405: every rank walks through all samples."""

    def __iter__(self):  # here
        return iter([[*range(8)], [*range(8, 16)], [*range(16, 24)]])

    def __len__(self):
        return 3


class SameStream(IterableDataset):
    """torchtitan and others: a stream that does not ask for its rank."""

    def __iter__(self):  # here
        return iter([*make_data().dataset])


class PartOfStream(SameStream):
    """The same without a bug: each rank reads every second sample."""

    def __iter__(self):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return iter([*make_data().dataset][rank :: world_size()])


# ---------------------------------------------------------------- evaluation and logged values


class RepeatedValidation(Validating):
    """RF-DETR 1507, Lightning 2398: an uneven number of samples to validate."""

    def __init__(self):
        super().__init__()
        self.samples = 11


class WithoutValidationData(Validating):
    """The file with the data to validate is not there."""

    def val_dataloader(self):
        raise FileNotFoundError("no such file")


class ValidationByBatches(Validating):
    """torchtitan 4167: the mean of means over tokens."""

    def validation_step(self, batch, batch_idx):
        labels = batch[1].masked_fill(batch[1] == 0, IGNORED)
        loss = functional.cross_entropy(self(batch[0]), labels)
        self.log("val_loss", loss, sync_dist=True)  # here


class ValidationWithWrongCount(Validating):
    """algorithmic-efficiency 209: only rank 0 divides by its own weights."""

    def validation_step(self, batch, batch_idx):
        weights = torch.ones(24)[: len(batch[1]) if self.global_rank == 0 else None]
        loss = losses(self(batch[0]), batch[1]).sum() / weights.sum()
        self.log("val_loss", loss, sync_dist=True)  # here


class LossOverDataset(Validating):
    """HydraGNN 116: the sum of a rank's losses over the number of samples of all ranks."""

    def validation_step(self, batch, batch_idx):
        loss = losses(self(batch[0]), batch[1]).sum() / self.samples
        self.log("val_loss", loss, sync_dist=True)  # here


class LossOfRankZero(Validating):
    """timm 2339: what rank 0 has computed stands for all."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]))  # here


class OnPlateau(Validating):
    """A scheduler reads a value of the validation."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class ValidationOverRanks(Validating):
    """The same without a bug: a metric adds up sums and counts."""

    def __init__(self):
        super().__init__()
        self.val_loss = MeanMetric()

    def validation_step(self, batch, batch_idx):
        labels = batch[1].masked_fill(batch[1] == 0, IGNORED)
        loss = functional.cross_entropy(self(batch[0]), labels)
        self.val_loss.update(loss, weight=(labels != IGNORED).sum())
        self.log("val_loss", self.val_loss)


OF_GRADIENTS = (
    GatheredWithoutGradient, MeanOverAtoms, MeanOverTokens, MeanOfMicroBatches, TimesRanks, DividedByRanks,
    BoxesOfAllRanks, PenaltyTimesRanks, LearningRateByPosition, WithoutBoxes,
)  # fmt: skip
WITHOUT_A_LINE = (WithoutSynchronization, LateSynchronization)
OF_SAMPLES = {SameOrder: lambda data: DataLoader(data, batch_sampler=SameOrder()),
              SameStream: lambda data: DataLoader(data, batch_size=8)}  # fmt: skip
OF_VALIDATION = (ValidationByBatches, ValidationWithWrongCount, LossOverDataset, LossOfRankZero)
WITHOUT_A_BUG = (BoxesPerRank, Validating, OnPlateau, ValidationOverRanks)
