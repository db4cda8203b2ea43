"""The watchdog on devices: it asks the device of its rank, and ends a wait for a device that no exception reaches."""

import time
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from lightning_ddp_ext._compat.torch import cloned_store
from lightning_ddp_ext.distributed.watchdog import Interruption, RunWatch
from lightning_ddp_ext.steps import trainer_watchdog
from tests import virtual_accelerator
from tests.support import devices
from tests.support.processes import run_processes


def test_the_device_of_a_rank_is_asked(virtual_devices, group, monkeypatch):
    made = []
    monkeypatch.setattr(
        trainer_watchdog, "RunWatch", lambda *args: made.append(args[-1]) or SimpleNamespace(start=list)
    )
    for device in (virtual_devices[1], torch.device("cpu")):
        trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(root_device=device))
        trainer_watchdog.TrainerWatchdog(60.0).start(trainer)
    synchronize, of_cpu = made
    synchronize()
    assert virtual_accelerator.counts()["host waits"] == 1
    assert of_cpu is None


def wait_for_a_rank_that_fails():
    """Rank 0 waits for its device, and so for rank 1; return the error that ends the wait."""
    device = devices.init_process_group("cpu:gloo,virtual:virtual_ccl")
    rank = dist.get_rank()
    store = dist.PrefixStore("watch", cloned_store(dist.group.WORLD))
    synchronize = partial(torch.accelerator.synchronize, device)
    watch = RunWatch(store, rank, 2, 60.0, lambda: {"step": 3, "phase": "counting"}, lambda: None, synchronize)
    watch.start()
    try:
        if rank == 1:
            watch.fail(ArithmeticError("boom"))
            return ""
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        total.item()  # without a result
        while True:
            time.sleep(0.1)
    except Interruption as error:
        return str(watch.explain(error))
    finally:
        watch.stop()


def test_a_wait_for_a_device_ends_when_another_rank_has_failed(virtual_devices):
    found = run_processes(wait_for_a_rank_that_fails, 2)
    assert found[0].startswith("rank 1 failed: ArithmeticError: boom")
