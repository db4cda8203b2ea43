"""Fails when a private name that `ddp_join` relies on moves. What the names are used for is tested on several ranks."""

import inspect
import json
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.distributed_c10d as c10d
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from torchmetrics import CatMetric

from lightning_ddp_ext._compat import collectives, lightning, lightning_logging, loaders, loops, resuming, torchmetrics
from lightning_ddp_ext.join.active_ranks import ProcessGroupRedirect


def test_every_method_of_a_process_group_is_redirected_or_refused_on_purpose():
    refused = {
        "_set_sequence_number_for_group", "_start_coalescing", "all_gather_single_coalesced", "allgather_coalesced",
        "allgather_into_tensor_coalesced", "gather_into_tensor", "gather_single", "get_backend", "merge_remote_group",
        "new_window", "reconfigure", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
        "split_group",
    }  # fmt: skip
    methods = set(collectives.find_collectives())
    assert {"allreduce", "_allgather_base", "split_group"} <= methods
    assert methods - ProcessGroupRedirect._HANDLERS.keys() - refused == set()


def test_collectives_are_replaced_within_a_block_only(group, monkeypatch):
    monkeypatch.setattr(dist.ProcessGroup, "all_shuffle", lambda group: "shuffled", raising=False)  # a later torch's
    monkeypatch.setattr(collectives, "find_collectives", collectives.find_collectives.__wrapped__)
    seen = []

    def find(found, name):
        seen.append((found is group, name))
        return lambda original, *args, **kwargs: original(*args, **kwargs)

    value = torch.ones(2)
    before = dict(vars(dist.ProcessGroup))
    with collectives.replaced_collectives(find, lambda found: found, lambda: seen.append("group")):
        dist.all_reduce(value)
        dist.broadcast(value, 0)
        dist.new_group()
        with pytest.raises(ValueError, match="ranks_to_exclude"):
            dist.shrink_group([])
        assert group.all_shuffle() == "shuffled"
    assert seen == [(True, "allreduce"), (True, "broadcast"), "group", "group", (True, "all_shuffle")]
    dist.all_reduce(value)
    assert group.all_shuffle() == "shuffled"
    assert len(seen) == 5
    assert dict(vars(dist.ProcessGroup)) == before


def test_functional_collectives_ask_for_their_group_however_it_is_given(group):
    mesh = dist.init_device_mesh("cpu", (1,))
    asked = []

    def resolve(found):
        asked.append(found is group)
        return found

    with collectives.replaced_collectives(lambda *_: None, resolve, lambda: None):
        for given in (group, group.group_name, mesh):
            assert functional_collectives.all_reduce(torch.ones(2), "sum", given).tolist() == [1, 1]
    assert asked == [True, True, True]


def test_objects_are_read_and_nothing_is_none(group):
    objects = [None]
    with collectives.replaced_collectives(lambda *_: None, lambda found: found, lambda: None):
        dist.all_gather_object(objects, {"a": 1})
        assert c10d._tensor_to_object(torch.empty(0, dtype=torch.uint8), 0, group) is None
    assert objects == [{"a": 1}]
    with pytest.raises(EOFError):
        c10d._tensor_to_object(torch.empty(0, dtype=torch.uint8), 0, group)


def test_a_store_is_cloned(group):
    store = collectives.cloned_store(group)
    store.set("a", "b")
    assert store.get("a") == b"b"


def test_loops_ask_a_source_for_their_loaders():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, fast_dev_run=2, enable_progress_bar=False)
    asked = []

    def replace(given, is_training):
        asked.append(is_training)
        return CombinedLoader(given, "max_size_cycle" if is_training else "sequential")

    loaders.replace_loaders(trainer, replace)
    trainer.fit(BoringModel())
    assert asked == [True, False] or asked == [False, True]
    loaders.restore_loaders(trainer)
    trainer.test(BoringModel(), verbose=False)
    assert len(asked) == 2


def test_what_has_been_done_is_known_in_every_hook_that_saves():
    found = []

    class Looking(Callback):
        def on_train_batch_end(self, trainer, *_):
            found.append(("batch", resuming.find_progress(trainer).done))

        def on_validation_start(self, trainer, *_):
            found.append(("validation", resuming.find_progress(trainer).done))

        def on_validation_end(self, trainer, *_):
            found.append(("validated", resuming.find_progress(trainer).done))

        def on_train_epoch_end(self, trainer, *_):
            found.append(("epoch", resuming.find_progress(trainer).done))

    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, max_epochs=1, limit_train_batches=2, limit_val_batches=1,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[Looking()],
    )  # fmt: skip
    trainer.fit(BoringModel())
    assert found == [
        ("batch", "step"),
        ("batch", "step"),
        ("validation", "step"),
        ("validated", "validation"),
        ("epoch", "epoch"),
    ]


def test_a_run_may_begin_at_the_end_of_an_epoch():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, limit_train_batches=3, fast_dev_run=3)
    trainer.fit(BoringModel())
    loop = trainer.fit_loop.epoch_loop
    assert {"_skip_next_val", "_restarting"} <= vars(loop).keys()
    resuming.complete_batch(trainer, is_last_batch=True)
    current = loop.batch_progress.current
    assert current.ready == current.started == current.processed == current.completed == 3
    loop.batch_progress.is_last_batch = False
    resuming.advance(trainer, resuming.Progress("validation", is_last_batch=True))
    assert loop.batch_progress.is_last_batch
    assert loop._skip_next_val


def test_loaders_are_shown_to_lightning_before_it_injects_samplers():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, fast_dev_run=1, enable_progress_bar=False)
    shown = []

    def show(loader):
        shown.append(loader)
        return DataLoader(loader.dataset, batch_size=5)

    entered = []

    @contextmanager
    def preparing():
        entered.append(len(shown))
        yield

    loaders.replace_preparation(trainer, show, preparing)
    loader = DataLoader(range(4))
    assert trainer.predict(BoringModel(), DataLoader(RandomDataset(32, 10)))[0].shape == (5, 2)
    assert trainer._data_connector._prepare_dataloader(loader, shuffle=False, mode=None) is loader
    assert len(shown) == 2
    assert entered == [1, 2]
    loaders.restore_preparation(trainer)
    assert trainer.predict(BoringModel(), DataLoader(RandomDataset(32, 10)))[0].shape == (1, 2)


def test_the_loader_of_the_loop_and_its_mode_are_found():
    found = []
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, fast_dev_run=1, enable_progress_bar=False)
    original = trainer.strategy.batch_to_device

    def batch_to_device(*args, **kwargs):
        found.append((lightning.is_hook_of_loop(module, "batch_to_device"), loaders.active_combined_loader(trainer)))
        return original(*args, **kwargs)

    trainer.strategy.batch_to_device = batch_to_device
    trainer.fit(module := BoringModel())
    assert [is_hook for is_hook, _ in found] == [True, True]
    assert [loaders.combination_mode(loader) for _, loader in found] == ["max_size_cycle", "sequential"]
    assert not lightning.is_hook_of_loop(module, "batch_to_device")


def test_combined_loaders_save_their_state_where_it_is_overridden():
    source = inspect.getsource(type(Trainer(accelerator="cpu", logger=False).fit_loop))
    assert "_combined_loader._state_dicts()" in source
    assert "_combined_loader._load_state_dicts(" in source


def test_a_sampler_that_lightning_has_wrapped_is_recognised():
    wrapped = DistributedSamplerWrapper(SequentialSampler(range(4)), num_replicas=2, rank=0)
    assert loaders.is_sampler_wrapper(wrapped)
    wrapped.dataset.reset()
    assert wrapped.dataset[2] == 2
    assert not loaders.is_sampler_wrapper(DistributedSampler(range(4), 2, 0))


def test_batch_hooks_of_evaluation_are_silenced():
    called = []

    class Calling(BoringModel):
        def on_validation_batch_start(self, *_):
            called.append("hook")

    module = Calling()
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, fast_dev_run=1, enable_progress_bar=False)
    trainer.strategy.connect(module)
    with loops.without_batch_hooks(trainer):
        module.on_validation_batch_start(None, 0)
        assert trainer.callbacks == []
    module.on_validation_batch_start(None, 0)
    assert called == ["hook"]
    assert trainer.callbacks


def test_manual_steps_are_counted_where_expected():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False)
    trainer.strategy.connect(module := BoringModel())
    module.automatic_optimization = False
    progress = loops.manual_step_progress(trainer)
    progress.increment_ready()
    progress.increment_completed()
    assert trainer.global_step == 1


class Logging(BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("loss", torch.tensor(2.0 + batch_idx), on_step=True, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


def test_logging_is_followed_and_described():
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, max_epochs=1, limit_train_batches=2, limit_val_batches=0,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    events, described = [], []

    def update(key, metric, proceed):
        proceed()
        events.append(key)
        described.append(json.dumps(lightning_logging.describe_logged(key, metric)))

    lightning_logging.watch_logging(
        trainer,
        update,
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
    lightning_logging.unwatch_logging(trainer)
    assert not {"update_metrics", "_extract_batch_size"} & set(vars(results))
    assert "batch_size = self._extract_batch_size(self[key], batch_size, meta)" in inspect.getsource(type(results).log)
    assert not {"on_batch_end", "epoch_end_reached", "on_epoch_end"} & set(vars(trainer._logger_connector))


def test_what_a_metric_has_computed_is_forgotten():
    metric = CatMetric()
    metric.update(torch.ones(2))
    metric.compute()
    metric.value[0].zero_()
    assert metric.compute().tolist() == [1, 1]
    torchmetrics.forget_computed(metric)
    assert metric.compute().tolist() == [0, 0]


def test_list_states_are_found_and_concatenated():
    metric = CatMetric()
    assert torchmetrics.list_states(metric) == {"value": []}
    metric.update(torch.ones(2))
    metric.update(torch.zeros(1))
    assert [[entry.tolist() for entry in entries] for entries in torchmetrics.list_states(metric).values()] == [
        [[1, 1, 0]]
    ]


def test_synchronisation_of_metrics_is_followed(group):
    seen = []

    def around(metric, synchronize, gather, ranks):
        seen.append((type(metric), ranks))
        synchronize(gather)

    metric = CatMetric()
    metric.update(torch.ones(2))
    torchmetrics.watch_synchronization(around)
    assert metric.compute().tolist() == [1, 1]
    torchmetrics.unwatch_synchronization()
    torchmetrics.forget_computed(metric)
    assert metric.compute().tolist() == [1, 1]
    assert seen == [(CatMetric, None)]


def test_training_steps_without_a_backward_pass_are_recognised():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False)
    assert not loops.leaves_out_backward(trainer)
    trainer.fit_loop._skip_backward = True
    assert loops.leaves_out_backward(trainer)
    assert trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward
