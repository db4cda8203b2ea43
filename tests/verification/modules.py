"""Modules with a defect in the line that ends with `# here`, and modules without one."""

import inspect
import random
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

LABELS = [0, 1, 2, 0, 0, 3, 1, 2, 2, 0, 1, 3]
CLASS_WEIGHTS = [1.0, 5.0, 2.0, 3.0]


def make_data(batch_size=8, repeats=2):
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor(LABELS * repeats)
    return DataLoader(TensorDataset(torch.randn(len(labels), 5, generator=generator), labels), batch_size)


class Module(LightningModule):
    """Computes its loss by a function of the logits and the labels."""

    def __init__(self, compute=None, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.compute = compute or functional.cross_entropy
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 4)

    def forward(self, features):
        return self.last(self.first(features).tanh())

    def training_step(self, batch, batch_idx):
        return self.compute(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def losses(logits, labels):
    return functional.cross_entropy(logits, labels, reduction="none")


# ---------------------------------------------------------------- samples influence each other


def centred(logits, labels):
    logits = logits - logits.mean(0)  # here
    return functional.cross_entropy(logits, labels)


def contrastive(logits, labels):
    features = functional.normalize(logits, dim=1)
    similarity = features @ features.T  # here
    return similarity.logsumexp(1).mean()


def hardest(logits, labels):
    hard = losses(logits, labels).topk(len(labels) // 2).values  # here
    return hard.mean()


def below_a_quantile(logits, labels):
    each = losses(logits, labels)
    limit = torch.quantile(each.detach(), 0.5)  # here
    return each.clamp(max=limit).mean()


def root_of_a_mean(logits, labels):
    mean = (logits[:, 0] - labels).square().mean()
    return mean.sqrt()  # here


def scaled_by_an_extreme(logits, labels):
    largest = logits.abs().max()  # here
    return functional.cross_entropy(logits / largest, labels)


def mean_and_sum(logits, labels):
    penalty = logits.square().sum()
    return functional.cross_entropy(logits, labels) + 0.01 * penalty  # here


def mixed(logits, labels):
    order = torch.randperm(len(labels))  # here
    logits = 0.7 * logits + 0.3 * logits[order]
    return functional.cross_entropy(logits, labels)


def shuffled_and_sorted(logits, labels):
    order = torch.randperm(len(labels))
    return functional.cross_entropy(logits[order][order.argsort()], labels)


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()  # here


def normalised_gradient(logits, labels):
    return functional.cross_entropy(Normalised.apply(logits), labels)


def centred_with_noise(logits, labels):
    noise = logits.new_empty(len(logits), 1).bernoulli_(0.5)
    logits = logits * noise
    logits = logits - logits.mean(0)  # here
    return functional.cross_entropy(logits, labels)


def with_a_masked_class(logits, labels):
    logits = logits.masked_fill(torch.arange(4) == 3, -1e9)
    shift = logits[:, :3].mean()
    logits = logits + 0.1 * shift  # here
    return functional.cross_entropy(logits, labels % 3) + logits[:, :3].square().mean()


COUPLED = (
    centred,
    centred_with_noise,
    contrastive,
    hardest,
    below_a_quantile,
    root_of_a_mean,
    scaled_by_an_extreme,
    mean_and_sum,
    with_a_masked_class,
)

# ---------------------------------------------------------------- other weights than samples


def masked(logits, labels):
    mask = (labels > 0).to(logits.dtype)
    return (losses(logits, labels) * mask).sum() / mask.sum()  # here


def selected(logits, labels):
    return losses(logits, labels)[labels > 0].mean()  # here


def ignored(logits, labels):
    return functional.cross_entropy(logits, labels.masked_fill(labels == 0, -100))  # here


def class_weighted(logits, labels):
    weight = torch.tensor(CLASS_WEIGHTS, dtype=logits.dtype)
    return functional.cross_entropy(logits, labels, weight)  # here


def counted_in_python(logits, labels):
    count = sum(label > 0 for label in labels.tolist())
    return (losses(logits, labels) * (labels > 0)).sum() / count  # here


WEIGHTED = (masked, selected, ignored, class_weighted, counted_in_python)


class Masked(Module):
    def __init__(self):
        super().__init__(masked)


def added_up(logits, labels):
    return losses(logits, labels).sum()  # here


# ---------------------------------------------------------------- no defect


def noisy(logits, labels):
    return functional.cross_entropy(logits + torch.randn_like(logits), labels)


def dropped(logits, labels):
    return functional.cross_entropy(functional.dropout(logits, 0.5), labels)


def one_by_one(logits, labels):
    loss = 0.0
    for one, label in zip(logits, labels, strict=True):
        loss = loss + functional.cross_entropy(one, label)
    return loss / len(labels)


def time_major(logits, labels):
    return logits.T[..., None].repeat(1, 1, 2).reshape(-1, 2).square().mean(1).view(4, -1).mean()


HEALTHY = (functional.cross_entropy, noisy, dropped, one_by_one, time_major, shuffled_and_sorted)


class Sampling(Module):
    """Draws a latent variable for each sample, as a variational autoencoder."""

    def training_step(self, batch, batch_idx):
        mean = self.first(batch[0]).tanh()
        return self.compute(self.last(mean + torch.randn_like(mean) * mean.exp()), batch[1]) + mean.square().mean()


class SamplingDividedByRanks(Sampling):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / self.trainer.world_size  # here


class Ragged(Dataset):
    """Texts of different lengths, which are padded."""

    lengths = (2, 3, 5, 2, 7, 4, 3, 9, 6, 2, 3, 4)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(self.lengths[index % 12], 5, generator=torch.Generator().manual_seed(index))


def pad(texts):
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor([*map(len, texts)])


class WithNoise(Module):
    """Adds noise to the tokens of padded texts."""

    def __init__(self, noise):
        super().__init__()
        self.noise = noise

    def training_step(self, batch, batch_idx):
        texts, lengths = batch
        mask = torch.arange(texts.shape[1]) < lengths[:, None]
        each = self(texts + self.noise(mask, texts.dtype)).square().mean(-1)
        return ((each * mask).sum(1) / lengths).mean()


def padded_noise(mask, dtype):
    return torch.randn(*mask.shape, 5, dtype=dtype)


def noise_of_tokens(mask, dtype):
    return torch.zeros(*mask.shape, 5, dtype=dtype).masked_scatter(
        mask[..., None], torch.randn(mask.sum(), 5).to(dtype)
    )


def noise_of_numpy(mask, dtype):
    return torch.from_numpy(numpy.random.normal(size=(*mask.shape, 1))).to(dtype)


def noise_of_python(mask, dtype):
    return torch.tensor([random.random() for _ in mask], dtype=dtype)[:, None, None]


class Mixup(Module):
    """Mixes pairs of samples, by random numbers of numpy."""

    def training_step(self, batch, batch_idx):
        share, order = numpy.random.beta(1.0, 1.0), numpy.random.permutation(len(batch[0]))
        logits = self(share * batch[0] + (1 - share) * batch[0][order])  # here
        pairs = ((share, batch[1]), (1 - share, batch[1][order]))
        return sum(weight * functional.cross_entropy(logits, labels) for weight, labels in pairs)


def collate_mixup(samples):
    features, labels = map(torch.stack, zip(*samples, strict=True))
    share, order = numpy.random.beta(1.0, 1.0), torch.randperm(len(labels))
    return share * features + (1 - share) * features[order], labels


def collate_masked(samples):
    """Leave out random features, as a collate function of masked language modelling."""
    features, labels = map(torch.stack, zip(*samples, strict=True))
    return features.masked_fill(torch.rand(features.shape) < 0.3, 0.0), labels


class WithNorm(Module):
    def __init__(self, compute=None):
        super().__init__(compute)
        self.normalisation = nn.BatchNorm1d(4)

    def forward(self, features):
        return self.last(self.normalisation(self.first(features)))


class Manual(Module):
    """Has two optimizers, and steps by hand."""

    def __init__(self, compute=None):
        super().__init__(compute)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer, compute in zip(self.optimizers(), (functional.cross_entropy, self.compute), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(compute(self(batch[0]), batch[1]))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters()) for part in (self.first, self.last)]


class StepsOfPairs(Manual):
    """Takes an optimizer step on every two samples."""

    def training_step(self, batch, batch_idx):
        for pair in zip(*(part.split(2) for part in batch), strict=True):
            super().training_step(pair, batch_idx)


# ---------------------------------------------------------------- ranks


class DividedByRanks(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / self.trainer.world_size  # here


class OnOneRank(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0:
            loss = loss + self(batch[0]).square().mean()  # here
        return loss


class Deciding(Module):
    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        if random.random() < 0.5:
            logits = logits * 2  # here
        return functional.cross_entropy(logits, batch[1])


def maybe_doubled(logits):
    if random.random() < 0.5:
        logits = logits * 2  # here
    return logits


class DecidingInAFunction(Module):
    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        logits = maybe_doubled(logits)
        return functional.cross_entropy(logits, batch[1])


class Scaling(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * random.choice([0.5, 1.0, 2.0])  # here


class Waiting(Module):
    def training_step(self, batch, batch_idx):
        if dist.is_initialized() and self.global_rank == 0:
            dist.all_reduce(torch.ones(1))  # here
        return super().training_step(batch, batch_idx)


class Monitored(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)  # here
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": scheduler, "monitor": "train_loss", "interval": "step"}]


class LoggingOnRankZero(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0:
            self.log("of_rank_zero", loss, rank_zero_only=True)
        return loss


class MonitoringRankZero(LoggingOnRankZero):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": scheduler, "monitor": "of_rank_zero", "interval": "step", "strict": False}]


class Remembering(Module):
    """Subtracts the mean of earlier batches."""

    mean = torch.zeros(4)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = functional.cross_entropy(logits - self.mean.to(logits.dtype), batch[1])
        self.mean = 0.5 * self.mean + 0.5 * logits.detach().mean(0)  # here
        return loss


class WithCache(Module):
    """Keeps its logits, which it does not use again."""

    cache = None

    def training_step(self, batch, batch_idx):
        self.cache = self(batch[0])
        return functional.cross_entropy(self.cache - self.shift(self.cache), batch[1])

    def shift(self, logits):
        return 0.0


class RememberingANumber(WithCache):
    """Keeps a moving average in a number of Python."""

    average = 0.0

    def shift(self, logits):
        shift = self.average * torch.arange(4)
        self.average = 0.5 * self.average + logits.mean().item()  # here
        return shift


class RememberingAList(WithCache):
    """Keeps the last means in a list."""

    def __init__(self):
        super().__init__()
        self.means = [torch.zeros(4)]

    def shift(self, logits):
        shift = self.means[-1]
        self.means.append(logits.detach().mean(0))  # here
        return shift


class RememberingInAHook(WithCache):
    """Keeps a moving average, after the optimizer step."""

    average = 0.0

    def shift(self, logits):
        return self.average * torch.arange(4)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average = 0.5 * self.average + self.cache.mean().item()  # here


class WithQueue(Module):
    """Compares samples with earlier ones of its own rank."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", functional.normalize(torch.randn(16, 4), dim=1))

    def training_step(self, batch, batch_idx):
        features = functional.normalize(self(batch[0]), dim=1)
        loss = (features @ self.queue.T.to(features.dtype)).logsumexp(1).mean()
        self.queue = torch.cat([features.detach(), self.queue])[:16]
        return loss


class Gathering(Module):
    """Compares the samples of all ranks with each other."""

    def training_step(self, batch, batch_idx):
        features = functional.normalize(self(batch[0]), dim=1)
        every = self.all_gather(features, sync_grads=True).reshape(-1, 4)
        return (features @ every.T).logsumexp(1).mean()


class GatheringALog(Module):
    """Gathers a number to log it."""

    def training_step(self, batch, batch_idx):
        loss = self.loss_of_rank(batch)
        self.log("mean_of_ranks", self.all_gather(loss.detach()).mean())
        return loss

    def loss_of_rank(self, batch):
        return functional.cross_entropy(self(batch[0]), batch[1])


class GatheringALogDivided(GatheringALog):
    def loss_of_rank(self, batch):
        return super().loss_of_rank(batch) / self.trainer.world_size  # here


class GatheringALogOnOneRank(GatheringALog):
    def loss_of_rank(self, batch):
        loss = super().loss_of_rank(batch)
        if self.global_rank == 0:
            loss = loss + self(batch[0]).square().mean()  # here
        return loss


class WithUnused(Gathering):
    """Has a layer that it does not use, for which plain `ddp` ends with an error."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Repeating(torch.utils.data.Sampler):
    """Gives every rank the same batches."""

    def __iter__(self):  # here
        return iter([[*range(8)], [*range(8, 16)]])

    def __len__(self):
        return 2


class Failing(Module):
    def training_step(self, batch, batch_idx):
        raise ValueError("no such file")


class FailingOnOneRank(Module):
    """Fails on rank 1 while other ranks wait for its gradients."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and dist.is_initialized():
            raise ValueError("no such box")  # here
        return super().training_step(batch, batch_idx)


OF_RANKS = (
    DividedByRanks, SamplingDividedByRanks, GatheringALogDivided, GatheringALogOnOneRank, OnOneRank, Deciding, Waiting,
    Monitored, Remembering, RememberingANumber, RememberingAList, RememberingInAHook,
)  # fmt: skip


def line_of(defect):
    """Return file and number of the marked line of a function or class, as a report shows them."""
    lines, start = inspect.getsourcelines(defect)
    (number,) = [start + place for place, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return f"{Path(inspect.getfile(defect)).name}:{number}"


def but_slow(modules, *quick):
    """Return modules as parameters, of which all but some are slow together."""
    return [one if one in quick else pytest.param(one, marks=pytest.mark.slow) for one in modules]
