import logging
import os
import signal
import threading

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch: threads cost more than they save on tensors of tests
# Without a buffer, Python writes a line in several parts, and the lines of the ranks that share a pipe mix.
os.environ.pop("PYTHONUNBUFFERED", None)

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

from lightning_ddp_ext.distributed.exchange import destroy_group
from tests.support import devices

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.support.rank_tests", "tests.virtual_accelerator.fixtures"]


def pytest_addoption(parser):
    parser.addoption(
        "--accelerator", default="cpu", help="the devices of tests: cpu, cuda, or another accelerator of Lightning"
    )


def pytest_configure(config):
    devices.choose(config.getoption("--accelerator"))


@pytest.hookimpl(trylast=True)  # when the conftest.py of folders have added their markers
def pytest_collection_modifyitems(config, items):
    """Leave out tests that are about CPUs on another device, and tests of devices unless `-m gpu` asks for them."""
    is_cpu = config.getoption("--accelerator") == "cpu"
    left_out = "gpu" if is_cpu and "gpu" not in config.getoption("-m") else "" if is_cpu else "cpu_only"
    chosen = [item for item in items if not left_out or item.get_closest_marker(left_out) is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def skip(reason):
    """Skip a test for what this machine lacks; where all checks run (`.ci/run`), nothing may be lacking."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _quiet_and_seeded():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_thread_left_behind():
    before = set(threading.enumerate())
    yield
    left = [
        thread.name
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith(("replica-", "prefetch"))
    ]
    assert not left, f"threads of replicas or loaders outlived the test: {left}"


@pytest.fixture
def _side_by_side(monkeypatch):
    """Let replicas run in their threads however short a step is."""
    monkeypatch.setattr("lightning_ddp_ext.replicas.workers._SHORT", 0.0)


@pytest.fixture(autouse=True)
def _no_rank_left_behind():
    """Lightning writes ranks and addresses into the environment, which processes started later would believe."""
    before = dict(os.environ)
    yield
    rank_zero_only.rank = 0  # another rank says nothing
    if dist.is_initialized():
        destroy_group()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def tensors_on_device():
    """The tensors of the test lie on the first device."""
    with devices.tensors_on_device():
        yield


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    destroy_group()
