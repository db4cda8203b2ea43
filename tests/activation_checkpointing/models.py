"""Models for tests of activation checkpointing."""

import copy

import torch
from torch import nn

from lightning_ddp_ext.activation_checkpointing.checkpointed_forward import CheckpointedForward
from lightning_ddp_ext.activation_checkpointing.policy import ActivationCheckpointing

STEPS = 3


class Block(nn.Module):
    """A block of a transformer, with dropout."""

    def __init__(self, width=16, dropout=0.3):
        super().__init__()
        self.calls = 0
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=dropout, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden, *, scale=1.0):
        self.calls += 1
        normal = self.norm(hidden)
        hidden = hidden + self.attention(normal, normal, normal, need_weights=False)[0]
        return hidden + scale * self.dropout(self.feed_forward(self.norm(hidden)))


class Transformer(nn.Module):
    def __init__(self, blocks=3, width=16, dropout=0.3):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, scale=0.5)
        return self.head(hidden)


class Normalised(nn.Module):
    """Parts whose forward pass changes buffers."""

    def __init__(self, *layers):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh()) for layer in layers)

    def forward(self, inputs):
        for part in self.parts:
            inputs = part(inputs)
        return inputs


def train(model, make_batch, steps=STEPS):
    """Train a few steps, and return the gradients of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(7)
    gradients = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(make_batch())
        outputs.square().mean().backward()
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return gradients


def difference(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return max(float((one - other).norm() / other.norm().clamp_min(1e-12)) for one, other in pairs)


def tokens():
    return torch.randint(11, (2, 5))


def vectors():
    return torch.randn(6, 4, dtype=torch.float64)


def with_checkpointing(model, policy):
    copied = copy.deepcopy(model)
    checkpointing = ActivationCheckpointing(policy)
    checkpointing.apply(copied)
    return copied, checkpointing


def checkpointed_names(model):
    return [name for name, module in model.named_modules() if CheckpointedForward.find(module) is not None]
