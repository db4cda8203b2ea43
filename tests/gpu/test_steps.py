"""Steps on a device: compiled modules, and no wait of the host."""

import os
import traceback
import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback

from tests.gpu.training import STRATEGIES, Regression, Task, difference, plain, single_rows, train, train_alone
from tests.support import devices

WARM_UP = 3  # batches


def compiled():
    is_built = devices.accelerator() == "cuda"  # elsewhere without a compiler
    return torch.compile(plain(), backend="inductor" if is_built else "aot_eager")


@pytest.mark.parametrize("name", STRATEGIES)
def test_compiled_modules(name):
    options = {"batch": single_rows, "trainer": {"precision": "32-true"}}
    task = Task(partial(Regression, compiled), **options)
    ended = train(name, task, timeout=280)
    assert len({end.digest for end in ended}) == 1
    alone = train_alone(Task(partial(Regression, plain), **options))
    assert difference(ended[0], alone) < 1e-5


class Waits(Callback):
    """Notes the places at which the host waits for the device during batches after a warm-up."""

    def __init__(self):
        self.found = {}
        warnings.filterwarnings("always", "called a synchronizing CUDA operation")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx >= WARM_UP and devices.accelerator() == "cuda":
            warnings.showwarning = self.note  # for all threads; pytest restores it
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_):
        if devices.accelerator() == "cuda":
            torch.cuda.set_sync_debug_mode("default")

    on_exception = on_train_batch_end

    def note(self, message, *_):
        place = place_of_call()
        if "synchronizing" in str(message) and "support/training.py" not in place:  # where the tests keep gradients
            self.found[place] = self.found.get(place, 0) + 1


def place_of_call():
    """Return file, line and function of the innermost frame outside of torch."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        if f"{os.sep}torch{os.sep}" not in frame.filename and not frame.filename.endswith("warnings.py"):
            parts = frame.filename.split(os.sep)
            roots = [index for index, part in enumerate(parts) if part in ("lightning", "lightning_ddp_ext", "tests")]
            return f"{'/'.join(parts[roots[-1] if roots else -1 :])}:{frame.lineno} {frame.name}"
    return "unknown"


class Waiting(Regression):
    """The negative control."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


class Logging(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def measure_waits(name, module):
    """Train with two replicas on a device, or with one rank, which communicates with NCCL on CUDA."""
    sizes = ((4,) * 7, (4,) * 7) if name == "balanced_dp" else ((8,) * 7,)
    (ended,) = train(name, Task(partial(module, plain), sizes=sizes, callback=Waits))
    return ended.found


@pytest.mark.parametrize("module", [Regression, Logging])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_host_does_not_wait_for_the_device_in_a_step(name, module, record_property):
    places = measure_waits(name, module)
    for place, times in places.items():
        record_property(place, times)
    assert not [place for place in places if place.startswith("lightning_ddp_ext")]


def test_a_wait_is_noticed(needs_cuda):
    assert any(place.startswith("tests/gpu/test_steps.py") for place in measure_waits("balanced_dp", Waiting))
