"""Fails when a private name of Lightning, torch or torchmetrics that `_compat` relies on moves."""

import ast
import inspect
import signal

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ParallelStrategy, Strategy
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_ddp_ext._compat import lightning as compat_lightning
from lightning_ddp_ext._compat import loops as compat_loops
from lightning_ddp_ext._compat import torch as compat_torch
from lightning_ddp_ext._compat import torchmetrics as compat_torchmetrics
from lightning_ddp_ext.strategies import balanced_dp, ddp_checkpoint, explicit_ddp, single_process, upstream


def test_the_table_of_private_strategy_hooks_names_those_that_exist_and_are_used():
    for name in compat_lightning.PRIVATE_STRATEGY_NAMES:
        assert hasattr(ParallelStrategy, name) or name in inspect.getsource(ParallelStrategy.__init__)
        assert name in inspect.getsource(single_process)
        assert name in compat_lightning.__doc__


def test_strategies_use_no_other_private_name_of_lightning():
    private = {
        name
        for cls in (Strategy, ParallelStrategy, DDPStrategy)
        for name in vars(cls)
        if name[0] == "_" and name[1] != "_"
    }

    used = set()
    for module in (single_process, balanced_dp, explicit_ddp, ddp_checkpoint, upstream):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute | ast.FunctionDef):
                used.add(node.attr if isinstance(node, ast.Attribute) else node.name)
    assert used & private <= compat_lightning.PRIVATE_STRATEGY_NAMES


def test_the_last_call_of_the_trainers_constructor_lets_a_strategy_refuse():
    called = []

    class Refusing(single_process.SingleProcessStrategy):
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
    compat_loops.before_each_batch(trainer, lambda: asked.append(trainer.global_step))
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


def test_parts_of_a_flat_tensor_are_views():
    flat = torch.arange(7.0)
    first, second = compat_torch.views_of(flat, [torch.zeros(2, 3), torch.zeros(())])
    first[1, 2] = second[...] = 9
    assert flat.tolist() == [0, 1, 2, 3, 4, 9, 9]


def test_tensors_are_flattened_whatever_their_strides():
    tensors = [torch.arange(4.0).view(2, 2).t(), torch.tensor(7.0), torch.ones(1, 1).expand(2, 1)]
    assert compat_torch.flatten(tensors).tolist() == [0, 2, 1, 3, 7, 1, 1]


def test_what_torch_is_told_to_ignore_is_found():
    module = nn.Linear(2, 2)
    assert compat_torch.ignored_by_ddp(module) == []
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, {"bias"})
    assert compat_torch.ignored_by_ddp(module) == ["bias"]


def test_tensors_count_changes_in_place():
    tensor = torch.zeros(2)
    before = compat_torch.version_of(tensor)
    tensor.add_(1)
    assert compat_torch.version_of(tensor) > before
    with torch.inference_mode():
        assert compat_torch.version_of(torch.zeros(2)) == -1


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
    assert compat_loops.is_list_of_batches(trainer, [None, None]) is expected
    trainer.training = False
    assert not compat_loops.is_list_of_batches(trainer, [None, None])


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


def test_modules_keep_their_tree_and_hooks_where_expected():
    attributes = nn.Linear(1, 1).__dict__
    assert attributes.keys() >= compat_torch.STRUCTURE
    assert attributes.keys() >= set(compat_torch.HOOKS)


def test_every_batch_normalisation_has_the_same_base():
    layers = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d]
    assert all(issubclass(layer, compat_torch.BatchNorm) for layer in layers)


def test_many_tensors_are_added_and_copied_in_place():
    targets = [torch.ones(2), torch.zeros(3)]
    compat_torch.add_all_(targets, [torch.ones(2), torch.ones(3)])
    assert [t.tolist() for t in targets] == [[2, 2], [1, 1, 1]]
    compat_torch.copy_all_(targets, [torch.zeros(2), torch.zeros(3)])
    assert [t.sum() for t in targets] == [0, 0]


def test_gradient_hooks_of_parameters_are_recognised():
    plain, hooked, late = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    hooked.register_hook(lambda gradient: None)
    late.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [compat_torch.has_gradient_hooks(p) for p in (plain, hooked, late)] == [False, True, True]


def test_states_of_metrics_are_merged_in_order_and_written():
    metric, other = torchmetrics.CatMetric(), torchmetrics.CatMetric()
    metric.update(torch.tensor([1.0, 2.0]))
    other.update(torch.tensor([3.0]))
    assert compat_torchmetrics.has_mergeable_state(metric)
    state = compat_torchmetrics.merge_states(metric, [compat_torchmetrics.read_state(m) for m in (metric, other)])
    compat_torchmetrics.write_state(metric, state, updates=1)
    assert metric.compute().tolist() == [1, 2, 3]
    assert metric.update_count == 2


def test_metrics_whose_states_cannot_be_merged_are_recognised():
    assert not compat_torchmetrics.has_mergeable_state(torchmetrics.PearsonCorrCoef())
    assert not compat_torchmetrics.has_mergeable_state(torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError()))


def test_a_metric_computes_over_another_state_and_keeps_its_own():
    metric, other = torchmetrics.SumMetric(), torchmetrics.SumMetric()
    metric.update(1.0)
    other.update(5.0)
    assert compat_torchmetrics.compute_over(metric, compat_torchmetrics.read_state(other)) == 5
    assert metric.compute() == 1
    assert metric.update_count == 1


def test_the_last_forward_value_can_be_read_and_set():
    metric = torchmetrics.SumMetric()
    metric.update(1.0)
    assert compat_torchmetrics.last_forward_value(metric) is None
    metric(2.0)
    assert compat_torchmetrics.last_forward_value(metric) == 2
    compat_torchmetrics.set_forward_value(metric, torch.tensor(7.0))
    assert metric._forward_cache == 7


def test_outermost_calls_of_a_metric_are_recorded():
    calls = []
    metric = torchmetrics.PearsonCorrCoef()  # its forward calls its update
    compat_torchmetrics.record_calls(metric, lambda name, args, kwargs: calls.append(name) or (lambda result: 7), [0])
    assert metric(torch.rand(4), torch.rand(4)) == 7
    metric.update(torch.rand(4), torch.rand(4))
    assert calls == ["forward", "update"]


def test_moving_a_metric_keeps_its_dtype():
    metric = torchmetrics.SumMetric()
    try:
        torch.set_default_dtype(torch.float64)
        compat_torchmetrics.move_keeping_dtype(metric, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert metric.dtype == torch.float32


def test_compute_groups_are_given_up_and_formed():
    collection = MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError(squared=False)][:1])
    compat_torchmetrics.forget_compute_groups(collection)
    compat_torchmetrics.restore_compute_groups(collection, form=True)
    collection.update(torch.rand(3), torch.rand(3))
    assert not collection._groups_checked
    grouped = MetricCollection({"a": torchmetrics.MeanSquaredError(), "b": torchmetrics.MeanSquaredError()})
    for metric in grouped.values(copy_state=False):
        metric.update(torch.ones(3), torch.zeros(3))
    compat_torchmetrics.restore_compute_groups(grouped, form=True)
    assert grouped.compute_groups == {0: ["a", "b"]}
    assert isinstance(grouped["a"], Metric)


def test_the_innermost_hooks_for_saved_tensors_are_found():
    with pytest.raises(RuntimeError, match="no hooks for saved tensors"):
        compat_torch.saved_tensor_hooks()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or 7, lambda handle: handle + 1):
        pack, unpack = compat_torch.saved_tensor_hooks()
    assert (pack("tensor"), packed, unpack(7)) == (7, ["tensor"], 8)


def test_what_compilation_wraps_is_found():
    layer = nn.Linear(2, 2)
    assert compat_torch.uncompiled(layer) is layer
    assert compat_torch.uncompiled(torch.compile(layer, backend="eager")) is layer
    assert compat_torch.called_attribute(layer) == "forward"
    layer.compile(backend="eager")
    assert compat_torch.called_attribute(layer) == "_compiled_call_impl"
    layer.__dict__["_compiled_call_impl"] = lambda inputs: "called"
    assert layer(None) == "called"


def test_a_reference_to_a_storage_keeps_its_address_but_not_its_memory():
    tensor = torch.ones(1000)
    reference = compat_torch.WeakStorage(tensor.untyped_storage())
    assert reference == compat_torch.WeakStorage(tensor[3:].untyped_storage())
    assert not reference.expired()
    del tensor
    assert reference.expired()
    later = [torch.ones(1000) for _ in range(50)]
    assert all(compat_torch.WeakStorage(other.untyped_storage()) != reference for other in later)
