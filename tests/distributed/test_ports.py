import errno
import os
import socket

import pytest

from lightning_ddp_ext.distributed.init_method import RendezvousEndpoint
from lightning_ddp_ext.distributed.ports import bind, check_port, who_listens
from lightning_ddp_ext.distributed.stores import check_endpoint
from lightning_ddp_ext.errors import RendezvousError


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_a_port_of_another_program_is_refused_with_its_name(taken, address):
    with pytest.raises(RendezvousError, match=rf"port {taken} of host .* already in use by .*end the process") as error:
        check_port(address, taken)
    assert f"(process {os.getpid()})" in str(error.value)


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_a_free_port_stays_free(address):
    port = free_port()
    check_port(address, port)
    check_port(address, port)


def test_a_port_is_taken_without_listening():
    port = free_port()
    with bind("127.0.0.1", port), socket.socket() as other:
        assert other.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_a_port_that_cannot_be_had_for_another_reason_has_another_remedy():
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.1, rank 0: Cannot assign .*\. Choose another port"):
        check_port("192.0.2.1", 0)


def test_nobody_listens_on_a_free_port():
    assert who_listens(free_port()) is None


def test_the_place_of_torchruns_agent_and_a_file_are_left_alone(taken, monkeypatch, tmp_path):
    place = RendezvousEndpoint("127.0.0.1", taken)
    with pytest.raises(RendezvousError):
        check_endpoint(place, 1)
    check_endpoint(RendezvousEndpoint(path=tmp_path / "meeting"), 1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(taken))
    check_endpoint(place, 1)
