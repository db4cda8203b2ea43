import logging
import threading

import pytest
import torch


@pytest.fixture(autouse=True)
def _quiet_and_seeded():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_thread_left_behind():
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("replica-")]
    assert not left, f"threads of replicas outlived the test: {left}"
