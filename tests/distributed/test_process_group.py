"""Errors of a rendezvous that fails, in one process."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_ddp_ext.distributed import process_group
from lightning_ddp_ext.distributed.stores import connect_store
from lightning_ddp_ext.errors import NetworkInterfaceError, RendezvousError
from tests.support.ports import free_port


def init(**settings):
    one_second = timedelta(seconds=1)
    shared = {"backend": "gloo", "world_size": 2, "main_address": "127.0.0.1", "main_port": 1, "timeout": one_second}
    return process_group.init_process_group(**{**shared, **settings})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_store_is_named(monkeypatch, rank):
    def lose(*args, **kwargs):
        raise dist.DistStoreError("wait timeout")

    monkeypatch.setattr(process_group, "open_store", lose)
    message = rf"rank {rank} lost the store at 127.0.0.1:1 .*\(wait timeout\)\. Look for the errors of the other ranks"
    with pytest.raises(RendezvousError, match=message):
        init(rank=rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_this_node_is_raised_even_if_no_other_rank_hears_of_it(rank):
    with pytest.raises(NetworkInterfaceError, match="`nosuch0` not found on node"):
        init(rank=rank, main_port=free_port(), network_interface="nosuch0")


def test_an_ipv6_address_is_written_in_brackets():
    port = free_port()
    with pytest.raises(RendezvousError, match=rf"could not connect to rank 0 at \[::1\]:{port} within"):
        connect_store("::1", [port], rank=1, timeout=timedelta(seconds=0.2))
