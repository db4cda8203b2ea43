"""How runs start their processes, and errors at that time, which are the same as with Lightning.

As a script, `test_starting.py START_METHOD [predict] [train | fail]`, it runs as the script of a user would: one
process, which starts the others.
"""

import os
import re
import resource
import subprocess
import sys

import psutil
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors import accelerator_connector
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDDPStrategy, DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext._compat import lightning as compat_lightning
from lightning_ddp_ext.errors import BackendError, UnsupportedFeatureError
from lightning_ddp_ext.strategies.connected import ConnectedDDPStrategy, ConnectedFSDPStrategy
from tests.support import devices
from tests.support.processes import run_processes
from tests.support.programs import UNLAUNCHED
from tests.support.training import quiet_trainer

OURS = [DDPCheckpointStrategy, DDPJoinStrategy]
MISSING_GUARD = RuntimeError("Launching multiple processes with the 'spawn' start method requires that your script")
FIT_TWICE = NotImplementedError("Calling `trainer.fit()` twice on the same Trainer instance")

SESSION = """
from tests.strategies.test_starting import DDPJoinStrategy, train
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
    # Lightning reads the state of CUDA's generators, after which a fork cannot use CUDA.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    if devices.accelerator() == "cuda":
        environment[devices.VARIABLE] = "cpu"
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment, **options)


class Net(LightningModule):
    def __init__(self, fails=False):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.steps = {"seen": torch.zeros(1)}
        self.fails = fails

    def training_step(self, batch, batch_idx):
        if self.fails:
            raise ArithmeticError("the words of the user")
        self.steps["seen"] += 1
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).pow(2).mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def train(strategy, count, batch_size):
    seed_everything(0, verbose=False)
    net, data = Net(), TensorDataset(torch.randn(12, 4))
    quiet_trainer(strategy, count, max_epochs=2).fit(net, DataLoader(data, batch_size=batch_size))
    print("TRAINED", strategy, sum(p.double().sum() for p in net.parameters()).item())


class Spread(Callback):
    def __init__(self):
        self.steps = torch.zeros(1)

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.steps += 1

    def on_train_end(self, trainer, pl_module):
        counted = pl_module.all_gather(torch.cat([pl_module.steps["seen"], self.steps]))
        pl_module.print("COUNTED", counted.flatten().tolist())
        weights = pl_module.all_gather(pl_module.layer.weight.detach())
        pl_module.print("SPREAD", float((weights - weights[0]).abs().max()), "STEPS", trainer.global_step)


def train_with_validation(start_method):
    seed_everything(0, verbose=False)
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    net, trainer = (
        Net(),
        quiet_trainer(DDPCheckpointStrategy(start_method=start_method), 2, max_epochs=2, callbacks=[Spread()]),
    )
    trainer.fit(net, loader, loader)
    if start_method == "popen":  # Lightning's other launchers fit once
        trainer.fit_loop.max_epochs = 3
        trainer.fit(net, loader, loader)
    results = trainer.test(net, loader, verbose=False)
    if trainer.is_global_zero:
        print("TESTED", sorted(results[0]))


def fail(start_method):
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    try:
        quiet_trainer(DDPJoinStrategy(start_method=start_method), 2).fit(Net(fails=True), loader)
    except Exception as error:
        print("CAUGHT", type(error).__name__, str(error).strip().splitlines()[-1])


def check_training(done):
    assert done.returncode == 0, done.stderr
    assert "SPREAD 0.0 STEPS 6" in done.stdout
    assert "COUNTED [6.0, 6.0, 6.0, 6.0]" in done.stdout  # in memory that no other rank changes
    assert "TESTED ['val_loss']" in done.stdout


@pytest.mark.slow
def test_a_script_starts_its_own_processes_and_fits_twice():
    done = start(__file__, "popen", "train")
    check_training(done)
    assert "SPREAD 0.0 STEPS 9" in done.stdout


@pytest.mark.slow
def test_an_error_of_the_user_reaches_the_caller_that_is_started_as_a_rank():
    done = start(__file__, "popen", "fail")
    assert "ArithmeticError the words of the user" in re.findall(r"CAUGHT (.*)", done.stdout), done.stderr


class Doubling(LightningModule):
    def __init__(self, is_opaque=False):
        super().__init__()
        self.is_opaque = is_opaque

    def predict_step(self, batch, batch_idx):
        wide = batch.expand(len(batch), 50_000)  # more than a pipe holds
        return {"doubled": 2 * wide, "opaque": Opaque() if self.is_opaque else None}


class Opaque:
    pass


def predict(start_method):
    loader = DataLoader(torch.arange(7.0).reshape(7, 1), batch_size=2)
    cases = [
        (DDPJoinStrategy, Doubling(), {}),
        (BalancedDDPStrategy, Doubling(), {"return_predictions": True}),
        (DDPCheckpointStrategy, Doubling(), {}),
        (DDPJoinStrategy, Doubling(), {"return_predictions": False}),
        (DDPCheckpointStrategy, Doubling(is_opaque=True), {}),
    ]
    for make, module, options in cases if start_method == "fork" else cases[:1]:
        found = quiet_trainer(make(start_method=start_method), 2).predict(module, loader, **options)
        shown = None if found is None else [batch["doubled"][:, -1].tolist() for batch in found]
        print("PREDICTED", make.__name__, shown)


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_that_are_forked_or_spawned_train_and_return_predictions_of_rank_0_and_an_error_of_the_user(
    start_method,
):
    is_fork = start_method == "fork"
    done = start(__file__, start_method, "train", "predict", *["fail"] * is_fork)
    check_training(done)
    everything = [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0], [12.0]]
    expected = [
        f"DDPJoinStrategy {everything}", f"BalancedDDPStrategy {everything}",
        "DDPCheckpointStrategy [[0.0, 4.0], [8.0, 12.0]]", "DDPJoinStrategy None", "DDPCheckpointStrategy None",
    ]  # fmt: skip
    assert re.findall(r"PREDICTED (.*)", done.stdout) == (expected if is_fork else expected[:1]), done.stderr
    warning = "`trainer.predict` returns None: predictions hold `Opaque` at `[0]['opaque']`"
    assert done.stderr.count(warning) == is_fork
    caught = ["ProcessRaisedException ArithmeticError: the words of the user"] * is_fork
    assert re.findall(r"CAUGHT (.*)", done.stdout) == caught, done.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MISSING_GUARD, FIT_TWICE], ids=repr)
def test_an_error_where_processes_are_started_is_not_replaced(monkeypatch, error):
    def launch(self, function, *args, **kwargs):
        raise error

    monkeypatch.setattr(_MultiProcessingLauncher, "launch", launch)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # Lightning ignores Ctrl-C from then on

    theirs, *ours = (
        outcome_of(lambda make=make: quiet_trainer(make(start_method="spawn"), 2).fit(BoringModel()))
        for make in (DDPStrategy, *OURS)
    )
    assert ours == [theirs] * 2 != [None] * 2


def test_a_checkpoint_is_loaded_where_no_trainer_is_attached(tmp_path):
    given = {"state_dict": {}, "pytorch-lightning_version": "2.6.0"}
    torch.save(given, tmp_path / "some.ckpt")
    trainer = quiet_trainer(DDPJoinStrategy(start_method="spawn"), 2)
    trainer.strategy.connect(BoringModel())
    assert trainer.strategy.load_checkpoint(tmp_path / "some.ckpt") == given


def test_more_processes_than_devices_are_explained_by_lightning(monkeypatch):
    torchrun = {
        "TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "3", "RANK": "2",
        "LOCAL_RANK": "2", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "3",
    }  # fmt: skip
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    theirs, *ours = (
        outcome_of(lambda make=make: quiet_trainer(make(), 2).fit(BoringModel()))
        for make in (DDPStrategy, *OURS, ConnectedDDPStrategy)
    )
    assert ours == [theirs] * 3
    assert "does not match the world size (3)" in theirs[1]


def test_more_processes_than_devices_do_not_hide_a_refusal(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    strategy = ConnectedFSDPStrategy(process_group_backend="gloo")
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy.cluster_environment = LightningEnvironment()
    with pytest.raises(UnsupportedFeatureError, match="`fsdp` shards over accelerators, got the CPU"):
        strategy._configure_launcher()


def test_fsdp_is_accepted_on_any_accelerator():
    strategy = ConnectedFSDPStrategy()
    strategy.parallel_devices = [torch.device("xpu", index) for index in range(2)]
    strategy.cluster_environment = LightningEnvironment()
    strategy._configure_launcher()
    assert strategy.launcher is not None


@pytest.mark.slow
def test_an_interactive_session_trains_under_every_strategy():
    done = start("-i", "-W", "ignore", input=SESSION)
    values = re.findall(r"TRAINED (\w+) (\S+)", done.stdout)
    names = ["auto", "balanced_dp", "ddp_join", "ddp_checkpoint"]
    assert [name for name, _ in values] == names, done.stderr
    assert [float(value) for _, value in values] == pytest.approx([float(values[0][1])] * 4, rel=1e-6)
    assert '`start_method` must be "fork" in an interactive session' in done.stderr


@pytest.mark.parametrize("is_interactive", [True, False])
def test_the_start_method_is_chosen_by_the_kind_of_session(monkeypatch, is_interactive):
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", is_interactive)
    if is_interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    launcher = quiet_trainer("ddp_join", 2).strategy.launcher
    assert launcher.is_interactive_compatible is is_interactive
    if is_interactive:
        for start_method in ("popen", "spawn", "forkserver"):
            with pytest.raises(ValueError, match=f"interactive session .*, got '{start_method}'. Leave it out"):
                DDPCheckpointStrategy(start_method=start_method)
    else:
        assert compat_lightning.start_method_of(DDPCheckpointStrategy()) == "popen"


def construct_with_few_files(more):
    """Construct a Trainer that would start 8 ranks, where a process may open only some files more."""
    limit = psutil.Process().num_fds() + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    return outcome_of(lambda: quiet_trainer(DDPJoinStrategy(process_group_backend="gloo"), 8))


def test_too_few_files_are_an_error_before_other_ranks_are_started():
    refused, accepted = (run_processes(construct_with_few_files, 1, more, env=UNLAUNCHED)[0] for more in (40, 400))
    assert refused[0] is BackendError
    assert re.match(r"rank 0 of 8 needs \d+ open files .* `ulimit -n \d+`", refused[1])
    assert accepted is None


if __name__ == "__main__":
    for part in sys.argv[2:]:
        {"train": train_with_validation, "predict": predict, "fail": fail}[part](sys.argv[1])
