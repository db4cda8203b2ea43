"""Connections that are remembered can be broken, under a thread that waits for them; all others stay."""

import contextlib
import os
import socket
import threading

import pytest

from lightning_ddp_ext.distributed import backends
from lightning_ddp_ext.distributed.backends import (
    break_connections,
    break_rest,
    count_received,
    spare_port,
    tracked_connections,
)


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.setattr(backends, "_tracked", {})
    monkeypatch.setattr(backends, "_spared_ports", set())
    monkeypatch.setattr(backends, "_has_broken", False)


@pytest.fixture
def connect():
    """Make a connection of two sockets of this process."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect():
            own = stack.enter_context(socket.create_connection(listener.getsockname()))
            return own, stack.enter_context(listener.accept()[0])

        connect.listener = listener
        yield connect


def works(pair):
    own, other = pair
    try:
        own.sendall(b"x")
        return other.recv(1) == b"x"
    except OSError:
        return False


def test_connections_that_a_block_opens_are_broken_and_no_others(connect):
    before = connect()
    with tracked_connections():
        during = connect()
    with tracked_connections(lasting=True):
        lasting = connect()
    break_rest()
    assert works(lasting)  # nothing was broken before
    received = []
    thread = threading.Thread(target=lambda: received.append(during[1].recv(1)))
    thread.start()
    assert break_connections() == 2
    thread.join(30)
    assert received == [b""]  # the thread was woken
    assert [works(pair) for pair in (before, during, lasting, connect())] == [True, False, True, True]
    assert break_connections() == 0
    break_rest()
    assert not works(lasting)


def test_a_listener_and_connections_to_a_spared_port_stay():
    with contextlib.ExitStack() as stack:
        with tracked_connections():
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            spare_port(listener.getsockname()[1])
            own = stack.enter_context(socket.create_connection(listener.getsockname()))
            served = stack.enter_context(listener.accept()[0])
        assert break_connections() == 1
        assert not works((served, own))  # the end of the client is
        later = stack.enter_context(socket.create_connection(listener.getsockname()))
        assert works((later, stack.enter_context(listener.accept()[0])))


def test_a_descriptor_that_is_used_again_is_left_alone(connect):
    with tracked_connections():
        own, other = connect()
    own.close()
    other.close()
    pair = connect()
    assert break_connections() == 0
    assert works(pair)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux counts the bytes of a connection")
def test_bytes_that_come_are_counted_but_for_one_port(connect):
    own, other = connect()
    before = count_received(None)
    other.sendall(b"x" * 1000)
    assert len(own.recv(1000, socket.MSG_WAITALL)) == 1000
    socket.setdefaulttimeout(5)
    try:
        assert count_received(None) == before + 1000
        assert os.get_blocking(own.fileno())
    finally:
        socket.setdefaulttimeout(None)
    without = count_received(connect.listener.getsockname()[1])
    other.sendall(b"x")
    assert own.recv(1) == b"x"
    assert count_received(connect.listener.getsockname()[1]) == without
