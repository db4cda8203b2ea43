"""Mixed precision under each strategy: rounding of one device, and one decision of the gradient scaler for all."""

import math
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision

from tests.gpu.training import STRATEGIES, Regression, Task, difference, plain, single_rows, train, train_alone
from tests.support import devices

SCALE = 2.0**10


def rounded():
    return [MixedPrecision("bf16-mixed", devices.accelerator())]


BRAIN = Task(partial(Regression, plain), batch=single_rows, plugins=rounded)


def test_low_precision_shows_in_the_gradient():
    single = Task(BRAIN.module, batch=single_rows, trainer={"precision": "32-true"})
    assert difference(train_alone(BRAIN), train_alone(single)) > 1e-4


@pytest.mark.parametrize("name", STRATEGIES)
def test_bfloat16(name):
    ended = train(name, BRAIN)
    assert len({end.digest for end in ended}) == 1
    assert difference(ended[0], train_alone(BRAIN)) < 4 * torch.finfo(torch.bfloat16).eps


class ScaleOfSteps(Callback):
    """Keeps the gradient scaler's scale and the parameters after each batch."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        norm = torch.cat([parameter.detach().flatten() for parameter in pl_module.parameters()]).double().norm()
        self.found.append((trainer.precision_plugin.scaler.get_scale(), float(norm)))


def scaled():
    kind = devices.accelerator()
    return [MixedPrecision("16-mixed", kind, torch.amp.GradScaler(kind, init_scale=SCALE, growth_interval=1000))]


OVERFLOW = 1e30  # a target of one sample, which makes the scaled gradient infinite


def with_overflow(size, seed):
    inputs, targets = single_rows(size, seed)
    if seed % 100 == 1 and seed >= 100:  # on rank 1 alone, and in the whole batch of one device
        targets[0] = OVERFLOW
    return inputs, targets


@pytest.mark.filterwarnings("ignore:`training_step` returned `?None")
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_overflow_on_one_rank_skips_the_step_on_all(name, record_property):
    sizes = ((3, 5, 2, 4), (6, 2, 4, 4))
    task = Task(partial(Regression, plain), batch=with_overflow, sizes=sizes, callback=ScaleOfSteps, plugins=scaled)
    ended = train(name, task)
    record_property("scales", [scale for scale, _ in ended[0].found])
    assert len({end.digest for end in ended}) == 1
    for end in [*ended, train_alone(task)]:
        assert [scale for scale, _ in end.found] == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
        norms = [norm for _, norm in end.found]
        assert norms[1] == norms[0] != norms[2] != norms[3]
        assert all(map(math.isfinite, norms))
