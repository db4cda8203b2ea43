"""Messages through a store whose process may end; sending them is tested with `ddp_join`."""

import multiprocessing
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_ddp_ext.distributed.exchange import StoreMailbox


def serve(ports):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports.put(store.port)
    time.sleep(120)


@pytest.fixture
def server():
    """A process with a store, and its port."""
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    process = context.Process(target=serve, args=(ports,), daemon=True)
    process.start()
    yield process, ports.get(timeout=60)
    process.kill()
    process.join(60)


def test_leaving_is_no_error_when_all_others_have_gone(server):
    process, port = server
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    messages = StoreMailbox(dist.group.WORLD)
    process.kill()
    process.join(60)
    for _ in range(3):  # the first one may be written to a connection that seems to be there
        messages.close()
    with pytest.raises(dist.DistError):
        messages.send("lost")
