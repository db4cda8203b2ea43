"""Options, profilers and the Tuner of Lightning's Trainer mean the same as on one device."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner, batch_size_scaling
from torch.autograd import DeviceType
from torch.nn import functional

from tests.parity import (
    Classifier,
    Evaluated,
    GradientRecorder,
    Trained,
    assert_same_training,
    balanced,
    batches,
    both_ways,
    compare,
    quiet_trainer,
    relative_difference,
    seeded,
    train,
)
from tests.support.devices import device

OPTIONS = [
    {"overfit_batches": 2},
    {"overfit_batches": 0.5},
    {"limit_train_batches": 0.6, "limit_val_batches": 0.5},
    {"max_steps": 3, "accumulate_grad_batches": 3},
    {"max_steps": 5, "accumulate_grad_batches": 2, "max_epochs": -1},
    {"val_check_interval": 0.5},
    {"val_check_interval": 3, "check_val_every_n_epoch": None},
    {"num_sanity_val_steps": -1},
    {"fast_dev_run": True},
    {"fast_dev_run": 3},
    {"gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
    {"inference_mode": False},
    {"min_steps": 2, "max_steps": 6},
    {"max_time": "00:01:00:00"},
    {"enable_model_summary": True, "enable_progress_bar": True},
    {"use_distributed_sampler": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_equals_one_device(options):
    options = {"val_loader": batches(19), "max_epochs": 2, **options}
    single, _ = compare(Evaluated, options)
    if "gradient_clip_val" in options:
        unclipped = train(seeded(Evaluated), **{**options, "gradient_clip_val": None})
        assert relative_difference(unclipped.gradients.before_step, single.gradients.before_step) > 1e-2


def test_training_without_samples_on_the_first_device_equals_one_device():
    options = {"val_loader": batches(19), "limit_train_batches": 0.6, "max_steps": 5}
    compare(Evaluated, options, gpu0_batch_size=0)


def test_the_tests_fail_when_chunks_have_equal_weights():
    with pytest.raises(AssertionError, match="after_backward"):
        compare(Evaluated, {"val_loader": batches(19), **OPTIONS[0]}, split=[2, 6], weight_by="equal")


@pytest.mark.filterwarnings("ignore:You have turned on `Trainer.detect_anomaly=True.`")
def test_anomalies_are_detected_on_every_replica():
    class Infinite(Evaluated):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + (0 * loss).sqrt() if len(batch[0]) == 6 else loss

    compare(Evaluated, {"detect_anomaly": True})
    with pytest.raises(RuntimeError, match="returned nan values") as caught:
        train(seeded(Infinite), balanced([2, 6]), 2, detect_anomaly=True)
    assert "replica 1 of 2" in caught.value.__notes__[0]


def test_barebones_training_equals_one_device():
    class Bare(Evaluated):
        def training_step(self, batch, batch_idx):
            return functional.cross_entropy(self.network(batch[0]), batch[1])

    def run(strategy, devices):
        recorder = GradientRecorder()
        options = {"barebones": True, "precision": "64-true", "callbacks": [recorder], "max_epochs": 2}
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=devices, **options)
        module = seeded(Bare)
        trainer.fit(module, batches())
        return Trained(module, trainer, recorder)

    assert_same_training(*reversed(both_ways(run)))


class Profiled(Classifier):
    """Profiles a part of its step; on threads, both replicas are in that part at the same time."""

    def __init__(self):
        super().__init__()
        self.threads = set()
        self.together = threading.Barrier(2, timeout=30)

    def training_step(self, batch, batch_idx):
        with self.trainer.profiler.profile("network"):
            logits = self.network(batch[0])
            self.threads.add(threading.current_thread().name)
            if threading.current_thread() is not threading.main_thread():
                self.together.wait()
        return functional.cross_entropy(logits, batch[1])

    def on_train_batch_end(self, *args):
        with self.trainer.profiler.profile("hook"):
            pass


def profile(profiler, **way):
    return train(seeded(Profiled), **way, profiler=profiler, loader=batches(40), max_epochs=1)


def test_the_simple_profiler_names_the_actions_of_each_replica_and_no_others():
    single, parallel = both_ways(lambda **way: profile("simple", **way))
    assert_same_training(parallel, single)
    assert parallel.module.threads >= {f"replica-{index}-{device(index)}" for index in (0, 1)}
    durations = parallel.trainer.profiler.recorded_durations
    assert len(single.trainer.profiler.recorded_durations["network"]) == 5
    step = "[Strategy]BalancedDataParallelStrategy.training_step"
    for name in ("[Replica 0]network", "[Replica 1]network", step, "hook"):
        assert len(durations[name]) == 5, name
    assert "network" not in durations
    assert "[Replica 1]network" in parallel.trainer.profiler.summary()


def test_actions_in_threads_that_serve_all_replicas_are_not_recorded():
    """As in the threads of autograd, which recompute on accelerators."""
    together = threading.Barrier(2, timeout=30)

    class Elsewhere(Classifier):
        def training_step(self, batch, batch_idx):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self.profile_elsewhere, batch_idx).result()
            return super().training_step(batch, batch_idx)

        def profile_elsewhere(self, batch_idx):
            with self.trainer.profiler.profile("elsewhere"):
                if batch_idx:  # in the first batch, replicas run in order
                    together.wait()

    trained = train(Elsewhere(), balanced([2, 6]), 2, profiler="simple", max_epochs=1)
    assert not [name for name in trained.trainer.profiler.recorded_durations if "elsewhere" in name]


def test_a_failure_on_a_replica_does_not_change_the_profiler():
    class Failing(Profiled):
        def training_step(self, batch, batch_idx):
            with self.trainer.profiler.profile("network"):
                raise ArithmeticError

    profiler = SimpleProfiler()
    with pytest.raises(ArithmeticError):
        train(Failing(), balanced([2, 6]), 2, profiler=profiler)
    assert not vars(profiler).keys() & {"start", "stop"}
    assert not profiler.current_actions.keys() & {"network", "[Replica 0]network", "[Replica 1]network"}


def test_the_advanced_profiler_sees_calls_of_every_replica(tmp_path):
    def describe(**way):
        trained = profile(AdvancedProfiler(tmp_path, str(way["devices"])), **way)
        (path,) = tmp_path.glob(f"fit-{way['devices']}*")
        return trained, path.read_text().split("Profile stats for: ")

    (single, expected), (parallel, found) = both_ways(describe)
    assert_same_training(parallel, single)
    assert parallel.module.threads == {"MainThread"}
    for name, reports in (("network", expected), ("[Replica 0]network", found), ("[Replica 1]network", found)):
        (report,) = (report for report in reports if report.splitlines()[0] == name)
        assert "linear.py" in report


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch before 2.13
@pytest.mark.parametrize("names_of_modules", [True, False])
def test_the_torch_profiler_records_operators_of_every_replica(tmp_path, names_of_modules):
    def count(**way):
        profiler = PyTorchProfiler(tmp_path, str(way["devices"]), record_module_names=names_of_modules)
        trained = profile(profiler, **way)
        # A device records the regions that the host names, too.
        events = [one for one in trained.trainer.profiler.function_events if one.device_type == DeviceType.CPU]
        names = [event.name for event in events]
        wanted = ("aten::addmm", "TanhBackward0", "[pl][profile]network", "[pl][profile][Replica 1]network")
        return trained, [names.count(name) for name in wanted]

    (single, expected), (parallel, found) = both_ways(count)
    assert_same_training(parallel, single)
    batches_recorded = expected[2]
    assert expected == [2 * batches_recorded, batches_recorded, batches_recorded, 0]
    assert found == [4 * batches_recorded, 2 * batches_recorded, 0, batches_recorded]


class Tunable(Evaluated):
    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 1e-3, 2
        self.double()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        return batches(64, self.batch_size)

    val_dataloader = train_dataloader


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Return a module and its trainer, without Lightning's garbage collection before every trial, which is slow."""
    monkeypatch.setattr(batch_size_scaling, "garbage_collection_cuda", lambda: None)

    def make(build, strategy, devices):
        return seeded(build), quiet_trainer(strategy, devices, max_epochs=1, default_root_dir=tmp_path)

    return make


def test_the_learning_rate_finder_finds_the_same(tuned):
    def run(**way):
        module, trainer = tuned(Tunable, **way)
        before = [p.clone() for p in module.parameters()]
        finder = Tuner(trainer).lr_find(module, num_training=25, min_lr=1e-3, max_lr=10)
        assert relative_difference(list(module.parameters()), before) == 0
        return finder, module

    (expected, single), (found, parallel) = both_ways(run)
    assert found.results["lr"] == expected.results["lr"]
    assert found.results["loss"] == pytest.approx(expected.results["loss"], rel=1e-10)
    assert found.suggestion() == expected.suggestion() == parallel.lr == single.lr != 1e-3


class Exhausting(Tunable):
    """Runs out of memory on chunks of more than 15 samples, which a batch of more than 20 samples has."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > (20 if self.trainer.num_devices == 1 else 15):
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    validation_step = training_step


@pytest.mark.parametrize(
    ("mode", "method", "first", "size"), [("power", "fit", 8, 16), ("binsearch", "validate", 16, 20)]
)
def test_the_batch_size_finder_finds_the_same(tuned, mode, method, first, size):
    def run(**way):
        module, trainer = tuned(Exhausting, **way)
        options = {"mode": mode, "method": method, "init_val": first, "steps_per_trial": 1, "margin": 0}
        return Tuner(trainer).scale_batch_size(module, **options), module.batch_size

    assert both_ways(run) == ((size, size), (size, size))
