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
from typing import Any, cast

import torch.distributed as dist

from lightning_ddp_ext.distributed.backends import includes_gloo
from lightning_ddp_ext.distributed.network import (
    CONNECT_LIMIT,
    ChosenNetwork,
    Interface,
    NodeNetwork,
    Target,
    check_no_loopback,
    choose_for_one_node,
    choose_interface,
    explain_failures,
    external_addresses,
    interface_addresses,
    interface_towards,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousInfo:
    """Settings of a rank before the rendezvous; `error` is the reason why it cannot take part, for the other ranks."""

    backend: str
    rank: int
    world_size: int
    num_nodes: int
    requested: str | None
    timeout: timedelta
    endpoint: RendezvousEndpoint
    error: DDPExtError | None = None

    @property
    def remedy(self) -> str:
        """What to do about missing ranks."""
        if self.endpoint.path is not None:
            return f"Check that they have been started and that all nodes share the file system of {self.endpoint}."
        return f"Check that they have been started, with {self.endpoint} as the address of rank 0."


@dataclass(slots=True)
class RendezvousProgress:
    """How far a rendezvous has come: the nodes, on rank 0, and whether rank 0 and this rank have exchanged messages."""

    backend: str | None = None
    endpoint: str | None = None
    nodes: tuple[NodeNetwork, ...] = ()
    is_answered: bool = False


def rendezvous(info: RendezvousInfo, progress: RendezvousProgress) -> tuple[ChosenNetwork, dist.Store]:
    """Meet the other ranks, and return the network that they agree on, with the store for the process group."""
    try:
        opened = _open_store(info)
        with contextlib.ExitStack() as stack:
            return _Rendezvous(info, opened, progress, stack).meet()
    except (DDPExtError, dist.DistError) as failure:
        if info.error is not None and str(info.error) not in str(failure):
            raise info.error from None
        if isinstance(failure, DDPExtError):
            raise
        reason = (str(failure).splitlines() or [type(failure).__name__])[0]
        raise RendezvousError(
            f"rank {info.rank} lost the store at {info.endpoint} during the rendezvous ({reason}). Look for the errors"
            " of the other ranks, rank 0's first."
        ) from failure


def _open_store(info: RendezvousInfo) -> OpenStore:
    return open_store(
        info.endpoint, rank=info.rank, world_size=info.world_size, num_nodes=info.num_nodes, timeout=info.timeout
    )


@dataclass(slots=True)
class _Rendezvous:
    """One attempt of all ranks to meet in a store, with sockets that other nodes can try until it ends."""

    info: RendezvousInfo
    opened: OpenStore
    progress: RendezvousProgress
    stack: contextlib.ExitStack
    name: str = ""  # of the request
    store: dist.Store = field(init=False)  # the keys of the request in the opened store

    def meet(self) -> tuple[ChosenNetwork, dist.Store]:
        """Agree on the network, and return it with the store for the process group."""
        joined = self._open() if self.info.rank == 0 else self._join()
        network = ChosenNetwork(self.info.backend, tuple(_node_from(row) for row in joined["nodes"]))
        moved: OpenStore | None = None

        def conclude(responses: dict[int, Message]) -> Message:
            nonlocal moved
            failures = [failure for response in responses.values() for failure in response["failures"]]
            if failures:
                raise NetworkInterfaceError(
                    f"{'; '.join(failures)}. Set `network.interface` to the interface that connects the nodes, or to"
                    f" `auto`.{_interface_hint(network.nodes)}"
                )
            if not joined["moves"]:
                return {"moved_to": None}
            address = network.nodes[0].addresses[0] if len(network.nodes) > 1 else loopback_address()
            moved = serve_store(address, 0, self.info.world_size, self.info.timeout)
            assert isinstance(moved.store, dist.TCPStore)
            return {"moved_to": [address, moved.store.port]}

        failures = _try_nodes(self.info.rank, network) if joined["checked"] else []
        moved_to = self._agree(_REACH, {"failures": failures}, conclude)["moved_to"]
        if moved_to is not None:
            # The store of rank 0 listens on all addresses: leave it for one that listens on the chosen address only.
            address, port = moved_to
            self.opened = moved or connect_store(address, port, rank=self.info.rank, timeout=self.info.timeout)
            self._enter(self.name)
            # In the new store, because rank 0 closes the old one as soon as all have moved.
            self._agree(_MOVE, {}, lambda responses: {"moved": True})
        return network, dist.PrefixStore("process_group", self.store)

    def _enter(self, name: str) -> None:
        """Use the keys of a request in the opened store."""
        self.name, self.store = name, dist.PrefixStore(name, self.opened.store)

    def _open(self) -> Message:
        """Request the other ranks to join, and publish the network that follows from their responses; for rank 0."""
        opened = self.opened
        self._enter(uuid.uuid4().hex)
        # A file does not say where rank 0 is, so that nodes choose their interface by its addresses.
        addresses = external_addresses() if opened.local_address is None and not opened.everywhere else []
        request = {"name": self.name, "machine": machine_id(), "addresses": addresses}
        opened.store.set(_REQUEST, json.dumps(request))

        def decide(responses: dict[int, Message]) -> Message:
            nodes = self._choose_network(responses)
            has_targets = all(node.targets for node in nodes)
            return {
                "nodes": [dataclasses.asdict(node) for node in nodes],
                "checked": len(nodes) > 1 and has_targets,
                "moves": opened.everywhere and (len(nodes) == 1 or bool(nodes[0].targets)),
            }

        return self._agree(_JOIN, self._respond(request), decide, self.info.timeout.total_seconds())

    def _join(self) -> Message:
        """Respond to the newest request of rank 0, and return the network that it publishes; for the other ranks."""
        limit = self.info.timeout.total_seconds()
        ends = self.info.endpoint.path is None and not is_agent_store(self.info.endpoint)  # with the run of rank 0

        def find_network() -> Message | None:
            try:
                text = self.opened.store.get(_REQUEST) if self.opened.store.check([_REQUEST]) else b""
            except dist.DistError:
                if self.name or not ends:
                    raise
                self.opened = _open_store(self.info)  # that was the store of an earlier run, which rank 0 has left
                return None
            if self.info.endpoint.path is not None and self.opened.store.check([REFUSED]):
                raise RendezvousError(self.opened.store.get(REFUSED).decode())
            request = json.loads(text) if text else None
            # Under torchrun, rank 0 of an attempt that has failed may have left a request behind.
            if request and request["name"] != self.name:
                self._enter(request["name"])
                self._send(_JOIN, self._respond(request))
            return self._find_result(_JOIN) if self.name else None

        found = poll(find_network, time.monotonic() + limit)
        if found is None:
            raise RendezvousError(
                f"rank {self.info.rank} waited {limit:g} s for rank 0 to find all {self.info.world_size} ranks. Check"
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
        rank = self.info.rank
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
            poll(lambda: self.store.add(_SEEN, 0) >= others, time.monotonic() + _FAREWELL)
            raise
        self._publish(phase, {"value": result})
        return result

    def _collect(self, phase: str, responses: dict[int, Message], deadline: float) -> None:
        """Fill in responses, until all have come or an error among them has ended the wait."""
        ranks = range(self.info.world_size)
        end = deadline

        def is_over() -> bool:
            nonlocal end
            for rank in ranks:
                if rank not in responses and self.store.check([f"{phase}/{rank}"]):
                    responses[rank] = json.loads(self.store.get(f"{phase}/{rank}"))
                    if responses[rank].get("error"):
                        end = min(end, time.monotonic() + _GRACE)
            return len(responses) == len(ranks) or time.monotonic() >= end

        def missing() -> str:
            return f"rank {', '.join(str(rank) for rank in ranks if rank not in responses)} of {len(ranks)} ranks"

        if not poll(is_over, min(deadline, time.monotonic() + _PATIENCE)):
            _logger.warning("rank 0 is still waiting for %s. %s", missing(), self.info.remedy)
            poll(is_over, deadline)
        if len(responses) < len(ranks) and not any(response.get("error") for response in responses.values()):
            if phase == _JOIN:
                raise RendezvousError(f"{missing()} did not join in time. {self.info.remedy}")
            raise RendezvousError(f"{missing()} stopped answering during the rendezvous. Look for their errors.")

    def _publish(self, phase: str, result: Message) -> None:
        # Without the request, no rank of a later rendezvous in the same store joins this one.
        self.opened.store.set(_REQUEST, "")
        self.store.set(f"{phase}/result", json.dumps(result))

    def _send(self, phase: str, response: Message) -> None:
        self.store.set(f"{phase}/{self.info.rank}", json.dumps(response))

    def _find_result(self, phase: str) -> Message | None:
        """Return the result of rank 0, None as long as there is none; raise its error."""
        key = f"{phase}/result"
        if not self.store.check([key]):
            return None
        found = json.loads(self.store.get(key))
        self.progress.is_answered = True
        if "error" in found:
            self.store.add(_SEEN, 1)
            kind, text = found["error"]
            raise _ERRORS[kind](text)
        return cast(Message, found["value"])

    def _respond(self, request: Message) -> Message:
        """Describe this rank's node, with the interface that it chooses for the others, or with an error."""
        info, address = self.info, self.opened.local_address
        way = None if address is None or info.rank == 0 else interface_with(address)
        response: dict[str, Any] = {"machine": machine_id(), "node": node_name(), "interface": None}
        response |= {"targets": [], "available": interface_addresses(), "reached_over": way and way.name}
        try:
            if info.error is not None:
                raise info.error
            if response["machine"] != request["machine"]:  # rank 0 chooses for its own node
                interface = self._choose_interface() or interface_towards(request["addresses"], info.rank)
                response |= {"interface": interface.name, "targets": self._listen_on(interface.addresses)}
        except DDPExtError as error:
            response["error"] = [type(error).__name__, str(error)]
        return response

    def _choose_interface(self) -> Interface | None:
        info, address = self.info, self.opened.local_address
        has_gloo = includes_gloo(info.backend)
        return choose_interface(info.requested, gloo=has_gloo, num_nodes=info.num_nodes, local_address=address)

    def _listen_on(self, addresses: Sequence[str]) -> list[Target]:
        try:
            sockets = [self.stack.enter_context(listen(address, 0)) for address in addresses]
        except OSError as error:  # of which other ranks would not hear
            raise NetworkInterfaceError(
                f"rank {self.info.rank} cannot listen on {', '.join(addresses)}: {error.strerror}. Set"
                " `network.interface` to another interface."
            ) from error
        return [(address, own.getsockname()[1]) for address, own in zip(addresses, sockets, strict=True)]

    def _choose_network(self, responses: dict[int, Message]) -> list[NodeNetwork]:
        """Group ranks by node, raise the errors that they have sent, and choose rank 0's interface."""
        machines: dict[str, list[int]] = {}
        for rank, response in responses.items():
            machines.setdefault(response["machine"], []).append(rank)
        nodes = [_node_from({**responses[ranks[0]], "ranks": ranks}) for ranks in machines.values()]
        self.progress.nodes = tuple(nodes)
        errors = dict.fromkeys(tuple(response["error"]) for response in responses.values() if "error" in response)
        if errors:
            kind = next(iter(errors))[0]
            raise _ERRORS[kind](" Also: ".join(text for _, text in errors))
        if len(nodes) == 1:
            own = choose_for_one_node(self.info.requested, gloo=includes_gloo(self.info.backend))
        else:
            others = [address for node in nodes[1:] for address in node.addresses]
            own = self._choose_interface() or interface_towards(others, rank=0)
        nodes[0] = dataclasses.replace(nodes[0], interface=own.name, targets=tuple(self._listen_on(own.addresses)))
        self.progress.nodes = tuple(nodes)
        if len(nodes) > 1:
            check_no_loopback(nodes)
        return nodes


def _node_from(row: Message) -> NodeNetwork:
    """Return a node from JSON; a row may have more keys."""
    return NodeNetwork(
        node=row["node"],
        ranks=tuple(row["ranks"]),
        interface=row["interface"],
        targets=tuple((address, port) for address, port in row["targets"]),
        reached_over=row["reached_over"],
        available=row["available"],
    )


def _try_nodes(rank: int, network: ChosenNetwork) -> list[str]:
    """Connect from the first rank of a node to all other nodes, and describe each failure in a sentence."""
    own = network.node_of(rank)
    if rank != own.ranks[0]:
        return []
    others = {target: node for node in network.nodes if node is not own for target in node.targets}
    over = f" over `{own.interface}`" if own.interface else ""
    return [
        f"node {own.node}, rank {own.ranks[0]},{over} does not reach node {others[target].node} at {target[0]}"
        f"{f' (`{others[target].interface}`)' if others[target].interface else ''}: {reason}"
        for target, reason in explain_failures(others).items()
    ]


def _interface_hint(nodes: Sequence[NodeNetwork]) -> str:
    """Name the interface over which all other nodes have reached rank 0, if it is the same on all."""
    names = {node.reached_over for node in nodes[1:]}
    return f" Rank 0 was reached over `{names.pop()}`." if len(names) == 1 and None not in names else ""
