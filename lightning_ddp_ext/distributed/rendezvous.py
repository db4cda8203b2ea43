"""The rendezvous of the ranks of a run: they agree on the interface of each node and check that nodes reach each other.

In each of its phases every rank sends a response to rank 0, which publishes one result, or an error that all raise.
"""

import contextlib
import dataclasses
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist

from lightning_ddp_ext.distributed.backends import includes_gloo
from lightning_ddp_ext.distributed.network import (
    CONNECT_LIMIT,
    ChosenNetwork,
    NodeNetwork,
    check_no_loopback,
    choose_interface,
    explain_failures,
    external_addresses,
    interface_addresses,
    interface_with,
    listen,
    loopback_address,
    machine_id,
    node_name,
)
from lightning_ddp_ext.distributed.stores import (
    REFUSED,
    OpenStore,
    RendezvousEndpoint,
    connect_store,
    is_agent_store,
    open_store,
    poll,
    serve_store,
)
from lightning_ddp_ext.errors import BackendError, DDPExtError, NetworkInterfaceError, RendezvousError

_REQUEST = "request"
_JOIN, _REACH, _MOVE = "join", "reach", "move"  # the phases
_SEEN = "seen"
_FAREWELL = 2.0  # seconds that rank 0 waits for others to read an error
_GRACE = 5.0  # seconds that rank 0 waits for other ranks after one has sent an error
_PATIENCE = 30.0  # seconds after which rank 0 warns that it waits for ranks
_PHASE_LIMIT = CONNECT_LIMIT + 20.0  # seconds; ranks on busy nodes are late

_ERRORS: dict[str, type[DDPExtError]] = {
    error.__name__: error for error in (BackendError, NetworkInterfaceError, RendezvousError)
}

_logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


@dataclass(slots=True)
class RendezvousProgress:
    """How far a rendezvous has come: the nodes, on rank 0, and whether rank 0 and this rank have exchanged messages."""

    backend: str | None = None
    endpoint: str | None = None
    nodes: tuple[NodeNetwork, ...] = ()
    is_answered: bool = False


@dataclass(kw_only=True, slots=True)
class Rendezvous:
    """One attempt of all ranks to meet; `error` is the reason why this rank cannot take part, for the other ranks."""

    backend: str
    rank: int
    world_size: int
    num_nodes: int
    interface: str | None  # as requested
    timeout: timedelta
    endpoint: RendezvousEndpoint
    progress: RendezvousProgress
    error: DDPExtError | None = None
    _opened: OpenStore = field(init=False)
    _moved: OpenStore | None = field(init=False, default=None)  # on rank 0
    _name: str = field(init=False, default="")  # of the request
    _store: dist.Store = field(init=False)  # the keys of the request in the opened store
    # Sockets that other nodes can try until the end.
    _listening: contextlib.ExitStack = field(init=False, default_factory=contextlib.ExitStack)

    def meet(self) -> tuple[ChosenNetwork, dist.Store]:
        """Return the network that all ranks agree on, and the store for the process group."""
        try:
            with self._listening:
                return self._meet()
        except (DDPExtError, dist.DistError) as failure:
            if self.error is not None and str(self.error) not in str(failure):
                raise self.error from None
            if isinstance(failure, DDPExtError):
                raise
            reason = (str(failure).splitlines() or [type(failure).__name__])[0]
            raise RendezvousError(
                f"rank {self.rank} lost the store at {self.endpoint} during the rendezvous ({reason}). Look for the"
                " errors of the other ranks, rank 0's first."
            ) from failure

    def _meet(self) -> tuple[ChosenNetwork, dist.Store]:
        before = self._opened = self._connect()  # the variable keeps the store until all have moved to another
        joined = self._open() if self.rank == 0 else self._join()
        network = ChosenNetwork(self.backend, tuple(NodeNetwork(**row) for row in joined["nodes"]))
        if len(network.nodes) > 1 and all(node.ports for node in network.nodes):
            self._agree(_REACH, {"failures": _try_nodes(self.rank, network)}, partial(_check_reached, network.nodes))
        if joined["moved_to"] is not None:
            # The store of rank 0 listens on all addresses: leave it for one that listens on the chosen address only.
            address, port = joined["moved_to"]
            self._opened = self._moved or connect_store(address, port, rank=self.rank, timeout=self.timeout)
            self._enter(self._name)
            # In the new store, because rank 0 closes the old one as soon as all have moved.
            self._agree(_MOVE, {}, lambda responses: {"moved": True})
        del before
        return network, dist.PrefixStore("process_group", self._store)

    def _connect(self) -> OpenStore:
        numbers = {"rank": self.rank, "world_size": self.world_size, "num_nodes": self.num_nodes}
        return open_store(self.endpoint, **numbers, timeout=self.timeout)

    def _enter(self, name: str) -> None:
        """Use the keys of a request in the opened store."""
        self._name, self._store = name, dist.PrefixStore(name, self._opened.store)

    def _open(self) -> Message:
        """Request the other ranks to join, and publish the network that follows from their responses; for rank 0."""
        opened = self._opened
        self._enter(uuid.uuid4().hex)
        # A file does not say where rank 0 is, so that nodes choose their interface by its addresses.
        addresses = external_addresses() if opened.local_address is None and not opened.everywhere else []
        request = {"name": self._name, "machine": machine_id(), "addresses": addresses}
        opened.store.set(_REQUEST, json.dumps(request))

        def decide(responses: dict[int, Message]) -> Message:
            nodes, moved_to = self._choose_network(responses), None
            if opened.everywhere and (len(nodes) == 1 or nodes[0].ports):
                address = loopback_address() if len(nodes) == 1 else next(iter(nodes[0].ports))
                self._moved = serve_store(address, 0, self.world_size, self.timeout)
                assert isinstance(self._moved.store, dist.TCPStore)
                moved_to = address, self._moved.store.port
            return {"nodes": [dataclasses.asdict(node) for node in nodes], "moved_to": moved_to}

        return self._agree(_JOIN, self._respond(request), decide, self.timeout.total_seconds())

    def _join(self) -> Message:
        """Respond to the newest request of rank 0, and return the network that it publishes; for the other ranks."""
        limit = self.timeout.total_seconds()
        ends = self.endpoint.path is None and not is_agent_store(self.endpoint)  # with the run of rank 0

        def find_network() -> Message | None:
            try:
                text = self._opened.store.get(_REQUEST) if self._opened.store.check([_REQUEST]) else b""
            except dist.DistError:
                if self._name or not ends:
                    raise
                self._opened = self._connect()  # that was the store of an earlier run, which rank 0 has left
                return None
            if self.endpoint.path is not None and self._opened.store.check([REFUSED]):
                raise RendezvousError(self._opened.store.get(REFUSED).decode())
            request = json.loads(text) if text else None
            # Under torchrun, rank 0 of an attempt that has failed may have left a request behind.
            if request and request["name"] != self._name:
                self._enter(request["name"])
                self._send(_JOIN, self._respond(request))
            return self._find_result(_JOIN) if self._name else None

        found = poll(find_network, time.monotonic() + limit)
        if found is None:
            raise RendezvousError(
                f"rank {self.rank} waited {limit:g} s for rank 0 to find all {self.world_size} ranks. Check"
                " that all of them have been started."
            )
        return found

    def _agree(
        self,
        phase: str,
        response: Message,
        decide: Callable[[dict[int, Message]], Message],
        limit: float = _PHASE_LIMIT,
    ) -> Message:
        """Send a response to rank 0, and return the result that it decides from all responses."""
        rank = self.rank
        if rank > 0:
            self._send(phase, response)
            found = poll(lambda: self._find_result(phase), time.monotonic() + 2 * limit)
            if found is None:
                raise RendezvousError(f"rank {rank} has no answer from rank 0. Look for the error of rank 0.")
            return found
        responses: dict[int, Message] = {0: response}
        try:
            self._collect(phase, responses, time.monotonic() + limit)
            self.progress.is_answered = True
            result = decide(dict(sorted(responses.items())))
        except DDPExtError as error:
            self._publish(phase, {"error": [type(error).__name__, str(error)]})
            # The store ends with this process: give the others time to read the error.
            others = len(responses) - 1
            poll(lambda: self._store.add(_SEEN, 0) >= others, time.monotonic() + _FAREWELL)
            raise
        self._publish(phase, {"value": result})
        return result

    def _collect(self, phase: str, responses: dict[int, Message], deadline: float) -> None:
        """Fill in responses, until all have come or an error among them has ended the wait."""
        ranks = range(self.world_size)
        end = deadline
        remedy = f"Check that they have been started, with {self.endpoint} as the address of rank 0."
        if self.endpoint.path is not None:
            remedy = f"Check that they have been started and that all nodes share the file system of {self.endpoint}."

        def is_over() -> bool:
            nonlocal end
            for rank in ranks:
                if rank not in responses and self._store.check([f"{phase}/{rank}"]):
                    responses[rank] = json.loads(self._store.get(f"{phase}/{rank}"))
                    if responses[rank].get("error"):
                        end = min(end, time.monotonic() + _GRACE)
            return len(responses) == len(ranks) or time.monotonic() >= end

        def missing() -> str:
            return f"rank {', '.join(str(rank) for rank in ranks if rank not in responses)} of {len(ranks)} ranks"

        if not poll(is_over, min(deadline, time.monotonic() + _PATIENCE)):
            _logger.warning("rank 0 is still waiting for %s. %s", missing(), remedy)
            poll(is_over, deadline)
        if len(responses) < len(ranks) and not any(response.get("error") for response in responses.values()):
            if phase == _JOIN:
                raise RendezvousError(f"{missing()} did not join in time. {remedy}")
            raise RendezvousError(f"{missing()} stopped answering during the rendezvous. Look for their errors.")

    def _publish(self, phase: str, result: Message) -> None:
        # Without the request, no rank of a later rendezvous in the same store joins this one.
        self._opened.store.set(_REQUEST, "")
        self._store.set(f"{phase}/result", json.dumps(result))

    def _send(self, phase: str, response: Message) -> None:
        self._store.set(f"{phase}/{self.rank}", json.dumps(response))

    def _find_result(self, phase: str) -> Message | None:
        """Return the result of rank 0, None as long as there is none; raise its error."""
        key = f"{phase}/result"
        if not self._store.check([key]):
            return None
        found = json.loads(self._store.get(key))
        self.progress.is_answered = True
        if "error" in found:
            self._store.add(_SEEN, 1)
            kind, text = found["error"]
            raise _ERRORS[kind](text)
        return cast(Message, found["value"])

    def _respond(self, request: Message) -> Message:
        """Describe this rank's node, with the interface that it chooses for the others, or with an error."""
        address = self._opened.local_address
        way = None if address is None or self.rank == 0 else interface_with(address)
        node: dict[str, Any] = {"node": node_name(), "interface": None, "ports": {}, "available": interface_addresses()}
        node["reached_over"] = way and way.name
        response: dict[str, Any] = {"machine": machine_id(), "node": node}
        try:
            if self.error is not None:
                raise self.error
            if response["machine"] != request["machine"]:  # rank 0 chooses for its own node
                node |= self._choose(max(2, self.num_nodes), request["addresses"])
        except DDPExtError as error:
            response["error"] = [type(error).__name__, str(error)]
        return response

    def _choose(self, num_nodes: int, others: Sequence[str]) -> dict[str, Any]:
        """Choose the interface of this node for the nodes with other addresses, and listen for their attempts."""
        gloo, own = includes_gloo(self.backend), self._opened.local_address
        found = choose_interface(
            self.interface, gloo=gloo, num_nodes=num_nodes, rank=self.rank, local_address=own, others=others
        )
        try:
            sockets = [self._listening.enter_context(listen(address, 0)) for address in found.addresses]
        except OSError as error:  # of which other ranks would not hear
            raise NetworkInterfaceError(
                f"rank {self.rank} cannot listen on {', '.join(found.addresses)}: {error.strerror}. Set"
                " `network.interface` to another interface."
            ) from error
        ports = {address: one.getsockname()[1] for address, one in zip(found.addresses, sockets, strict=True)}
        return {"interface": found.name, "ports": ports}

    def _choose_network(self, responses: dict[int, Message]) -> list[NodeNetwork]:
        """Group ranks by node, raise the errors that they have sent, and choose rank 0's interface."""
        machines: dict[str, list[int]] = {}
        for rank, response in responses.items():
            machines.setdefault(response["machine"], []).append(rank)
        nodes = [NodeNetwork(**responses[ranks[0]]["node"], ranks=ranks) for ranks in machines.values()]
        self.progress.nodes = tuple(nodes)
        errors = dict.fromkeys(tuple(response["error"]) for response in responses.values() if "error" in response)
        if errors:
            kind = next(iter(errors))[0]
            raise _ERRORS[kind](" Also: ".join(text for _, text in errors))
        chosen = self._choose(len(nodes), [address for node in nodes[1:] for address in node.ports])
        nodes[0] = dataclasses.replace(nodes[0], **chosen)
        self.progress.nodes = tuple(nodes)
        if len(nodes) > 1:
            check_no_loopback(nodes)
        return nodes


def _try_nodes(rank: int, network: ChosenNetwork) -> list[str]:
    """Connect from the first rank of a node to all other nodes, and describe each failure in a sentence."""
    own = network.node_of(rank)
    if rank != own.ranks[0]:
        return []
    others = {target: node for node in network.nodes if node is not own for target in node.ports.items()}
    over = f" over `{own.interface}`" if own.interface else ""
    return [
        f"node {own.node}, rank {rank},{over} does not reach node {others[target].node} at {target[0]}"
        f"{f' (`{others[target].interface}`)' if others[target].interface else ''}: {reason}"
        for target, reason in explain_failures(others).items()
    ]


def _check_reached(nodes: Sequence[NodeNetwork], responses: dict[int, Message]) -> Message:
    """Raise a NetworkInterfaceError if nodes do not reach others, with the interface over which all reached rank 0."""
    failures = [failure for response in responses.values() for failure in response["failures"]]
    if failures:
        names = {node.reached_over for node in nodes[1:]}
        hint = f" Rank 0 was reached over `{names.pop()}`." if len(names) == 1 and None not in names else ""
        raise NetworkInterfaceError(
            f"{'; '.join(failures)}. Set `network.interface` to the interface that connects the nodes, or to"
            f" `auto`.{hint}"
        )
    return {"reached": True}
