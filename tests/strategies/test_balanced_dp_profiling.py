"""Profilers of Lightning work, inside of steps too."""

import threading

import pytest
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch.nn import functional

from tests.parity import Classifier, assert_same_training, balanced, batches, both_ways, seeded, train


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


def run(profiler, **way):
    return train(seeded(Profiled), **way, profiler=profiler, loader=batches(40), max_epochs=1)


def test_the_simple_profiler_records_each_replica_while_others_run():
    single, parallel = both_ways(lambda **way: run("simple", **way))
    assert_same_training(parallel, single)
    assert parallel.module.threads >= {"replica-0-cpu", "replica-1-cpu"}
    durations = parallel.trainer.profiler.recorded_durations
    assert len(single.trainer.profiler.recorded_durations["network"]) == 5
    assert len(durations["[Replica 0]network"]) == len(durations["[Replica 1]network"]) == 5
    assert "network" not in durations
    assert len(durations["[Strategy]BalancedDataParallelStrategy.training_step"]) == 5
    assert "[Replica 1]network" in parallel.trainer.profiler.summary()


def test_outside_of_steps_names_stay_as_they_are():
    class Hooked(Profiled):
        def on_train_batch_end(self, *args):
            with self.trainer.profiler.profile("hook"):
                pass

    trained = train(seeded(Hooked), balanced([2, 6]), 2, profiler="simple", loader=batches(40), max_epochs=1)
    assert len(trained.trainer.profiler.recorded_durations["hook"]) == 5


def test_the_profiler_is_left_as_it_was_when_a_replica_fails():
    class Failing(Profiled):
        def training_step(self, batch, batch_idx):
            with self.trainer.profiler.profile("network"):
                raise ArithmeticError

    profiler = SimpleProfiler()
    with pytest.raises(ArithmeticError):
        train(Failing(), balanced([2, 6]), 2, profiler=profiler)
    assert not vars(profiler).keys() & {"start", "stop"}
    assert not profiler.current_actions.keys() & {"network", "[Replica 0]network", "[Replica 1]network"}


def test_the_advanced_profiler_sees_what_every_replica_calls(tmp_path):
    def describe(**way):
        trained = run(AdvancedProfiler(tmp_path, str(way["devices"])), **way)
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
        trained = run(profiler, **way)
        names = [event.name for event in trained.trainer.profiler.function_events]
        wanted = ("aten::addmm", "TanhBackward0", "[pl][profile]network", "[pl][profile][Replica 1]network")
        return trained, [names.count(name) for name in wanted]

    (single, expected), (parallel, found) = both_ways(count)
    assert_same_training(parallel, single)
    batches_recorded = expected[2]
    assert expected == [2 * batches_recorded, batches_recorded, batches_recorded, 0]
    assert found == [4 * batches_recorded, 2 * batches_recorded, 0, batches_recorded]
