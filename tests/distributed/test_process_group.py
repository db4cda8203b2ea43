"""What is said when ranks lose each other while they meet, or do not find each other."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_ddp_ext.distributed import process_group
from lightning_ddp_ext.distributed.stores import connect_store
from lightning_ddp_ext.errors import RendezvousError
from tests.support.ports import free_port


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, r"rank 0: a rank that had come does not answer any more .*\(wait timeout\)\. Look for the errors of"),
        (1, r"rank 1 lost the store of rank 0 .*\(wait timeout\)\. Look for the error of rank 0"),
    ],
)
def test_rank_0_has_not_lost_its_own_store(monkeypatch, rank, message):
    def lose(*args, **kwargs):
        raise dist.DistStoreError("wait timeout")

    monkeypatch.setattr(process_group, "open_store_of_run", lose)
    with pytest.raises(RendezvousError, match=message):
        process_group.init_process_group(
            backend="gloo", rank=rank, world_size=2, main_address="127.0.0.1", main_port=1, timeout=timedelta(seconds=1)
        )


def test_an_address_of_ipv6_is_told_from_its_port():
    port = free_port()
    with pytest.raises(RendezvousError, match=rf"could not connect to rank 0 at \[::1\]:{port} within"):
        connect_store("::1", port, rank=1, timeout=timedelta(seconds=0.2))
