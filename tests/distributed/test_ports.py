import errno
import os
import socket
import time

import pytest

from lightning_ddp_ext.distributed.init_method import RendezvousEndpoint
from lightning_ddp_ext.distributed.ports import (
    bind,
    check_port,
    explain_failures,
    first_connection,
    listen,
    who_listens,
)
from lightning_ddp_ext.distributed.stores import check_endpoint
from lightning_ddp_ext.errors import RendezvousError
from tests.support.ports import free_port


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_a_port_of_another_program_is_rejected_with_its_name_and_a_free_one_stays_free(taken, address):
    with pytest.raises(RendezvousError, match=rf"port {taken} of node .* already in use by .*end the process") as error:
        check_port(address, taken)
    assert f"(process {os.getpid()})" in str(error.value)
    port = free_port()
    for _ in range(2):
        check_port(address, port)
    assert who_listens(port) is None


def test_a_bound_port_accepts_no_connections():
    port = free_port()
    with bind("127.0.0.1", port), socket.socket() as other:
        assert other.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_an_address_of_another_node_cannot_be_listened_on():
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.1, rank 0: Cannot assign .*\. Choose another port"):
        check_port("192.0.2.1", 0)


def test_endpoints_of_torchruns_agent_and_of_a_file_are_not_checked(taken, monkeypatch, tmp_path):
    endpoint = RendezvousEndpoint("127.0.0.1", taken)
    with pytest.raises(RendezvousError):
        check_endpoint(endpoint, 1)
    check_endpoint(RendezvousEndpoint(path=tmp_path / "meeting"), 1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(taken))
    check_endpoint(endpoint, 1)


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_a_listening_port_is_reached_without_an_answer_and_other_failures_are_explained(address):
    refused, unknown = ("127.0.0.1", free_port()), ("no.such.host.invalid", 1)
    with listen(address, 0) as listening:
        reached = ("127.0.0.1", listening.getsockname()[1])
        assert first_connection([refused, reached]) == "127.0.0.1"
        failures = explain_failures([reached, refused, unknown])
    assert failures.keys() == {refused, unknown}
    assert failures[refused] == "Connection refused"


def test_no_answer_takes_as_long_as_the_limit():
    full = listen("127.0.0.1", 0)
    full.listen(0)
    target = full.getsockname()
    waiting = []
    for _ in range(4):  # fill the queue of connections, which nobody accepts
        connecting = socket.socket()
        connecting.setblocking(False)
        connecting.connect_ex(target)
        waiting.append(connecting)
    started = time.monotonic()
    assert explain_failures([target], 0.2) == {target: "no answer within 0.2 s"}
    assert time.monotonic() - started < 5
    for connection in (full, *waiting):
        connection.close()
