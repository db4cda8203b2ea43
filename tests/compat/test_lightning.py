"""Fails when a private name of Lightning moves that `_compat` relies on. Several ranks test the use of each name."""

import copy
import inspect
import json
import pickle
import signal
import sys
from contextlib import ExitStack, contextmanager

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException, _TunerExitException
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_ddp_ext._compat import lightning, lightning_loaders, lightning_logging, lightning_loops
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.loaders.lockstep_source import RankedLoader
from lightning_ddp_ext.loaders.samplers import UnpaddedSamplerWrapper
from lightning_ddp_ext.strategies import balanced_dp
from tests.support.training import quiet_trainer


def test_a_trainers_constructor_configures_the_launcher_last():
    called = []

    class Refusing(balanced_dp.BalancedDataParallelStrategy):
        def _configure_launcher(self):
            called.append((self.parallel_devices, lightning.synchronizes_batch_norm(self)))

    Trainer(strategy=Refusing(), accelerator="cpu", devices=2, sync_batchnorm=True, logger=False)
    assert called == [([torch.device("cpu")] * 2, True)]


def test_lightning_handles_signals_where_that_is_replaced():
    trainer = quiet_trainer()
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    assert "self._signal_connector.register_signal_handlers()" in inspect.getsource(Trainer._run)
    assert "self._original_handlers.items()" in inspect.getsource(type(connector).teardown)
    broadcasts = hasattr(loop, "_broadcast_sigterm_tensor")  # Lightning 2.5.0 does not
    assert ("self._broadcast_sigterm_tensor()" in inspect.getsource(type(loop).advance)) is broadcasts
    before = signal.getsignal(signal.SIGUSR1)
    cleanup = ExitStack()
    lightning_loops.replace_signal_handling(cleanup, trainer, lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN))
    connector.register_signal_handlers()
    loop._broadcast_sigterm_tensor()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    connector.teardown()
    assert signal.getsignal(signal.SIGUSR1) == before
    cleanup.close()
    assert connector.register_signal_handlers.__func__ is type(connector).register_signal_handlers


def test_the_loop_is_asked_before_each_batch(tmp_path):
    trainer = quiet_trainer(max_steps=3, default_root_dir=tmp_path)
    asked = []
    with ExitStack() as cleanup:
        lightning_loops.before_each_batch(cleanup, trainer, lambda: asked.append(trainer.global_step) is None)
        trainer.fit(BoringModel())
    assert asked == [0, 1, 2]
    assert "advance" not in vars(trainer.fit_loop.epoch_loop)
    assert lightning_loops.preemption_path(trainer) == str(tmp_path / "hpc_ckpt_1.ckpt")


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
        lightning.keep_weights_for_testing(trainer)
    trainer.test(module, [0], verbose=False)
    assert module.value.item() == (2 if kept else 1)


def test_a_module_takes_on_a_device():
    module = LightningModule()
    lightning.adopt_device(module, torch.device("meta"))
    assert (module.device, module._metric_attributes) == (torch.device("meta"), None)


def test_a_batch_of_each_loader_is_distinguished_from_a_list_of_samples():
    trainer = quiet_trainer()
    for iterables, mode, expected in (
        ([1, 1], "min_size", True),
        ([1, 1], "sequential", False),
        ({"a": 1, "b": 1}, "min_size", False),
        ([1, 1, 1], "min_size", False),
    ):
        trainer.training = True
        trainer.fit_loop._combined_loader = CombinedLoader(iterables, mode)
        assert lightning_loaders.is_list_of_batches(trainer, [None, None]) is expected
        trainer.training = False
        assert not lightning_loaders.is_list_of_batches(trainer, [None, None])


def test_logged_steps_and_steps_without_a_backward_pass_are_known():
    trainer = quiet_trainer(log_every_n_steps=2)
    loop = trainer.fit_loop.epoch_loop
    trainer.training = True
    for steps, logs in ((1, True), (2, False)):
        loop._batches_that_stepped = steps
        assert lightning_logging.logs_now(trainer) == logs
    assert not lightning_loops.leaves_out_backward(trainer)
    trainer.fit_loop._skip_backward = True
    assert lightning_loops.leaves_out_backward(trainer)
    assert loop.automatic_optimization._skip_backward


def test_the_arguments_of_steps_are_recognised():
    class Two(LightningModule):
        def training_step(self, batch, number):
            pass

    class One(LightningModule):
        def training_step(self, batch):
            pass

    class Fetching(LightningModule):
        def training_step(self, dataloader_iter):
            pass

    modules = [Two(), One(), Fetching()]
    assert [lightning.takes_batch_idx(module) for module in modules] == [True, False, False]
    assert [lightning.takes_dataloader_iter(module, "training_step") for module in modules] == [False, False, True]


def test_the_trainer_knows_an_interactive_session(monkeypatch):
    """And it refuses strategies that do not start processes by fork there."""
    assert accelerator_connector._IS_INTERACTIVE is (hasattr(sys, "ps1") or bool(sys.flags.interactive)) is False
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
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


def test_launches_and_ends_are_recognised():
    launched = [DDPStrategy(), DDPStrategy(start_method="spawn"), FSDPStrategy()]
    assert [lightning.start_method_of(strategy) for strategy in launched] == ["popen", "spawn", "popen"]
    errors = [SIGTERMException(143), _TunerExitException(), SystemExit(), SystemExit(0), SystemExit(1), ValueError()]
    assert [lightning.is_planned_end(error) for error in errors] == [True, True, False, False, False, False]
    assert [lightning.is_exit(error) for error in errors] == [False, False, True, True, False, False]


events = []


def surround(run):
    try:
        return run()
    except ArithmeticError as error:
        events.append("surrounded")
        raise RuntimeError("explained") from error


class Failing(Callback):
    def on_fit_start(self, trainer, pl_module):
        raise ArithmeticError

    def on_exception(self, trainer, pl_module, exception):
        events.append(type(exception))


def test_an_error_passes_the_context_of_a_launch_before_callbacks_see_it():
    events.clear()
    trainer = quiet_trainer(strategy="ddp", callbacks=[Failing()])
    lightning.surround_launch(trainer.strategy.launcher, surround, copy.copy)
    with pytest.raises(RuntimeError, match="explained"):
        trainer.fit(BoringModel())
    assert events == ["surrounded", RuntimeError]
    launcher = quiet_trainer(strategy="ddp_spawn", devices=2).strategy.launcher
    lightning.surround_launch(launcher, surround, copy.copy)
    copied = pickle.loads(pickle.dumps(launcher.launch))
    assert (copied.args[1:], type(copied.args[0])) == ((surround, copy.copy), type(launcher))


def test_loops_ask_a_source_for_their_loaders():
    trainer = quiet_trainer(fast_dev_run=2)
    asked = []

    def replace(given, is_training):
        asked.append(is_training)
        return CombinedLoader(given, "max_size_cycle" if is_training else "sequential")

    with ExitStack() as cleanup:
        lightning_loaders.replace_loaders(cleanup, trainer, replace)
        trainer.fit(BoringModel())
    assert asked == [True, False] or asked == [False, True]
    trainer.test(BoringModel(), verbose=False)
    assert len(asked) == 2


def test_the_progress_is_known_in_every_hook_that_saves():
    found = []

    def looking(name):
        return lambda self, trainer, *_: found.append((name, lightning_loops.find_progress(trainer).done))

    hooks = ("on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end")
    callback = type("Looking", (Callback,), {hook: looking(hook) for hook in hooks})()
    options = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    quiet_trainer(**options, callbacks=[callback]).fit(BoringModel())
    done = ["step", "step", "step", "validation", "epoch"]
    assert found == [*zip((hooks[0], *hooks), done, strict=True)]


def test_a_run_may_begin_at_the_end_of_an_epoch():
    trainer = quiet_trainer(limit_train_batches=3, fast_dev_run=3)
    trainer.fit(BoringModel())
    loop = trainer.fit_loop.epoch_loop
    assert {"_skip_next_val", "_restarting"} <= vars(loop).keys()
    lightning_loops.complete_batch(trainer, is_last_batch=True)
    current = loop.batch_progress.current
    assert current.ready == current.started == current.processed == current.completed == 3
    loop.batch_progress.is_last_batch = False
    lightning_loops.advance(trainer, lightning_loops.Progress("validation", is_last_batch=True))
    assert loop.batch_progress.is_last_batch
    assert loop._skip_next_val


def test_loaders_are_shown_to_lightning_before_it_injects_samplers(monkeypatch):
    trainer = quiet_trainer(fast_dev_run=1)
    shown = []

    def show(loader):
        shown.append(loader)
        return DataLoader(loader.dataset, batch_size=5)

    entered = []

    @contextmanager
    def preparing():
        entered.append(len(shown))
        yield

    monkeypatch.setattr(lightning_loaders, "_show_samplers", show)
    cleanup = ExitStack()
    lightning_loaders.keep_batch_samplers(cleanup, trainer, preparing)
    loader = DataLoader(range(4))
    assert trainer.predict(BoringModel(), DataLoader(RandomDataset(32, 10)))[0].shape == (5, 2)
    assert trainer._data_connector._prepare_dataloader(loader, shuffle=False, mode=None) is loader
    assert len(shown) == 2
    assert entered == [1, 2]
    cleanup.close()
    assert trainer.predict(BoringModel(), DataLoader(RandomDataset(32, 10)))[0].shape == (1, 2)


def test_the_loader_of_the_loop_and_its_mode_are_found():
    found = []
    trainer = quiet_trainer(fast_dev_run=1)
    original = trainer.strategy.batch_to_device

    def batch_to_device(*args, **kwargs):
        found.append(
            (lightning.is_hook_of_loop(module, "batch_to_device"), lightning_loaders.active_combined_loader(trainer))
        )
        return original(*args, **kwargs)

    trainer.strategy.batch_to_device = batch_to_device
    trainer.fit(module := BoringModel())
    assert [is_hook for is_hook, _ in found] == [True, True]
    assert [lightning_loaders.combination_mode(loader) for _, loader in found] == ["max_size_cycle", "sequential"]
    assert not lightning.is_hook_of_loop(module, "batch_to_device")


def test_combined_loaders_save_their_state_and_wrapped_samplers_are_recognised():
    source = inspect.getsource(type(quiet_trainer().fit_loop))
    assert "_combined_loader._state_dicts()" in source
    assert "_combined_loader._load_state_dicts(" in source
    wrapped = DistributedSamplerWrapper(SequentialSampler(range(4)), num_replicas=2, rank=0)
    assert lightning_loaders.is_sampler_wrapper(wrapped)
    wrapped.dataset.reset()
    assert wrapped.dataset[2] == 2
    assert not lightning_loaders.is_sampler_wrapper(DistributedSampler(range(4), 2, 0))


def test_loaders_are_kept_and_predictions_merged():
    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, batch_indices, *_):
            seen.append(list(batch_indices))

    module, loader = BoringModel(), DataLoader(range(4), 2)
    trainer = quiet_trainer(callbacks=[Writer()])
    module.predict_step = lambda batch, batch_idx: batch.tolist()
    seen = []

    def replace(given):
        seen.append(given)
        return CombinedLoader(given, "sequential")

    cleanup = ExitStack()
    lightning_loaders.keep_loaders(cleanup, trainer)
    lightning_loaders.replace_prediction(
        cleanup, trainer, replace, lambda number: [["a"], ["b"]], lambda: seen.append("end"),
        lambda output: output != [0, 1], lambda parts: [[sum(one) for one in parts[0]]],
    )  # fmt: skip
    assert trainer.predict(module, loader) == [5]
    assert seen == [loader, ["a"], "end", ["b"], "end"]
    assert trainer.predict(module, loader, return_predictions=False) is None
    cleanup.close()
    assert trainer.predict(module, loader) == [[0, 1], [2, 3]]
    assert seen[-2:] == [[0, 1], [2, 3]]


def test_batches_of_a_loader_of_predictions_are_replaced():
    seen = []

    class Replacing(SingleDeviceStrategy):
        def process_dataloader(self, loader):
            batches = lightning_loaders.batches_to_predict(loader)
            seen.append(None if batches is None else list(batches.get()))
            if batches is not None:
                batches.set(self.rest)
            return loader

    module = BoringModel()
    module.predict_step = lambda batch, batch_idx: batch.tolist()
    for loader, drawn, rest, wanted in (
        (DataLoader(range(4), 2), [[0, 1], [2, 3]], [[2, 3]], [[2, 3]]),
        (DataLoader(torch.arange(3), batch_size=None), [0, 1, 2], [2, 0], [2, 0]),
    ):
        Replacing.rest = rest
        assert quiet_trainer(strategy=Replacing("cpu")).predict(module, loader) == wanted
        assert seen.pop() == drawn
    quiet_trainer(strategy=Replacing("cpu")).predict(module, [torch.ones(1)])
    assert seen == [None]


def test_batch_hooks_of_evaluation_are_silenced():
    called = []

    class Recording(Callback):
        def on_validation_batch_start(self, *_):
            called.append("callback")

        def on_exception(self, trainer, module, exception):
            called.append(str(exception))

    recording = Recording()
    module, trainer = BoringModel(), quiet_trainer(callbacks=[recording, recording])
    module.on_validation_batch_start = lambda *_: called.append("hook")
    trainer.strategy.connect(module)

    def run(error=None):
        module.on_validation_batch_start(None, 0)
        for callback in trainer.callbacks:
            callback.on_validation_batch_start(trainer, module, None, 0)
            if error:
                callback.on_exception(trainer, module, error)

    with lightning_loops.without_batch_hooks(trainer):
        run(ArithmeticError("boom"))
    assert called == ["boom", "boom"]
    run()
    assert called == ["boom", "boom", "hook", "callback", "callback"]


def test_manual_steps_are_counted_where_expected():
    trainer = quiet_trainer()
    trainer.strategy.connect(module := BoringModel())
    module.automatic_optimization = False
    progress = lightning_loops.manual_step_progress(trainer)
    progress.increment_ready()
    progress.increment_completed()
    assert trainer.global_step == 1


class Logging(BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("loss", torch.tensor(2.0 + batch_idx), on_step=True, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


def test_logging_is_followed_and_described():
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    events, described = [], []

    @contextmanager
    def updating(key, metric):
        yield True
        events.append(key)
        described.append(json.dumps(lightning_logging.describe_logged(key, metric, with_value=True)))

    cleanup = ExitStack()
    lightning_logging.watch_logging(
        cleanup,
        trainer,
        updating,
        lambda batch: 7,
        lambda: events.append("batch"),
        lambda: events.append("epoch"),
        lambda: events.append("end"),
    )
    trainer.fit(module := Logging())
    key = "training_step.loss"
    assert events == [key, "batch", key, "batch", "epoch", "end"]
    results = trainer.fit_loop.epoch_loop._results
    assert lightning_logging.is_synchronised(results[key], on_step=True) is False  # with one device
    results.clear()
    lightning_logging.adopt_logged(results, json.loads(described[-1]), module, sum)
    assert lightning_logging.latest(results[key]) == 3
    lightning_logging.set_latest(results[key], torch.tensor(5.0))
    assert lightning_logging.latest(results[key]) == 5
    results.batch = torch.zeros(2)
    metric = results[key]
    assert [results._extract_batch_size(metric, given, metric.meta) for given in (3, None)] == [3, 7]
    cleanup.close()
    assert not {"update_metrics", "_extract_batch_size"} & set(vars(results))
    assert "batch_size = self._extract_batch_size(self[key], batch_size, meta)" in inspect.getsource(type(results).log)
    assert not {"on_batch_end", "epoch_end_reached", "on_epoch_end"} & set(vars(trainer._logger_connector))


class OwnSampler(SequentialSampler):
    pass


class OwnLoader(DataLoader):
    def __len__(self):
        return 1


class OwnStream(torch.utils.data.IterableDataset):
    def __len__(self):
        return 4

    def __iter__(self):
        return iter(range(4))


def test_only_lengths_that_torch_counts_are_exact():
    own = OwnSampler(range(4))
    dealt = [DistributedSamplerWrapper(sampler, 2, 0) for sampler in (SequentialSampler(range(4)), own)]
    for sampler in dealt:
        UnpaddedSamplerWrapper.replace(sampler)
    known, unknown = dealt
    predicted = [
        DataLoader(range(4), batch_sampler=lightning_loaders._IndexBatchSamplerWrapper(BatchSampler(one, 2, False)))
        for one in (SequentialSampler(range(4)), own)
    ]
    exact = [
        [1, 2], DataLoader(range(4), 2, shuffle=True), DataLoader(range(4), None),
        DataLoader(range(4), 2, drop_last=True),
        DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)), DataLoader(range(4), sampler=known),
        DataLoader(range(4), batch_sampler=[[0], [1]]), predicted[0],
    ]  # fmt: skip
    estimated = [
        iter([1]), OwnStream(), DataLoader(OwnStream(), 2), OwnLoader(range(4)), DataLoader(range(4), sampler=own),
        DataLoader(range(4), batch_sampler=BatchSampler(own, 2, False)), DataLoader(range(4), sampler=unknown),
        predicted[1],
    ]  # fmt: skip
    assert all(map(lightning_loaders.has_exact_length, exact))
    assert not any(map(lightning_loaders.has_exact_length, estimated))


def test_lightning_may_delete_the_iterator_of_a_loader_of_ranks():
    """As Lightning does after 2.6, to end persistent workers."""
    loader = DataLoader(range(4), 2, num_workers=1, persistent_workers=True)
    ranked = RankedLoader(loader)
    assert len(list(ranked)) == 2
    assert loader._iterator is not None
    del ranked._iterator
    assert not hasattr(loader, "_iterator")
    ranked._iterator = None
    for _ in range(2):
        assert len(list(ranked)) == 2
        lightning_loaders.shut_down_workers(ranked)
