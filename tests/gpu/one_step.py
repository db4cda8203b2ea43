"""A few steps of a strategy, for sanitizers: `python -m tests.gpu.one_step STRATEGY ACCELERATOR`."""

import os
import sys
from functools import partial

import torch
from torch import nn

from tests.gpu.training import STRATEGIES, Regression, Task, train_here
from tests.support import devices


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Tanh(), nn.Linear(64, 16))


def main(name: str, accelerator: str) -> None:
    """Train two replicas, or one rank, for three steps."""
    devices.choose(accelerator)
    if accelerator == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    replicas = 2 if name == "balanced_dp" else 1
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    task = Task(partial(Regression, network), sizes=((4, 4, 4),))
    ended = train_here(task, task.batches(0), STRATEGIES[name](), replicas)
    assert len(ended.gradients) == 3
    print("trained")


if __name__ == "__main__":
    main(*sys.argv[1:])
