import os
import socket
import time

import pytest

from lightning_ddp_ext.distributed.ports import explain_failures, first_connection, listen, port_error
from tests.support.ports import free_port


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_a_port_of_another_program_is_an_error_that_names_the_program(address):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="in use") as raised:
            listen(address, port)
        text = str(port_error(address, port, raised.value))
    assert text.startswith(f"port {port} of node ")
    assert "already in use by `" in text
    assert f"(process {os.getpid()}). Choose another port for rank 0, or end the process" in text
    assert "in use. Choose" in str(port_error(address, free_port(), raised.value))


def test_an_address_of_another_node_cannot_be_listened_on():
    with pytest.raises(OSError, match="Cannot assign") as raised:
        listen("192.0.2.1", 0)
    text = str(port_error("192.0.2.1", 0, raised.value))
    assert "192.0.2.1, rank 0: Cannot assign requested address. Choose another port" in text


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
