"""Settings of a process group, ports of a node, and errors of a rendezvous that fails, in one process."""

import contextlib
import re
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.distributed import backends, network, rendezvous
from lightning_ddp_ext.distributed.backends import check_backend
from lightning_ddp_ext.distributed.network import Interface, explain_failures, listen
from lightning_ddp_ext.distributed.process_group import init_process_group
from lightning_ddp_ext.distributed.stores import RendezvousEndpoint, connect_store, parse_init_method, serve_store
from lightning_ddp_ext.errors import BackendError, NetworkInterfaceError, RendezvousError
from tests.support.ports import free_port


def test_endpoints_are_parsed_and_written():
    for text, endpoint, written in (
        (None, None, None),
        ("env://", None, None),
        ("tcp://node1:29501", RendezvousEndpoint("node1", 29501), "node1:29501"),
        ("tcp://10.0.0.1:29501/", RendezvousEndpoint("10.0.0.1", 29501), "10.0.0.1:29501"),
        ("tcp://[fd00::1]:29501", RendezvousEndpoint("fd00::1", 29501), "[fd00::1]:29501"),
        ("file:///shared/meeting", RendezvousEndpoint(path=Path("/shared/meeting")), "/shared/meeting"),
    ):
        assert parse_init_method(text) == endpoint
        assert written is None or str(endpoint) == written


def test_other_forms_are_rejected():
    for text, reason in (
        ("node1:29501", "is of no known form. Use `env://`, `tcp://host:port` or `file:///path`"),
        ("env://node1", "is of no known form"),
        ("tcp://node1", "needs a host and a port"),
        ("tcp://:29501", "needs a host and a port"),
        ("tcp://node1:port", "Use `env://`"),
        ("tcp://node1:29501/path", "needs a host and a port"),
        ("tcp://node1:29501?rank=0", "leave out `?rank=0`"),
        ("file://relative/path", "needs an absolute path"),
        ("file:///", "needs an absolute path"),
    ):
        with pytest.raises(ValueError, match=re.escape(reason)):
            parse_init_method(text)


def test_available_backends_are_accepted_and_others_rejected_with_the_alternative(monkeypatch):
    for backend in (None, "gloo", "GLOO", "cpu:gloo"):
        check_backend(backend)
        check_backend(backend, "cpu")
    monkeypatch.setattr(backends, "BUILT", {**dict.fromkeys(backends.BUILT, lambda: False), "gloo": lambda: True})
    for backend, remedy in (
        ("mpi", "Use `gloo`, also for processes that `mpirun` starts."),
        ("nccl", "or install a build of torch with CUDA"),
        ("ucc", "Use `gloo` on CPUs"),
        ("cpu:gloo,cuda:nccl", "no backend `nccl`"),
        ("fake", "no backend `fake`; available: gloo. Use one of these"),
    ):
        with pytest.raises(BackendError, match="available: gloo") as raised:
            check_backend(backend)
        assert f"`process_group_backend={backend}`" in str(raised.value)
        assert remedy in str(raised.value)


def test_a_backend_for_other_devices_is_rejected_and_a_registered_one_is_accepted(monkeypatch):
    monkeypatch.setitem(backends.BUILT, "nccl", lambda: True)
    with pytest.raises(BackendError, match="does not communicate for cpu devices, only for cuda"):
        check_backend("nccl", "cpu")
    check_backend("nccl", "cuda")
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "theirs"])
    check_backend("theirs", "cpu")


def test_a_backend_that_is_listed_once_it_has_been_named_is_accepted(monkeypatch):
    """As `nccl-legacy` of torch 2.15, the earlier class behind `nccl`, where torch has been built with NCCL."""
    listed = [*dist.Backend.backend_list]
    monkeypatch.setattr(dist.Backend, "backend_list", listed)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: listed.append(name) or True)
    monkeypatch.setitem(backends.BUILT, "nccl", lambda: False)
    with pytest.raises(BackendError, match="no backend `nccl-legacy`"):
        check_backend("cpu:gloo,cuda:nccl-legacy", "cuda")
    monkeypatch.setitem(backends.BUILT, "nccl", lambda: True)
    check_backend("cpu:gloo,cuda:nccl-legacy", "cuda")


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_a_port_of_another_program_is_an_error(address):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"^port {port} of node ") as raised:
            serve_store(address, port, 1, timedelta(seconds=1))
    text = str(raised.value)
    assert "already in use. Choose another port for rank 0, or end the process that has this one, which `ss" in text


def test_an_address_of_another_node_cannot_be_listened_on():
    message = "192.0.2.1, rank 0: Cannot assign requested address. Choose another port"
    with pytest.raises(RendezvousError, match=message):
        serve_store("192.0.2.1", 0, 1, timedelta(seconds=1))


def test_an_interface_that_cannot_be_listened_on_is_an_error_that_all_ranks_hear_of(monkeypatch):
    monkeypatch.setattr(rendezvous, "choose_interface", lambda *_, **__: Interface("eth0", ("192.0.2.1",)))
    opened = SimpleNamespace(local_address=None)
    own = SimpleNamespace(_listening=contextlib.ExitStack(), rank=3, backend="gloo", interface=None, _opened=opened)
    with pytest.raises(NetworkInterfaceError, match=r"rank 3 cannot listen on 192.0.2.1: .* Set `network.interface`"):
        rendezvous.Rendezvous._choose(own, 2, [])


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_a_listening_port_is_reached_without_an_answer_and_other_failures_are_explained(address):
    refused, unknown = ("127.0.0.1", free_port()), ("no.such.host.invalid", 1)
    with listen(address, 0) as listening, contextlib.ExitStack() as stack, listen("127.0.0.1", 0) as full:
        reached = ("127.0.0.1", listening.getsockname()[1])
        full.listen(0)
        for _ in range(4):  # fill the queue of connections, which nobody accepts
            connecting = stack.enter_context(socket.socket())
            connecting.setblocking(False)
            connecting.connect_ex(full.getsockname())
        failures = explain_failures([reached, refused, unknown, full.getsockname()], 0.5)
    assert len(failures) == 3
    assert failures.pop(refused) == "Connection refused"
    assert failures.pop(unknown)
    assert list(failures.values()) == ["no answer within 0.5 s"]


def init(**settings):
    one_second = timedelta(seconds=1)
    shared = {"backend": "gloo", "world_size": 2, "main_address": "127.0.0.1", "main_port": 1, "timeout": one_second}
    return init_process_group(**{**shared, **settings})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_store_and_an_error_of_this_node_are_named_even_if_no_other_rank_hears_of_it(monkeypatch, rank):
    with pytest.raises(NetworkInterfaceError, match="`nosuch0` not found on node"):
        init(rank=rank, main_port=free_port(), network_interface="nosuch0")

    def lose(*args, **kwargs):
        raise dist.DistStoreError("wait timeout")

    monkeypatch.setattr(rendezvous, "open_store", lose)
    message = rf"rank {rank} lost the store at 127.0.0.1:1 .*\(wait timeout\)\. Look for the errors of the other ranks"
    with pytest.raises(RendezvousError, match=message):
        init(rank=rank)


def test_an_ipv6_address_is_written_in_brackets():
    port = free_port()
    with pytest.raises(RendezvousError, match=rf"could not connect to rank 0 at \[::1\]:{port} within"):
        connect_store("::1", port, rank=1, timeout=timedelta(seconds=0.2))


@pytest.mark.parametrize(
    ("backend", "device", "is_bound"),
    [
        ("theirs", "cuda:1", True),
        ("cpu:gloo,cuda:theirs", "cuda:1", True),
        ("gloo", "cuda:1", False),  # torch would split gloo for ranks outside of a group, which it cannot
        ("cpu:theirs,cuda:gloo", "cuda:1", False),
        ("theirs", "cpu", False),
        ("gloo", None, False),
    ],
)
def test_a_device_is_bound_unless_gloo_serves_it(monkeypatch, tmp_path, backend, device, is_bound):
    bound = []
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "theirs"])
    monkeypatch.setattr(dist, "init_process_group", lambda *args, device_id, **options: bound.append(device_id))
    device = None if device is None else torch.device(device)
    init(backend=backend, rank=0, world_size=1, init_method=f"file://{tmp_path}/store", device_id=device)
    assert bound == [device if is_bound else None]


def test_the_interface_of_a_route_is_not_the_one_of_an_address_that_other_nodes_have_too(monkeypatch):
    routes = {"172.17.0.1": "172.17.0.1", "10.0.0.1": "10.0.0.2"}
    monkeypatch.setattr(network, "address_towards", routes.get)
    monkeypatch.setattr(network, "interface_with", lambda address: Interface(f"of {address}", (address,)))
    assert network.interface_towards(routes, rank=1).name == "of 10.0.0.2"
    with pytest.raises(NetworkInterfaceError, match=r"rank 1, has no route to the other nodes \(none given\)\. Set"):
        network.interface_towards([], rank=1)
