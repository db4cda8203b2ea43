import socket
import time

import pytest

from lightning_ddp_ext.distributed.ports import Listener, explain_failures, first_connection, listen


@pytest.fixture
def listener():
    made = Listener(["127.0.0.1"])
    yield made
    made.close()


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_listener_is_reached_without_an_answer(listener):
    assert explain_failures(listener.targets) == {}
    assert first_connection(listener.targets) == "127.0.0.1"


def test_what_is_not_reached_is_explained(listener):
    refused = ("127.0.0.1", closed_port())
    unknown = ("no.such.host.invalid", 1)
    failures = explain_failures([*listener.targets, refused, unknown])
    assert failures.keys() == {refused, unknown}
    assert failures[refused] == "Connection refused"


def test_no_answer_takes_as_long_as_the_limit(monkeypatch):
    full = listen("127.0.0.1", 0)
    full.listen(0)
    target = full.getsockname()
    waiting = []
    for _ in range(4):  # fill the queue of connections that nobody accepts
        connecting = socket.socket()
        connecting.setblocking(False)
        connecting.connect_ex(target)
        waiting.append(connecting)
    started = time.monotonic()
    assert explain_failures([target], 0.2) == {target: "no answer within 0.2 s"}
    assert time.monotonic() - started < 5
    for connection in (full, *waiting):
        connection.close()


def test_a_listener_on_all_addresses_is_reached_on_each():
    made = Listener([])
    assert first_connection([("127.0.0.1", closed_port()), ("127.0.0.1", made.port)]) == "127.0.0.1"
    made.close()


def test_an_address_of_another_host_cannot_be_listened_on():
    with pytest.raises(OSError, match="Cannot assign requested address"):
        listen("192.0.2.1", 0)
