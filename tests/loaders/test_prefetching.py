"""Batches that a thread fetches ahead: the same run as without it, errors at the right step, and no thread left."""

import _thread
import itertools
import random
import signal
import threading
import time
from functools import partial

import numpy
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext import BalancedDataParallelStrategy, BalancedDDPStrategy, DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext.loaders.prefetching import Prefetcher
from lightning_ddp_ext.loaders.step_loader import EvenSource, StepLoader
from tests.support.training import quiet_trainer

STRATEGIES = [BalancedDataParallelStrategy, DDPCheckpointStrategy, DDPJoinStrategy]
CPU = torch.device("cpu")
IS_OFF = (
    "`prefetch=2` is off from now on: .* Set `num_workers=1` in the loader, or draw from a generator of the dataset"
)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


class Samples(Dataset):
    """Samples with noise, which `draw` draws; some calls go wrong. Notes the threads in which samples are fetched."""

    def __init__(self, draw=lambda: 0.0, failing=None, error=ValueError):
        self.draw, self.failing, self.error = draw, failing, error
        self.threads = []

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.threads.append(threading.current_thread().name)
        if index == self.failing:
            raise self.error(f"sample {index} is broken")
        return torch.full((3,), float(index)) + self.draw(), torch.tensor(index)


class WithGenerator(Samples):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def __getitem__(self, index):
        features, number = super().__getitem__(index)
        return features + torch.rand((), generator=self.generator), number


class Network(LightningModule):
    def __init__(self, hook=lambda batch_idx: None):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.hook = hook
        self.seen = []

    def training_step(self, batch, batch_idx):
        features, numbers = batch
        self.seen += numbers.tolist()
        self.hook(batch_idx)
        return self.layers(features).square().mean() / 100

    def validation_step(self, batch, batch_idx):
        torch.rand(())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(make, prefetch, data, module=None, workers=0, seed=2, **options):
    """Return the samples of all steps and the parameters afterwards."""
    module = Network() if module is None else module
    for set_seed in (random.seed, numpy.random.seed, torch.manual_seed):
        set_seed(seed)
    loader = DataLoader(data, batch_size=3, shuffle=True, num_workers=workers)
    trainer = quiet_trainer(make(prefetch=prefetch), 1, **{"max_epochs": 2, **options})
    trainer.fit(module, loader, DataLoader(Samples(), batch_size=12))
    return module.seen, [parameter.tolist() for parameter in module.parameters()]


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 5, "val_check_interval": 2}], ids=["whole", "limited"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", STRATEGIES)
def test_a_run_is_the_same_bit_for_bit(make, workers, options):
    data = WithGenerator()
    found = train(make, 2, data, workers=workers, **options)
    assert workers or "prefetch" in data.threads
    assert not threads()
    assert found == train(make, 0, WithGenerator(), workers=workers, **options)
    if not (workers or options):
        assert found != train(make, 2, WithGenerator(), seed=3)


DRAWS = {"torch": lambda: float(torch.rand(())), "NumPy": lambda: float(numpy.random.rand()), "random": random.random}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("make", STRATEGIES)
def test_a_dataset_that_draws_from_generators_of_the_process_is_not_prefetched(make, draw):
    data = Samples(draw)
    with pytest.warns(UserWarning, match=IS_OFF) as caught:
        found = train(make, 2, data)
    assert len([one for one in caught if "prefetch" in str(one.message)]) == 1  # in two epochs
    assert set(data.threads) == {"MainThread"}
    assert found == train(make, 0, Samples(draw))


def test_a_dataset_that_draws_later_draws_at_the_same_place_as_without_a_thread():
    def drawing_late():
        calls = itertools.count()
        return Samples(lambda: float(torch.rand(())) if next(calls) >= 12 else 0.0)

    data = drawing_late()
    found = train(DDPCheckpointStrategy, 2, data, max_epochs=1)
    assert data.threads[-1] == "prefetch"
    assert found == train(DDPCheckpointStrategy, 0, drawing_late(), max_epochs=1)


@pytest.mark.parametrize("draw", [DRAWS["NumPy"], DRAWS["random"]], ids=["NumPy", "random"])
def test_a_later_use_of_other_generators_ends_the_thread_with_one_warning(draw):
    calls = itertools.count()
    data = Samples(lambda: draw() if next(calls) >= 12 else 0.0)
    with pytest.warns(UserWarning, match="was used while a thread fetched a batch") as caught:
        seen, _ = train(DDPCheckpointStrategy, 2, data)
    assert len([one for one in caught if "prefetch" in str(one.message)]) == 1
    assert sorted(seen) == sorted([*range(24), *range(24)])
    assert data.threads[-1] == "MainThread"


@pytest.mark.parametrize("error", [ValueError, SystemExit])
@pytest.mark.parametrize("make", STRATEGIES)
def test_an_error_of_the_loader_arrives_at_the_step_that_needs_the_batch(make, error):
    module = Network()
    trainer = quiet_trainer(make(prefetch=2), 1, max_epochs=1, use_distributed_sampler=False)
    with pytest.raises(error, match="sample 16 is broken"):
        trainer.fit(module, DataLoader(Samples(failing=16, error=error), batch_size=3))
    assert module.seen == list(range(15))  # five batches; the thread has met the error before the fourth
    assert not threads()


def fail(batch_idx, error):
    if batch_idx == 3:
        assert threads()
        raise error


@pytest.mark.parametrize("make", STRATEGIES)
def test_no_thread_is_left_after_an_error_of_a_step(make):
    with pytest.raises(ZeroDivisionError):
        train(make, 2, Samples(), Network(partial(fail, error=ZeroDivisionError())))
    assert not threads()


@pytest.mark.parametrize("make", STRATEGIES)
def test_ctrl_c_ends_a_loop_that_waits_for_the_thread(make):
    has_interrupted = []

    class Slow(Samples):
        def __getitem__(self, index):
            if threading.current_thread().name == "prefetch" and len(self.threads) == 15:
                time.sleep(0.3)  # until the loop waits
                has_interrupted.append(True)
                _thread.interrupt_main()  # as Ctrl-C
                time.sleep(0.3)
            return super().__getitem__(index)

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            train(make, 2, Slow())
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores further signals
    assert has_interrupted == [True]
    assert not threads()


def test_no_thread_is_left_when_loaders_are_reloaded_or_an_epoch_is_cut_short():
    class Cut(Network):
        def on_train_batch_start(self, batch, batch_idx):
            assert len(threads()) <= 1
            return -1 if batch_idx == 4 else None

    for options in ({}, {"reload_dataloaders_every_n_epochs": 1}):
        runs = [train(DDPCheckpointStrategy, n, WithGenerator(), Cut(), max_epochs=3, **options) for n in (0, 2)]
        assert runs[0] == runs[1]
        assert len(runs[0][0]) == 3 * 4 * 3
        assert not threads()


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
def test_several_loaders_are_fetched_in_one_thread(mode):
    def batches(prefetcher):
        torch.manual_seed(3)
        loaders = [DataLoader(range(size), batch_size=2, shuffle=True) for size in (7, 12)]
        combined = StepLoader(loaders, mode, EvenSource(), prefetcher=prefetcher)
        found = [(str(batch), float(torch.rand(())), combined.fetched.pop()) for batch in combined]
        combined.reset()
        return found

    found = batches(Prefetcher(2, CPU))
    assert len(found) >= 4
    assert found == batches(None)


def test_no_more_batches_are_ready_than_asked_for():
    fetched, has_fetched = [], threading.Semaphore(0)

    def fetch():
        fetched.append(len(fetched))
        has_fetched.release()
        return (fetched[-1], 0, 0), None

    prefetcher = Prefetcher(3, CPU)
    prefetcher.begin(8)
    taken = [prefetcher.next(fetch)[0][0] for _ in range(2)]
    for _ in range(5):
        assert has_fetched.acquire(timeout=10)
    assert not has_fetched.acquire(timeout=0.05)
    taken += [prefetcher.next(fetch)[0][0] for _ in range(6)]
    assert taken == fetched == list(range(8))
    prefetcher.close()
    assert not threads()


def test_wrong_numbers_and_loaders_with_a_state_are_refused():
    for make in STRATEGIES:
        with pytest.raises(ValueError, match="`prefetch` must be at least 0, got -1"):
            make(prefetch=-1)
        with pytest.raises(TypeError, match=r"`prefetch` must be an integer, got 1\.5"):
            make(prefetch=1.5)
    with pytest.raises(ValueError, match=r"`prefetch` must be 0 under `balanced_ddp`, got 2: .* Use `num_workers`"):
        BalancedDDPStrategy(prefetch=2)

    class Stateful(DataLoader):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    for strategy in (BalancedDataParallelStrategy, DDPCheckpointStrategy):  # `ddp_join` does not use its state
        trainer = quiet_trainer(strategy(prefetch=1), 1, max_epochs=1)
        with pytest.warns(UserWarning, match="`prefetch` has no effect on `Stateful`, a loader with a state") as caught:
            trainer.fit(Network(), Stateful(Samples(), batch_size=3))
        assert sum("`prefetch`" in str(warning.message) for warning in caught) == 1
