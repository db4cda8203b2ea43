"""Meeting although the port is taken: rank 0 moves on to the next of a few, and the others look for its store there."""

import dataclasses
import errno
import logging
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from lightning_ddp_ext.distributed.init_method import RendezvousEndpoint
from lightning_ddp_ext.distributed.rendezvous import invites
from lightning_ddp_ext.distributed.stores import OpenStore, await_host, connecting_host, has_listener, open_store
from lightning_ddp_ext.errors import RendezvousError

_PROBE_LIMIT = 2.0  # seconds for a connection to a host that answers
_ANSWER_LIMIT = timedelta(seconds=5)  # for a store; what has the port may never answer
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0  # seconds between attempts
_STORE_PAUSE = 1.0  # seconds until a store is asked again: rank 0 may not have written its invitation yet
_STRANGER_PAUSE = 10.0  # seconds until a program that is no store is asked again

_logger = logging.getLogger(__name__)


def open_store_of_run(
    endpoint: RendezvousEndpoint, *, rank: int, world_size: int, num_nodes: int, timeout: timedelta
) -> OpenStore:
    """Open the store where ranks meet, at another port if that of the place is taken.

    Ranks tell their own store from another run's by the name in its invitation. As rank 0 takes the invitation back
    when all have come, nobody finds a store of an earlier meeting either.

    Args:
        endpoint: Where; with `other_ports`, or just `open_store`.
        rank: This rank.
        world_size: Number of ranks.
        num_nodes: Number of hosts.
        timeout: How long to wait for rank 0.

    Returns:
        The store.

    Raises:
        RendezvousError: If rank 0 finds no free port, or is not found in time.
    """
    if not endpoint.other_ports:
        return open_store(endpoint, rank=rank, world_size=world_size, num_nodes=num_nodes, timeout=timeout)
    assert endpoint.host is not None  # files have no ports
    assert endpoint.port is not None
    endpoints = [
        dataclasses.replace(endpoint, port=port, other_ports=()) for port in (endpoint.port, *endpoint.other_ports)
    ]
    if rank == 0:
        return _serve_first_free(endpoints, world_size, num_nodes, timeout)
    return _Search(endpoints, rank, world_size, num_nodes).find(timeout)


def _serve_first_free(
    endpoints: list[RendezvousEndpoint], world_size: int, num_nodes: int, timeout: timedelta
) -> OpenStore:
    for endpoint in endpoints:
        try:
            opened = open_store(endpoint, rank=0, world_size=world_size, num_nodes=num_nodes, timeout=timeout)
        except RendezvousError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise
            continue
        if endpoint is not endpoints[0]:
            _logger.warning(
                "port %d of host %s is taken: the ranks meet at port %d.",
                endpoints[0].port, socket.gethostname(), endpoint.port,
            )  # fmt: skip
        return opened
    raise RendezvousError(
        f"ports {_listed(endpoints)} of host {socket.gethostname()}, rank 0, are all taken."
        " Set `MASTER_PORT` to a free one."
    )


class _Search:
    """How a rank finds the store of its run."""

    def __init__(self, endpoints: list[RendezvousEndpoint], rank: int, world_size: int, num_nodes: int) -> None:
        self._places = endpoints
        self._rank, self._world_size, self._num_nodes = rank, world_size, num_nodes
        assert endpoints[0].host is not None
        self._host = connecting_host(endpoints[0].host, num_nodes)
        self._left_alone: dict[int | None, float] = {}  # until when, by port

    def find(self, timeout: timedelta) -> OpenStore:
        """Try all ports until one has the store.

        Args:
            timeout: How long to wait for rank 0, and for keys of the store afterwards.

        Returns:
            The store.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        assert self._places[0].port is not None
        await_host(self._host, self._places[0].port, rank=self._rank, timeout=timeout)
        pause = _FIRST_PAUSE
        while True:
            for endpoint in self._places:
                opened = self._try(endpoint)
                if opened is not None:
                    opened.store.set_timeout(timeout)
                    return opened
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"rank {self._rank} on host {socket.gethostname()} did not find rank 0 at {self._host}, ports"
                    f" {_listed(self._places)}, within {timeout.total_seconds():g} s. Check that rank 0 has been"
                    " started there."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _try(self, endpoint: RendezvousEndpoint) -> OpenStore | None:
        """Return the store at a place, if it is that of the run."""
        assert endpoint.port is not None
        if time.monotonic() < self._left_alone.get(endpoint.port, 0.0):
            return None
        if not has_listener(self._host, endpoint.port, _PROBE_LIMIT):
            return None
        try:
            opened = open_store(
                endpoint, rank=self._rank, world_size=self._world_size, num_nodes=self._num_nodes, timeout=_ANSWER_LIMIT
            )
            if invites(opened.store, endpoint.run):
                return opened
        except RendezvousError:
            self._left_alone[endpoint.port] = time.monotonic() + _STRANGER_PAUSE
        except dist.DistError:  # the store of another run has just ended
            pass
        else:
            self._left_alone[endpoint.port] = time.monotonic() + _STORE_PAUSE
        return None


def _listed(endpoints: list[RendezvousEndpoint]) -> str:
    return ", ".join(str(endpoint.port) for endpoint in endpoints)
