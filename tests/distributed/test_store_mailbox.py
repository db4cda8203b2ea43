"""Messages through a store whose process may end; sending them is tested with `ddp_join`."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_ddp_ext.distributed.exchange import StoreMailbox
from tests.support.processes import run_processes


def close_after_the_server():
    """Kill the process that has the store before the mailbox is closed; return True if sending fails then."""
    receiving, sending = os.pipe()
    server = os.fork()
    if server == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(sending, str(store.port).encode())
        time.sleep(120)
        os._exit(0)
    port = int(os.read(receiving, 16))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    messages = StoreMailbox(dist.group.WORLD)
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    for _ in range(3):  # the first one may be written to a connection that seems to be there
        messages.close()
    with pytest.raises(dist.DistError):
        messages.send("lost")
    return True


def test_closing_is_no_error_when_all_others_have_gone():
    assert run_processes(close_after_the_server, 1) == [True]
