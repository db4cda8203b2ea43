"""Constructions of users' models: each trains as on one device, and would not with wrong weights."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy
from tests.parity import relative_difference, seeded, train


class Classifies(LightningModule):
    """Batches are (features, labels)."""

    def forward(self, features):
        return self.layers(features)

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def points():
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (11,), generator=generator)
    return DataLoader(list(zip(features, labels, strict=True)), batch_size=8)


class ParameterContainers(Classifies):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(6, 6) * 0.3) for _ in range(2)])
        self.named = nn.ParameterDict({"head": nn.Parameter(torch.randn(6, 3)), "bias": nn.Parameter(torch.zeros(3))})
        self.penalised = [self.layers[0], {"head": self.named["head"]}]

    def forward(self, features):
        for layer in self.layers:
            features = (features @ layer).tanh()
        scale = self.penalised[0].sum() + self.penalised[1]["head"].sum()
        return features @ self.named["head"] * scale + self.named["bias"]


class Parametrized(Classifies):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            parametrizations.weight_norm(nn.Linear(6, 5)),
            nn.Tanh(),
            parametrizations.spectral_norm(nn.Linear(5, 5)),  # changes its buffers in the forward pass
            nn.Tanh(),
            parametrizations.orthogonal(nn.Linear(5, 3)),
        )


class HookedNorms(Classifies):
    """The older kind, which hooks compute before each forward pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(5, 3)))
        nn.utils.prune.l1_unstructured(self.layers[0], "weight", 0.5)


class Functional(Classifies):
    """Gradients of each sample, and derivatives by the inputs."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))

    def training_step(self, batch, batch_idx):
        def loss(parameters, features, label):
            logits = torch.func.functional_call(self.network, parameters, (features[None],))
            return functional.cross_entropy(logits, label[None])

        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(dict(self.network.named_parameters()), *batch)
        jacobian = torch.func.vmap(torch.func.jacrev(self.network))(batch[0])
        squares = sum(gradient.flatten(1).square().sum(1) for gradient in per_sample.values())
        return (squares + jacobian.square().sum((1, 2))).mean()


class ComplexWeights(Classifies):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

    def forward(self, features):
        return (features.to(self.weight.dtype) @ self.weight).abs()


class LowRank(nn.Module):
    """Wraps a frozen layer and hands on its attributes, as adapters do."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(base.in_features, 2))
        self.up = nn.Parameter(torch.randn(2, base.out_features))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, features):
        return self.base(features) + features @ self.down @ self.up


class Adapted(Classifies):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(LowRank(nn.Linear(6, 5)), nn.Tanh(), LowRank(nn.Linear(5, 3)))
        self.layers[0].forward = partial(self.scaled, self.layers[0].forward)

    def scaled(self, plain, features):
        return plain(features) * self.layers[2].in_features


class Generator(Classifies):
    """An autoencoder against a frozen discriminator, with a gradient penalty."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 3), nn.Linear(3, 6)
        self.discriminator = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        made = self.decoder(self.encoder(batch[0]).tanh())
        (slope,) = torch.autograd.grad(self.discriminator(made).sum(), made, create_graph=True)
        adversarial = functional.softplus(-self.discriminator(made)).mean()
        return {"loss": functional.mse_loss(made, batch[0]) + adversarial + slope.norm(dim=1).mean(), "made": made}


class Adversarial(Classifies):
    """Trains on adversarial inputs, which take another backward pass inside the step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def training_step(self, batch, batch_idx):
        features = batch[0].clone().requires_grad_()
        functional.cross_entropy(self(features), batch[1]).backward()
        return functional.cross_entropy(self((features + 0.1 * features.grad.sign()).detach()), batch[1])


MODELS = [
    ParameterContainers, Parametrized, HookedNorms, Functional, ComplexWeights, Adapted, Generator, Adversarial
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_as_on_one_device(model):
    def gradients(strategy, devices):
        trained = train(seeded(model), strategy, devices, loader=points(), max_epochs=2)
        return trained.gradients.after_backward

    single = gradients("auto", 1)
    for options in ({"split": [2, 3, 3]}, {"gpu0_batch_size": 0}):
        assert relative_difference(gradients(BalancedDataParallelStrategy(**options), 3), single) < 1e-12
    wrong = gradients(BalancedDataParallelStrategy(split=[1, 3], weight_by="equal"), 2)
    assert relative_difference(wrong[:1], single[:1]) > 1e-3
