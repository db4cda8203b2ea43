"""Steps on a device: compiled modules, exact resumption, and no wait of the host."""

import os
import traceback
import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.gpu.training import RANKED, STRATEGIES, Regression, Task, difference, rows, single_rows, train, train_alone
from tests.strategies.ddp_ranks import digest_of, quiet_trainer
from tests.support import devices
from tests.support.processes import run_processes

WARM_UP = 3  # batches


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def compiled() -> nn.Module:
    is_built = devices.accelerator() == "cuda"  # elsewhere without a compiler
    return torch.compile(plain(), backend="inductor" if is_built else "aot_eager")


@pytest.mark.parametrize("name", STRATEGIES)
def test_compiled_modules(name):
    task = Task(partial(Regression, compiled), batch=single_rows, trainer={"precision": "32-true"})
    ended = train(name, task, timeout=280)
    assert len({end.digest for end in ended}) == 1
    alone = train_alone(Task(partial(Regression, plain), batch=single_rows, trainer={"precision": "32-true"}))
    assert difference(ended[0], alone) < 1e-5


class StopHalfway(Callback):
    """Saves a checkpoint in the middle of an epoch and ends the run, as a crash would."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 16))


def resume(name: str, folder: str) -> list[str]:
    """Return the digests of a run of two epochs, and of one that was stopped and resumed with other random numbers."""
    warnings.simplefilter("ignore")
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = TensorDataset(*rows(10, rank))
    path = os.path.join(folder, f"{name}.ckpt")

    def fit(callbacks=(), ckpt_path=None, drawn=0):
        seed_everything(4, verbose=False)
        module = Regression(dropping).double()  # Lightning would load into single precision and convert afterwards
        torch.rand(drawn, device=devices.device(rank))
        torch.rand(drawn)
        trainer = quiet_trainer(STRATEGIES[name](), count, max_epochs=2, precision="64-true", callbacks=list(callbacks))
        trainer.fit(module, DataLoader(data, 2, shuffle=True), ckpt_path=ckpt_path)
        return digest_of(module, trainer)

    whole, stopped = fit(), fit([StopHalfway(path)])
    return [whole, fit(ckpt_path=path, drawn=5), stopped]


@pytest.mark.parametrize("name", RANKED)
def test_a_run_with_dropout_resumes_bit_for_bit_in_the_middle_of_an_epoch(name, tmp_path):
    ended = run_processes(resume, 2, name, str(tmp_path), timeout=120)
    for whole, resumed, stopped in ended:
        assert resumed == whole == ended[0][0] != stopped


class Waits(Callback):
    """Notes the places at which the host waits for the device during batches after a warm-up."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
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
        if "synchronizing" in str(message) and "ddp_ranks.py" not in place:  # where the tests keep gradients
            self.found[place] = self.found.get(place, 0) + 1


def place_of_call() -> str:
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


def measure_waits(name: str, module: type[Regression]) -> dict[str, int]:
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
