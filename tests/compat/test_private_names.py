"""Fails when a private name of Lightning that `_compat` relies on moves."""

import ast
import inspect
import signal

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ParallelStrategy, Strategy
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_ddp_ext._compat import lightning as compat_lightning
from lightning_ddp_ext._compat import loaders as compat_loaders
from lightning_ddp_ext._compat import loops as compat_loops
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.strategies import balanced_dp, builtin, ddp_checkpoint, explicit_ddp


def test_the_table_of_private_strategy_hooks_names_those_that_exist_and_are_used():
    for name in compat_lightning.PRIVATE_STRATEGY_NAMES:
        assert hasattr(ParallelStrategy, name) or name in inspect.getsource(ParallelStrategy.__init__)
        assert name in inspect.getsource(balanced_dp)
        assert name in compat_lightning.__doc__


def test_strategies_use_no_other_private_name_of_lightning():
    private = {
        name
        for cls in (Strategy, ParallelStrategy, DDPStrategy)
        for name in vars(cls)
        if name[0] == "_" and name[1] != "_"
    }

    used = set()
    for module in (balanced_dp, explicit_ddp, ddp_checkpoint, builtin):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute | ast.FunctionDef):
                used.add(node.attr if isinstance(node, ast.Attribute) else node.name)
    assert used & private <= compat_lightning.PRIVATE_STRATEGY_NAMES


def test_the_last_call_of_the_trainers_constructor_lets_a_strategy_refuse():
    called = []

    class Refusing(balanced_dp.BalancedDataParallelStrategy):
        def _configure_launcher(self):
            called.append((self.parallel_devices, self._layer_sync is not None))

    Trainer(strategy=Refusing(), accelerator="cpu", devices=2, sync_batchnorm=True, logger=False)
    assert called == [([torch.device("cpu")] * 2, True)]


def test_lightning_handles_signals_where_that_is_replaced():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False)
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    assert "self._signal_connector.register_signal_handlers()" in inspect.getsource(Trainer._run)
    assert "self._original_handlers.items()" in inspect.getsource(type(connector).teardown)
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(type(loop).advance)
    before = signal.getsignal(signal.SIGUSR1)
    compat_loops.replace_signal_handling(trainer, lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN))
    connector.register_signal_handlers()
    loop._broadcast_sigterm_tensor()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    connector.teardown()
    assert signal.getsignal(signal.SIGUSR1) == before
    compat_loops.restore_signal_handling(trainer)
    assert connector.register_signal_handlers.__func__ is type(connector).register_signal_handlers


def test_the_loop_is_asked_before_each_batch(tmp_path):
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, max_steps=3, enable_progress_bar=False, default_root_dir=tmp_path
    )
    asked = []
    compat_loops.before_each_batch(trainer, lambda: asked.append(trainer.global_step) is None)
    trainer.fit(BoringModel())
    assert asked == [0, 1, 2]
    compat_loops.not_before_each_batch(trainer)
    assert "advance" not in vars(trainer.fit_loop.epoch_loop)
    assert compat_loops.preemption_path(trainer) == str(tmp_path / "hpc_ckpt_1.ckpt")


def test_how_a_strategy_starts_processes_is_known():
    assert compat_lightning.repeats_the_command(DDPStrategy())
    assert not compat_lightning.repeats_the_command(DDPStrategy(start_method="spawn"))
    assert compat_lightning.repeats_the_command(FSDPStrategy())


class Constant(LightningModule):
    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(float(value)))

    def test_step(self, batch, batch_idx):
        pass


@pytest.mark.parametrize("kept", [True, False])
def test_a_restarted_job_is_tested_with_the_weights_it_has(tmp_path, monkeypatch, kept):
    monkeypatch.setenv("SLURM_NTASKS", "1")
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(default_root_dir=tmp_path, plugins=[LightningEnvironment()], **options)
    trainer.strategy.connect(Constant(1))
    trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    module = Constant(2)
    if kept:
        compat_lightning.keep_weights_for_testing(trainer)
    trainer.test(module, [0], verbose=False)
    assert module.value.item() == (2 if kept else 1)


def test_the_owner_of_a_data_hook_is_found():
    class Module(LightningModule):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return batch

    trainer = Trainer(accelerator="cpu", devices=1, logger=False)
    module = Module()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    assert compat_lightning.data_hook_owner(trainer, "transfer_batch_to_device") is module


def test_a_module_takes_on_a_device():
    module = LightningModule()
    compat_lightning.adopt_device(module, torch.device("meta"))
    assert module.device == torch.device("meta")
    assert module._metric_attributes is None


@pytest.mark.parametrize(
    ("loaders", "mode", "expected"),
    [
        ([1, 1], "min_size", True),
        ([1, 1], "sequential", False),
        ({"a": 1, "b": 1}, "min_size", False),
        ([1, 1, 1], "min_size", False),
    ],
)
def test_a_batch_of_each_loader_is_told_from_a_list_of_samples(loaders, mode, expected):
    trainer = Trainer(accelerator="cpu", logger=False)
    trainer.training = True
    trainer.fit_loop._combined_loader = CombinedLoader(loaders, mode)
    assert compat_loaders.is_list_of_batches(trainer, [None, None]) is expected
    trainer.training = False
    assert not compat_loaders.is_list_of_batches(trainer, [None, None])


def test_the_steps_that_are_logged_are_known():
    trainer = Trainer(accelerator="cpu", logger=False, log_every_n_steps=2)
    trainer.training = True
    trainer.fit_loop.epoch_loop._batches_that_stepped = 1
    assert compat_loops.logs_now(trainer)
    trainer.fit_loop.epoch_loop._batches_that_stepped = 2
    assert not compat_loops.logs_now(trainer)


def test_steps_that_fetch_their_own_batches_are_recognised():
    class Fetching(LightningModule):
        def training_step(self, dataloader_iter):
            pass

        def validation_step(self, batch, batch_idx):
            pass

    assert compat_lightning.takes_dataloader_iter(Fetching(), "training_step")
    assert not compat_lightning.takes_dataloader_iter(Fetching(), "validation_step")


def test_steps_with_two_arguments_take_the_batch_index():
    class Two(LightningModule):
        def training_step(self, batch, number):
            pass

    class One(LightningModule):
        def training_step(self, batch):
            pass

    assert compat_lightning.takes_batch_idx(Two())
    assert not compat_lightning.takes_batch_idx(One())


def test_the_trainer_knows_an_interactive_session(monkeypatch):
    """And it refuses strategies that do not start processes by fork there."""
    assert accelerator_connector._IS_INTERACTIVE is compat_lightning.in_interactive_session() is False
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    assert compat_lightning.in_interactive_session()
    with pytest.raises(MisconfigurationException, match="is not compatible with an interactive environment"):
        Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False)


def test_a_trainer_reads_the_accelerator_of_a_strategy_before_its_other_settings():
    """`OneTrainerStrategy` relies on it; nothing but a Trainer's constructor reads the private name."""
    strategy = balanced_dp.BalancedDataParallelStrategy()
    Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    with pytest.raises(UnsupportedFeatureError, match="Create a new strategy for each Trainer"):
        Trainer(strategy=strategy, accelerator="cpu", precision="64-true", plugins=[LightningEnvironment()])
    sources = [inspect.getsource(cls).count("self._accelerator") for cls in (Strategy, ParallelStrategy, DDPStrategy)]
    assert sources == [3, 0, 0]  # the constructor, and both sides of `accelerator`
