"""The models of the table. Batches are features, labels and indices unless a row says otherwise."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from tests.strategies.toolkit import RANK, Adversaries, Classifier, Fused, Noisy, Polyak
from tests.support.training import CLASSES, FEATURES


class Layers(Classifier):
    """Classifies by a network that a row gives."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.network = make()

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.network(batch[0].to(torch.float64)), batch[1])


# ---------------------------------------------------------------- networks


def with_containers() -> nn.Module:
    class Containers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ParameterList([nn.Parameter(torch.randn(5, 5) * 0.3) for _ in range(2)])
            self.named = nn.ParameterDict({"head": nn.Parameter(torch.randn(5, 3)), "bias": torch.zeros(3)})
            self.penalised = [self.layers[0], {"head": self.named["head"]}]

        def forward(self, features: Tensor) -> Tensor:
            for layer in self.layers:
                features = (features @ layer).tanh()
            scale = self.penalised[0].sum() + self.penalised[1]["head"].sum()
            return features @ self.named["head"] * scale + self.named["bias"]

    return Containers()


def parametrized() -> nn.Module:
    """Changes buffers in the forward pass."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(5, 5)), nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(5, 5)), nn.Tanh(), parametrizations.orthogonal(nn.Linear(5, 3)),
    )  # fmt: skip


def hooked_norms() -> nn.Module:
    """The older kind, which hooks compute before each forward pass."""
    layers = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(5, 3)))
    nn.utils.prune.l1_unstructured(layers[0], "weight", 0.5)
    return layers


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, features: Tensor) -> Tensor:
        return (features.to(self.weight.dtype) @ self.weight).abs()


class LowRank(nn.Module):
    """Wraps a frozen layer and hands on its attributes, as adapters do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(base.in_features, 2))
        self.up = nn.Parameter(torch.randn(2, base.out_features))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, features: Tensor) -> Tensor:
        return self.base(features) + features @ self.down @ self.up


def tied() -> nn.Module:
    layers = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    layers[2].weight = layers[0].weight
    return layers


class FrozenNorm(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


class Transformer(nn.Module):
    """Attends over the features; its layers are recomputed in the backward pass."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embedding = nn.Linear(1, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.embedding(features[..., None])
        for layer in self.layers:
            recomputes = self.use_reentrant is not None
            hidden = checkpoint(layer, hidden, use_reentrant=self.use_reentrant) if recomputes else layer(hidden)
        return self.head(hidden.mean(1))


class Moving(nn.Module):
    """Subtracts a mean of past batches, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.layer = nn.Linear(5, 3)

    def forward(self, features: Tensor) -> Tensor:
        result = self.layer(features - self.mean)
        with torch.no_grad():
            self.mean += 0.1 * (features.mean(dim=0) - self.mean)
        return result


class SynchronizedNorm(nn.SyncBatchNorm):
    """Normalises the samples of all ranks on a CPU too, and so without the code of torch for devices."""

    def forward(self, features: Tensor) -> Tensor:
        sums = torch.stack([features.sum(0), features.square().sum(0), torch.full_like(features[0], len(features))])
        total = all_reduce(sums) if dist.is_initialized() else sums
        mean, square, _ = total / total[2]
        return (features - mean) / (square - mean.square() + self.eps).sqrt() * self.weight + self.bias


# ---------------------------------------------------------------- steps


class Step(Classifier):
    """Computes its loss by a function of the module and the batch."""

    def __init__(self, compute: Callable[[Any, Any], Tensor], **parts: Callable[[], nn.Module]) -> None:
        super().__init__(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.compute = compute
        for name, make in parts.items():
            setattr(self, name, make())

    def loss(self, batch: Any) -> Tensor:
        return self.compute(self, batch)


def derivatives(module: Step, batch: Any) -> Tensor:
    """Gradients of each sample, and derivatives by the inputs."""

    def loss(parameters: Any, features: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(module.network, parameters, (features[None],))
        return functional.cross_entropy(logits, label[None])

    given = dict(module.network.named_parameters()), batch[0], batch[1]
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(*given)
    jacobian = torch.func.vmap(torch.func.jacrev(module.network))(batch[0])
    squares = sum(gradient.flatten(1).square().sum(1) for gradient in per_sample.values())
    return 0.1 * (squares + jacobian.square().sum((1, 2))).mean()


def penalised(module: Step, batch: Any) -> Tensor:
    """A frozen critic, and a penalty on its slope, which takes a second backward pass inside the step."""
    made = module.network(batch[0])
    critic = module.critic.requires_grad_(False)
    (slope,) = torch.autograd.grad(critic(made).sum(), made, create_graph=True)
    criticised = functional.softplus(-critic(made)).mean()
    return functional.cross_entropy(made, batch[1]) + criticised + slope.norm(dim=1).mean()


def adversarial(module: Step, batch: Any) -> Tensor:
    """Train on adversarial inputs, of which the gradient is taken inside the step."""
    features = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(module.mean_loss((features, batch[1])), features)
    return module.mean_loss(((features + 0.1 * slope.sign()).detach(), batch[1]))


def partly_used(module: Step, batch: Any) -> Tensor:
    """Use a layer only for some labels, and so on some ranks only; another layer is never used."""
    chosen = batch[1] == 0
    logits = module.network(batch[0])
    if chosen.any():
        logits = logits.index_add(0, chosen.nonzero()[:, 0], module.extra(batch[0][chosen]))
    return functional.cross_entropy(logits, batch[1])


def in_evaluation_mode(module: Step, batch: Any) -> Tensor:
    """Compute the loss of dropout and batch normalisation in evaluation mode."""
    module.network.eval()
    return module.mean_loss(batch)


def of_tokens(module: Step, batch: Any) -> Tensor:
    """Average the loss over the samples of some classes; a batch may have none of them."""
    kept = batch[1] != 0
    return functional.cross_entropy(module.network(batch[0])[kept], batch[1][kept])


def twins(module: Step, batch: Any) -> Tensor:
    """Barlow Twins: the loss of statistics of all samples, on every rank."""
    one, other = module.network(batch[0]), module.network(batch[0] + 0.1 * batch[0].roll(1, 1))
    product, number = one.T @ other, batch[0].new_tensor(float(len(batch[0])))
    if dist.is_initialized():
        product = all_reduce(product)
        dist.all_reduce(number)
    product = product / number
    return 0.01 * ((torch.diagonal(product) - 1).square().sum() + 0.1 * product.square().sum())


def pairs_of_all_ranks(module: Step, batch: Any, is_local: bool) -> Tensor:
    """CLIP and SimCLR: compare each view of a sample with the other views of all samples."""
    own = [module.network(batch[0]), module.network(batch[0] + 0.1 * batch[0].roll(1, 1))]
    start = 0
    if module.trainer.world_size > 1:
        start = sum(module.all_gather(torch.tensor(len(batch[0]), device=module.device)).tolist()[:RANK])
        own = [module.all_gather(one, sync_grads=True).reshape(-1, CLASSES) for one in own]
    logits = own[0] @ own[1].T
    rows = torch.arange(len(logits), device=logits.device)
    if not is_local:
        return (functional.cross_entropy(logits, rows) + functional.cross_entropy(logits.T, rows)) / 2
    rows = rows[start : start + len(batch[0])]
    return functional.cross_entropy(logits[rows], rows, reduction="sum") / len(logits)


all_pairs, own_pairs = (partial(pairs_of_all_ranks, is_local=is_local) for is_local in (False, True))


def coupled(module: Step, batch: Any) -> Tensor:
    """A loss of the features of all ranks, and of a selection that may be empty on a rank."""
    features = module.network(batch[0])
    found = module.all_gather([features, features[batch[1] == 0]], sync_grads=True)
    every, some = (one.reshape(-1, features.shape[-1]) for one in found)
    return (every - every.mean(0)).square().mean() + some.sum() / 10


class Thawing(Classifier):
    """Trains its first layer from the third batch on; the others in another order than they were made."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.head = nn.Linear(5, 5)
        self.head.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.head.requires_grad_(batch_idx > 1)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.head(batch[0]).tanh(), *batch[1:]))


def count_tokens(batch: Any) -> float:
    return float((batch[1] != 0).sum())


VOCABULARY = 11
CLASS_WEIGHTS = torch.linspace(0.1, 3, VOCABULARY, dtype=torch.float64)


class Language(LightningModule):
    """Predicts each token from the one before it; the loss is a mean over the tokens that are not ignored."""

    def __init__(self, weight: Tensor | None = None, sparse: bool = False) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Embedding(VOCABULARY, 6, sparse=sparse), nn.Linear(6, VOCABULARY))
        self.weight = weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, targets = self.network(batch["input_ids"][:, :-1]), batch["labels"][:, 1:]
        weight = None if self.weight is None else self.weight.to(logits)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def texts(indices: Tensor, packed: bool = False) -> dict[str, Tensor]:
    """Rows of 12 tokens, of which the first 2 to 12 are labels; or packed without padding."""
    ids = torch.stack([torch.arange(12) * (1 + index % 5) + index for index in indices.tolist()]) % VOCABULARY
    is_token = torch.arange(12) < 2 + 7 * indices[:, None] % 11
    if packed:
        is_first = torch.arange(12).expand_as(ids)[is_token] == 0
        return {"input_ids": ids[is_token][None], "labels": ids[is_token].masked_fill(is_first, -100)[None]}
    return {"input_ids": ids, "labels": ids.masked_fill(~is_token, -100)}


class Gpt2(LightningModule):
    """Of Hugging Face, which returns a loss in single precision."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        off = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
        tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
        self.model = GPT2LMHeadModel(GPT2Config(n_positions=12, n_embd=16, n_layer=2, n_head=2, **tokens, **off))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def counted_classes(batch: Any) -> Tensor:
    return batch["labels"][:, 1:]


class Skipping(Classifier):
    """Skips batches of 7 samples, and those without samples."""

    def __init__(self, optimizer: Any = torch.optim.SGD, **options: Any) -> None:
        super().__init__(optimizer, **{"lr": 0.1, **options})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if len(batch[1]) in (0, 7) else loss


class Scaled(Skipping):
    """For a plug-in of mixed precision, which leaves the module in double precision."""

    def __init__(self) -> None:
        super().__init__(momentum=0.9)
        self.double()


class FusedEarly(Classifier):
    """Makes an optimizer that steps inside of the backward pass in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        optimizer = Fused(self.parameters(), lr=0.1)
        self.make_optimizer = lambda parameters: optimizer


class ManualSums(Classifier):
    """Two backward passes of losses that are sums; on rank 1 three, if the passes are `uneven`."""

    def __init__(self, uneven: bool = False) -> None:
        super().__init__(torch.optim.SGD, is_sum=True)
        self.automatic_optimization = False
        self.uneven = uneven

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for factor in range(1, 3 + (RANK if self.uneven else 0)):
            self.manual_backward(factor * self.loss(batch))
        optimizer.step()


class ByTorch(Adversaries):
    """Steps optimizers that Lightning does not wrap; one backward pass is in a closure."""

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer=False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        scores = self.discriminator(self.generator(batch[0][:, :2]))
        generator.zero_grad()
        self.manual_backward(scores.sigmoid().log().mean().neg())
        generator.step()

        def closure() -> Tensor:
            discriminator.zero_grad()
            loss = self.discriminator(batch[0]).pow(2).mean()
            self.manual_backward(loss)
            return loss

        discriminator.step(closure)


class WithProbe(Classifier):
    """Trains a probe, which the strategy ignores, with another optimizer between micro-batches."""

    def on_train_start(self) -> None:
        self.probe = [torch.zeros(CLASSES, dtype=torch.float64, requires_grad=True)]
        self.probe_optimizer = torch.optim.SGD(self.probe, lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.probe[0].square().sum().add(self.probe[0].sum()).backward()
        self.probe_optimizer.step()
        return super().training_step(batch, batch_idx)


class TwoTasks(LightningModule):
    """An encoder whose layers are recomputed, and two heads with a backward pass each."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.encoder = Transformer(use_reentrant)
        self.encoder.head = nn.Identity()  # type: ignore[assignment]
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for task, head in enumerate(self.heads):
            self.manual_backward(functional.cross_entropy(head(self.encoder(batch[0])), (batch[1] + task) % 3))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scheduled(Classifier):
    """Changes settings on all ranks alike: by a scheduler in each step, and in the step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}]


class WithHistory(torch.optim.Optimizer):
    """Keeps the last gradients of each parameter in a list, which it changes in place, and a number of steps."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.state["steps"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            history = self.state[parameter].setdefault("history", [])
            history.append(parameter.grad.clone())
            del history[:-3]
            parameter.sub_(sum(history), alpha=0.1 / (1 + int(self.state["steps"])))
        self.state["steps"] += 1


class Manual(Classifier):
    """A manual step; `lr` gives its learning rate by rank and batch, and `compute` another loss."""

    def __init__(
        self,
        optimizer: Any = torch.optim.SGD,
        lr: Callable[[int], float] | None = None,
        compute: Callable[[Any, Any], Tensor] | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.automatic_optimization, self.rate, self.compute = False, lr, compute
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if self.rate is not None:
            optimizer.param_groups[0]["lr"] = self.rate(batch_idx)
        optimizer.zero_grad()
        loss = self.loss(batch) if self.compute is None else self.compute(self, batch)
        self.manual_backward(loss * (1 + 0.1 * self.steps))
        optimizer.step()
        self.steps += 1  # after the last synchronisation of the step


class SteppingByTheLoss(Classifier):
    """Calls a closure, on whose loss the step depends, with Lightning's optimizer or with torch's."""

    def __init__(self, is_raw: bool) -> None:
        super().__init__(Polyak)
        self.automatic_optimization, self.is_raw = False, is_raw

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=not self.is_raw)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class Changing(Classifier):
    """A student that learns from labels and from a teacher; each step changes something beside gradients."""

    def __init__(self, change: Callable[["Changing"], None]) -> None:
        super().__init__()
        self.change = change
        self.teacher = copy.deepcopy(self.network).requires_grad_(False)
        self.tau, self.limits, self.factor = 0.5, (0.0, 1.0), 1.0

    def loss(self, batch: Any) -> Tensor:
        self.change(self)
        scores = self.network(batch[0])
        distance = (scores - self.teacher(batch[0])).square().mean()
        scale = self.factor + self.limits[0]
        return scale * functional.cross_entropy(scores, batch[1]) + self.tau * distance

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: 0.9**step), "interval": "epoch"}]


def changes_learning_rate(module: Changing) -> None:
    for group in module.optimizers().param_groups:
        group["lr"] *= 0.8


def changes_teacher(module: Changing) -> None:
    with torch.no_grad():
        for mean, parameter in zip(module.teacher.parameters(), module.network.parameters(), strict=True):
            mean.mul_(0.7).add_(parameter, alpha=0.3)


def replaces_teacher(module: Changing) -> None:
    module.teacher = copy.deepcopy(module.network).requires_grad_(False)


def changes_numbers(module: Changing) -> None:
    module.tau *= 0.9
    module.limits = (module.limits[0] + 0.1, 1.0)
    module.factor *= 1.1
    module.new = module.tau


def changes_momentum(module: Changing) -> None:
    for state in module.optimizers().state.values():
        state["momentum_buffer"].mul_(0.5)


def changes_frozen_layers(module: Changing) -> None:
    module.network[0].requires_grad_(module.trainer.global_step % 3 == 0)


CHANGES = (
    changes_learning_rate, changes_teacher, replaces_teacher, changes_numbers, changes_momentum, changes_frozen_layers,
)  # fmt: skip


# ---------------------------------------------------------------- identical ranks, without one process to compare with


class Normalised(Classifier):
    """Has buffers, dropout and validation; a part of it is frozen in the second epoch."""

    def __init__(self) -> None:
        super().__init__(torch.optim.AdamW)
        self.network = nn.Sequential(
            nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, CLASSES)
        )

    def on_train_epoch_start(self) -> None:
        self.network[0].requires_grad_(self.current_epoch != 1)


class Drawing(Normalised):
    """Ranks draw different amounts of random numbers; the optimizer adds noise, and so does a hook on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.make_optimizer = partial(Noisy, lr=0.1)
        weight = self.network[0].weight
        weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.add_(torch.randn_like(weight), alpha=0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(RANK)
        return super().training_step(batch, batch_idx)


class Counting(Classifier):
    """Counts labels in an integer buffer and adds the counts of all ranks up in a hook."""

    def __init__(self, hook: str, automatic: bool = True, resets: bool = True, first_epoch: int = 0) -> None:
        super().__init__(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.automatic_optimization, self.resets, self.first_epoch = automatic, resets, first_epoch
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("any_seen", torch.zeros(4, dtype=torch.bool))
        self.found: list[Any] = []
        if resets:
            setattr(self, hook, self.add_up)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = torch.bincount(batch[1], minlength=4)[:4]
        if self.current_epoch >= self.first_epoch:
            self.counts += own
            self.any_seen |= own > 0
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss / 2, retain_graph=True)
        self.manual_backward(loss / 2)
        optimizer.step()
        return None

    def add_up(self, *_: Any) -> None:
        both = torch.stack([self.counts, self.any_seen.long()])
        if dist.is_initialized():
            dist.all_reduce(both)
        self.found.append([both[0].tolist(), (both[1] > 0).tolist()])
        self.counts.zero_()
        self.any_seen.zero_()


class Estimating(Classifier):
    """Asks for the number of steps in `setup`, which sets up the data before the strategy."""

    def setup(self, stage: str) -> None:
        self.estimated = self.trainer.estimated_stepping_batches


class Transposed(Classifier):
    """Takes features of which the first dimension is not the number of samples."""

    def loss(self, batch: Any) -> Tensor:
        features, labels = batch if isinstance(batch[0], Tensor) else transpose(batch)
        return super().loss((features.T, labels[0]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        # Lightning has to be given the size of a batch; the strategies know the samples that were drawn.
        size = None if self.trainer.world_size > 1 else len(batch[1][0])
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=True, batch_size=size)
        return loss

    validation_step = None  # type: ignore[assignment]


def transpose(chosen: Sequence[Any]) -> tuple[Tensor, Tensor]:
    features, labels, *_ = map(torch.stack, zip(*chosen, strict=True))
    return features.T.contiguous(), labels[None]


def listed(rows: Sequence[Any]) -> list[Any]:
    """Drop the samples that are damaged."""
    return [sample for sample, is_damaged in rows if not is_damaged]


def collate(rows: Sequence[Any]) -> tuple[Tensor, Tensor]:
    return transpose(listed(rows))


class Communicating(Classifier):
    """Communicates in a metric and in a logged value only."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD, lr=0.1)
        self.metric = MeanMetric(dist_sync_on_step=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metric(loss.detach())
        return loss


# ---------------------------------------------------------------- mistakes


class InBackward(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        from torch.distributed.optim import _apply_optimizer_in_backward  # warns on import

        _apply_optimizer_in_backward(torch.optim.SGD, self.network.parameters(), {"lr": 0.1})
        return super().configure_optimizers()


class GrownHead(Classifier):
    """Gets a parameter after training was set up, and an optimizer for it."""

    def on_train_start(self) -> None:
        self.head = nn.Linear(CLASSES, CLASSES).to(self.device, torch.float64)
        self.optimizers().add_param_group({"params": list(self.head.parameters())})

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.head(self.network(batch[0])), batch[1])


class PlainTensor(Classifier):
    """Trains a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.network(batch[0]) * self.scale.sum(), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), self.scale], lr=0.1)


class RawBackward(Adversaries):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class ByHandAlone(Adversaries):
    """Sets the gradients of this rank by hand."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for parameter in filter(lambda one: one.requires_grad, self.parameters()):
            (parameter.grad,) = torch.autograd.grad(loss, [parameter], retain_graph=True)


class SteppingAlone(Adversaries):
    """Rank 1 leaves out steps of the second optimizer, or `steps_first` twice instead in its last batch."""

    def __init__(self, steps_first: bool = False, after: int = 0) -> None:
        super().__init__()
        self.steps_first, self.after = steps_first, after

    def optimizers(self, *args: Any) -> Any:
        first, second = super().optimizers()
        is_due = self.trainer.is_last_batch if self.steps_first else self.trainer.global_step >= self.after
        if RANK == 1 and is_due:
            second.step = first.step if self.steps_first else lambda: None
        return first, second


class DifferentSize(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.network[2] = nn.Linear(7, CLASSES + RANK)


class Differing(Classifier):
    """Changes a setting of its optimizer in a hook, in another way on each rank."""

    def __init__(self, hook: str, change: Callable[["Differing", Any], None]) -> None:
        super().__init__(torch.optim.SGD, lr=0.1)
        setattr(self, hook, lambda *_: change(self, self.trainer.optimizers[0]))


def adds_a_group(module: Differing, optimizer: Any) -> None:
    if RANK == 1 and module.global_step == 2:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1, dtype=torch.float64))]})


def decays_last(module: Differing, optimizer: Any) -> None:
    """Change a setting in the last batch of the run, of which no gradient tells."""
    if module.trainer.is_last_batch and module.current_epoch == 1:
        optimizer.param_groups[0]["weight_decay"] = 0.1 * RANK


class Monitoring(Classifier):
    """Reduces the learning rate by a value of this rank."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "own"}}

    def on_train_epoch_end(self) -> None:
        self.log("own", float(self.current_epoch * (1 if RANK else -1)))


class OtherLayers(Classifier):
    """Trains another layer on each rank, and the network on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.network.parameters(), *self.layers[RANK].parameters()], lr=0.1)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(parameter.square().sum() for parameter in self.layers.parameters())
