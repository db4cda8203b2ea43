"""Fails when a private name moves that the watch over ranks relies on. What they are for is tested on several ranks."""

import pickle
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException

from lightning_ddp_ext._compat import collectives, lightning


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_store_in_a_file_is_told_from_others(group):
    assert collectives.keeps_store_in_file(dist.PrefixStore("a", collectives.cloned_store(group)))
    assert not collectives.keeps_store_in_file(dist.PrefixStore("a", dist.HashStore()))


def test_gloo_takes_no_notice_of_an_abort(group):
    """If it begins to, its connections need not be broken any more."""
    collectives.abort_groups()
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 1


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711",
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation",
        "NCCL communicator was aborted on rank 0.",
    ],
)
def test_lost_connections_are_known_by_their_messages(text):
    assert collectives.is_lost_connection(RuntimeError(text))
    assert not collectives.is_lost_connection(ValueError(text))


def test_errors_of_stores_are_lost_connections_and_others_are_none():
    assert collectives.is_lost_connection(dist.DistStoreError("wait timeout"))
    assert collectives.is_lost_connection(dist.DistNetworkError("broken"))
    assert not collectives.is_lost_connection(RuntimeError("boom"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert not collectives.is_lost_connection(caught.value)


@pytest.mark.parametrize("error", [SIGTERMException(), SIGTERMException(143), _TunerExitException()])
def test_ends_that_every_rank_makes_are_planned(error):
    assert lightning.is_planned_end(error)


@pytest.mark.parametrize("error", [SystemExit(), SystemExit(0)])
def test_an_exit_may_be_one_of_this_rank_alone(error):
    assert lightning.is_exit(error)
    assert not lightning.is_planned_end(error)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), ValueError()])
def test_other_ends_are_not_planned(error):
    assert not lightning.is_planned_end(error)
    assert not lightning.is_exit(error)


events = []


@contextmanager
def surround():
    try:
        yield
    except ArithmeticError as error:
        events.append("surrounded")
        raise RuntimeError("explained") from error


class Failing(Callback):
    def on_fit_start(self, trainer, pl_module):
        raise ArithmeticError

    def on_exception(self, trainer, pl_module, exception):
        events.append(type(exception))


def test_an_error_passes_what_surrounds_a_launch_before_callbacks_hear_of_it():
    events.clear()
    trainer = Trainer(
        strategy="ddp", accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, callbacks=[Failing()]
    )
    lightning.surround_launch(trainer.strategy.launcher, surround)
    with pytest.raises(RuntimeError, match="explained"):
        trainer.fit(BoringModel())
    assert events == ["surrounded", RuntimeError]


def test_what_surrounds_a_launch_is_pickled_with_the_launcher():
    trainer = Trainer(strategy="ddp_spawn", accelerator="cpu", devices=2, logger=False)
    launcher = trainer.strategy.launcher
    lightning.surround_launch(launcher, surround)
    copied = pickle.loads(pickle.dumps(launcher.launch))
    assert copied.args[1] is surround
    assert type(copied.args[0]) is type(launcher)
