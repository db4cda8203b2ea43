"""How runs start their processes, and errors at that time, which are the same as with Lightning."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext._compat import lightning as compat_lightning
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.strategies.builtin import ddp_strategy, fsdp_strategy
from tests.parity import quiet_trainer

SCRIPT = str(Path(__file__).with_name("start_scripts.py"))
OURS = [DDPCheckpointStrategy, DDPJoinStrategy]
MISSING_GUARD = RuntimeError("Launching multiple processes with the 'spawn' start method requires that your script")
FIT_TWICE = NotImplementedError("Calling `trainer.fit()` twice on the same Trainer instance")

SESSION = """
import torch
from lightning.pytorch import LightningModule, Trainer
import lightning_ddp_ext
from lightning_ddp_ext import DDPJoinStrategy

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return (self.layer(batch) - 1).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))

def train(strategy, devices, batch_size):
    net = Net()
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=2, **options)
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=batch_size))
    print("TRAINED", strategy, sum(p.double().sum() for p in net.parameters()).item())

train("auto", 1, 12)
train("balanced_dp", 2, 12)
train("ddp_join", 2, 6)
train("ddp_checkpoint", 2, 6)
DDPJoinStrategy(start_method="popen")
"""


def outcome_of(run):
    """Return an error as it reaches the caller."""
    try:
        run()
    except BaseException as error:
        return type(error), str(error)
    return None


def start(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_a_script_starts_its_own_processes(start_method):
    done = start(SCRIPT, start_method)
    assert done.returncode == 0, done.stderr
    assert "SPREAD 0.0 STEPS 6" in done.stdout
    assert start_method != "popen" or "SPREAD 0.0 STEPS 9" in done.stdout
    assert "TESTED ['val_loss']" in done.stdout


@pytest.mark.parametrize(
    "start_method", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "popen"))]
)
def test_an_error_of_the_user_reaches_the_caller(start_method):
    done = start(SCRIPT, start_method, "fails")
    said = re.findall(r"CAUGHT (.*)", done.stdout)
    if start_method == "popen":
        assert "ArithmeticError the words of the user" in said, done.stderr
    else:
        assert said == ["ProcessRaisedException ArithmeticError: the words of the user"], done.stderr


@pytest.mark.parametrize("strategy", OURS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MISSING_GUARD, FIT_TWICE], ids=repr)
def test_an_error_where_processes_are_started_is_not_replaced(monkeypatch, strategy, error):
    def launch(self, function, *args, **kwargs):
        raise error

    monkeypatch.setattr(_MultiProcessingLauncher, "launch", launch)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # Lightning ignores Ctrl-C from then on

    def run(cls):
        return outcome_of(lambda: quiet_trainer(cls(start_method="spawn"), 2).fit(BoringModel()))

    assert run(strategy) == run(DDPStrategy) != (None, None)


@pytest.mark.parametrize("strategy", OURS)
def test_a_checkpoint_is_loaded_where_no_trainer_is_attached(tmp_path, strategy):
    torch.save({"state_dict": {}}, tmp_path / "some.ckpt")
    trainer = quiet_trainer(strategy(start_method="spawn"), 2)
    trainer.strategy.connect(BoringModel())
    assert trainer.strategy.load_checkpoint(tmp_path / "some.ckpt") == {"state_dict": {}}


@pytest.mark.parametrize("strategy", [*OURS, ddp_strategy])
def test_more_processes_than_devices_are_explained_by_lightning(monkeypatch, strategy):
    torchrun = {
        "TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "3", "RANK": "2",
        "LOCAL_RANK": "2", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "3",
    }  # fmt: skip
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    ours = outcome_of(lambda: quiet_trainer(strategy(), 2).fit(BoringModel()))
    theirs = outcome_of(lambda: quiet_trainer(DDPStrategy(), 2).fit(BoringModel()))
    assert ours == theirs
    assert "does not match the world size (3)" in ours[1]


def test_more_processes_than_devices_do_not_hide_a_refusal(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    strategy = fsdp_strategy(process_group_backend="gloo")
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy.cluster_environment = LightningEnvironment()
    with pytest.raises(UnsupportedFeatureError, match="`fsdp` shards over accelerators, got the CPU"):
        strategy._configure_launcher()


def test_an_interactive_session_trains_under_every_strategy():
    # Lightning reads the state of CUDA's generators, after which a fork cannot use CUDA.
    done = start("-i", "-W", "ignore", input=SESSION, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    values = re.findall(r"TRAINED (\w+) (\S+)", done.stdout)
    names = ["auto", "balanced_dp", "ddp_join", "ddp_checkpoint"]
    assert [name for name, _ in values] == names, done.stderr
    assert [float(value) for _, value in values] == pytest.approx([float(values[0][1])] * 4, rel=1e-6)
    assert '`start_method` must be "fork" in an interactive session' in done.stderr


@pytest.mark.parametrize("is_interactive", [True, False])
def test_the_start_method_is_chosen_by_the_kind_of_session(monkeypatch, is_interactive):
    monkeypatch.setattr(compat_lightning.accelerator_connector, "_IS_INTERACTIVE", is_interactive)
    launcher = quiet_trainer("ddp_join", 2).strategy.launcher
    assert launcher.is_interactive_compatible is is_interactive
    if is_interactive:
        for start_method in ("popen", "spawn", "forkserver"):
            with pytest.raises(ValueError, match=f"interactive session .*, got '{start_method}'. Leave it out"):
                DDPCheckpointStrategy(start_method=start_method)
    else:
        assert compat_lightning.repeats_the_command(DDPCheckpointStrategy())
