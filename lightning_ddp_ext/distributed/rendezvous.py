"""How the ranks of a run agree on the network: what each one contributes to the roll call, and what follows."""

import contextlib
import json
import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_ddp_ext.distributed.interfaces import AUTO, Interface, loopback_address
from lightning_ddp_ext.distributed.network_choice import (
    ChosenNetwork,
    HostNetwork,
    all_addresses,
    check_leaves_host,
    choose_alone,
    choose_interface,
    hosts_from,
    interface_towards,
    search_interface,
    this_machine,
)
from lightning_ddp_ext.distributed.ports import CONNECT_LIMIT, Listener, explain_failures
from lightning_ddp_ext.distributed.stores import OpenStore, connect_store, serve_store
from lightning_ddp_ext.errors import DDPExtError, NetworkInterfaceError, RendezvousError

_REQUEST = "invitation"
_RESULT = "table"
_PROBLEM = "problem"
_SEEN = "seen"
_NUMBERS = "numbers"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1  # seconds
_FAREWELL = 2.0  # seconds that rank 0 waits for others to read what went wrong
_PATIENCE = 30.0  # seconds after which rank 0 says whom it waits for

_logger = logging.getLogger(__name__)

_ERRORS: dict[str, type[DDPExtError]] = {error.__name__: error for error in (NetworkInterfaceError, RendezvousError)}

Entry = Mapping[str, Any]


class RendezvousRound:
    """One attempt of all ranks to meet.

    Args:
        store: Where they meet.
        name: Name of the attempt.
        rank: This rank.
        world_size: Number of ranks.
        deadline: When to give up, in seconds of `time.monotonic`.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int, deadline: float) -> None:
        self.store = dist.PrefixStore(name, store)
        self._meeting = store
        self.rank = rank
        self.world_size = world_size
        self._deadline = deadline

    def publish(self, key: str, value: Any) -> None:
        """Write a value for all ranks.

        Args:
            key: Its name.
            value: What JSON can hold.
        """
        self.store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """Read a value that has been published.

        Args:
            key: Its name.

        Returns:
            The value.
        """
        return json.loads(self.store.get(key))

    def wait(self, *keys: str, limit: float | None = None) -> bool:
        """Wait until all of some values have been published, or until a rank has met a problem.

        Args:
            keys: Their names.
            limit: Seconds to wait; None until the deadline.

        Returns:
            Whether they have been; False if the time is over.

        Raises:
            DDPExtError: The problem that a rank has met.
        """
        deadline = self._deadline if limit is None else min(self._deadline, time.monotonic() + limit)

        def came() -> bool:
            if self.store.check([_PROBLEM]):
                self._raise(self.read(_PROBLEM))
            return not keys or self.store.check(list(keys))

        return bool(poll(came, deadline))

    def fail(self, error: DDPExtError) -> None:
        """Let the others know why this rank gives up; the caller raises the error.

        Args:
            error: What is wrong.
        """
        self.publish(_PROBLEM, [type(error).__name__, str(error)])
        self._leave()

    def withdraw(self) -> None:
        """Take the invitation back, so that no later attempt answers it."""
        self._meeting.set(_REQUEST, "")

    def _leave(self) -> None:
        if self.rank != 0:
            self.store.add(_SEEN, 1)
            return
        self.withdraw()
        # The store ends with this process: give others time to read.
        others = self.world_size - 1
        poll(lambda: self.store.add(_SEEN, 0) >= others, time.monotonic() + _FAREWELL)

    def _raise(self, problem: list[str]) -> None:
        self._leave()
        raise _ERRORS[problem[0]](problem[1])


def open_round(store: dist.Store, world_size: int, request: Entry, timeout: timedelta) -> RendezvousRound:
    """Invite the other ranks; for rank 0.

    Args:
        store: Where they meet.
        world_size: Number of ranks.
        request: What they need to know for their entries.
        timeout: How long to wait for them.

    Returns:
        The call.
    """
    name = uuid.uuid4().hex
    round_ = RendezvousRound(store, name, 0, world_size, time.monotonic() + timeout.total_seconds())
    store.set(_REQUEST, json.dumps({**request, "name": name}))
    return round_


def invites(store: dist.Store, run: str) -> bool:
    """Tell whether the ranks of a run are being called in a store.

    Args:
        store: A store, of whichever run.
        run: The name of the run, in the invitation of its rank 0.

    Returns:
        Whether they are.
    """
    request = _read_request(store)
    return request is not None and request.get("run") == run


def collect_responses(round_: RendezvousRound, remedy: str) -> dict[int, Entry]:
    """Wait for the entries of all other ranks; for rank 0.

    Args:
        round_: The call.
        remedy: What to do about ranks that do not come.

    Returns:
        Entries by rank.

    Raises:
        RendezvousError: If ranks are missing when the time is over.
        DDPExtError: The problem that a rank has met.
    """
    ranks = range(1, round_.world_size)
    keys = [str(rank) for rank in ranks]

    def missing() -> str:
        return ", ".join(key for key in keys if not round_.store.check([key]))

    if not round_.wait(*keys, limit=_PATIENCE):
        _logger.warning("rank 0 is still waiting for rank %s of %d ranks. %s", missing(), round_.world_size, remedy)
    if not round_.wait(*keys):
        error = RendezvousError(f"rank {missing()} of {round_.world_size} ranks did not join in time. {remedy}")
        round_.fail(error)
        raise error
    round_.withdraw()
    return {rank: round_.read(str(rank)) for rank in ranks}


def publish_result(round_: RendezvousRound, result: Entry, responses: Mapping[int, Entry]) -> None:
    """Tell all ranks what follows from their entries; for rank 0.

    Args:
        round_: The call.
        result: What follows.
        responses: What they said.
    """
    numbers = {str(rank): response["number"] for rank, response in responses.items()}
    round_.publish(_RESULT, {**result, _NUMBERS: numbers})


def join_round(
    store: dist.Store, rank: int, world_size: int, describe: Callable[[Entry], Entry], timeout: timedelta
) -> tuple[RendezvousRound, Entry]:
    """Answer the invitation of rank 0 and wait for the table; for all other ranks.

    Args:
        store: Where they meet.
        rank: This rank.
        world_size: Number of ranks.
        describe: Makes this rank's entry from an invitation.
        timeout: How long to wait for the others.

    Returns:
        The call, and the table.

    Raises:
        RendezvousError: If the time is over.
        DDPExtError: What `describe` raised, or the problem that a rank has met.
    """
    number = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    answered: dict[str, RendezvousRound] = {}

    def answer(request: Entry) -> None:
        round_ = answered[request["name"]] = RendezvousRound(store, request["name"], rank, world_size, deadline)
        try:
            response = describe(request)
        except DDPExtError as error:
            round_.fail(error)
            raise
        round_.publish(str(rank), {**response, "number": number})

    def completed() -> tuple[RendezvousRound, Entry] | None:
        request = _read_request(store)
        if request and request["name"] not in answered:
            answer(request)
        if not answered:
            return None
        newest = list(answered.values())[-1]
        if not newest.wait(_RESULT, limit=0):
            return None
        result = newest.read(_RESULT)
        return (newest, result) if result[_NUMBERS].get(str(rank)) == number else None

    result: tuple[RendezvousRound, Entry] | None = poll(completed, deadline)
    if result is None:
        raise RendezvousError(
            f"rank {rank} waited {timeout.total_seconds():g} s for rank 0 to find all {world_size} ranks."
            " Check that all of them have been started."
        )
    return result


def _read_request(store: dist.Store) -> Entry | None:
    text = store.get(_REQUEST) if store.check([_REQUEST]) else b""
    request: Entry | None = json.loads(text) if text else None
    return request


def poll(question: Callable[[], Any], deadline: float) -> Any:
    """Ask until the answer is truthy or the time is over, at least once.

    Args:
        question: What to ask.
        deadline: When to stop, in seconds of `time.monotonic`.

    Returns:
        The last answer.
    """
    pause = _FIRST_PAUSE
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return answer


_REACHED = "reached"
_MOVED = "moved"
_ARRIVED = "arrived"
_VERDICT_LIMIT = CONNECT_LIMIT + 20.0  # seconds; ranks on busy hosts are late


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousInfo:
    """What a rank knows before it has heard of the others.

    Attributes:
        backend: The backend.
        rank: This rank.
        world_size: Number of ranks.
        num_nodes: Number of hosts.
        requested: Name of an interface, `"loopback"`, `"auto"` or None.
        timeout: How long to wait for the others.
        remedy: What to do about ranks that do not come.
        run: A name of the run, see `RendezvousEndpoint`.
    """

    backend: str
    rank: int
    world_size: int
    num_nodes: int
    requested: str | None
    timeout: timedelta
    remedy: str
    run: str = ""

    @property
    def gloo(self) -> bool:
        """Whether gloo is among the backends."""
        return "gloo" in self.backend


def rendezvous(info: RendezvousInfo, opened: OpenStore) -> tuple[ChosenNetwork, dist.Store]:
    """Agree with the other ranks on the network, and check that hosts reach each other over it.

    Args:
        info: What this rank knows.
        opened: The store where ranks meet.

    Returns:
        The network, and the store for the process group.

    Raises:
        NetworkInterfaceError: On every rank, if a host lacks its interface or hosts do not reach each other.
        RendezvousError: If ranks do not come in time.
    """
    with contextlib.ExitStack() as stack:
        lead = _lead if info.rank == 0 else _follow
        round_, result = lead(info, opened, stack)
        network = ChosenNetwork(info.backend, hosts_from(result["hosts"]))
        if result["checked"]:
            _check_reachability(round_, network)
        store: dist.Store = round_.store
        if result["moves"]:
            store = _move(round_, network, info)
        return network, dist.PrefixStore("process_group", store)


def report_problem(info: RendezvousInfo, opened: OpenStore, error: NetworkInterfaceError, limit: timedelta) -> None:
    """Let rank 0 know why this rank gives up, if it is there to be told.

    Args:
        info: What this rank knows.
        opened: The store where ranks meet.
        error: What is wrong.
        limit: How long to wait for rank 0's invitation.
    """

    def describe(request: Entry) -> Entry:
        raise error

    # Either rank 0 has been told, or it was not there in time; this rank raises its own error next, whichever.
    with contextlib.suppress(NetworkInterfaceError, RendezvousError):
        join_round(opened.store, info.rank, info.world_size, describe, limit)


def _lead(info: RendezvousInfo, opened: OpenStore, stack: contextlib.ExitStack) -> tuple[RendezvousRound, Entry]:
    """Rank 0: invite, decide, and publish the decision."""
    searched: list[tuple[str, int]] = []
    if opened.local_address is None and not opened.everywhere and info.requested == AUTO:
        # A file: nobody knows yet where rank 0 is, so the others try all its addresses.
        port = _listening(stack, []).port
        searched = [(address, port) for address in all_addresses()]
    request = {"machine": this_machine(), "searched": searched, "run": info.run}
    round_ = open_round(opened.store, info.world_size, request, info.timeout)
    responses = collect_responses(round_, info.remedy)
    with _failing(round_):
        hosts = _decide(info, opened, responses, stack)
    several = len(hosts) > 1
    result = {
        "hosts": [_as_row(host) for host in hosts],
        "checked": several and all(host.targets for host in hosts),
        "moves": opened.everywhere and (not several or bool(hosts[0].targets)),
    }
    publish_result(round_, result, responses)
    return round_, result


def _follow(info: RendezvousInfo, opened: OpenStore, stack: contextlib.ExitStack) -> tuple[RendezvousRound, Entry]:
    """All other ranks: say where they are and take rank 0's decision."""

    def describe(request: Entry) -> Entry:
        response = {"host": socket.gethostname(), "machine": this_machine()}
        if response["machine"] == request["machine"]:
            return response  # rank 0 speaks for its host
        searched = [(address, port) for address, port in request["searched"]]
        interface = _choose(info, opened)
        if interface is None and searched:
            interface = search_interface(searched)
        if interface is None:
            raise NetworkInterfaceError(
                f"no interface of host {socket.gethostname()}, rank {info.rank}, was found to reach rank 0."
                " Set `network.interface` to the interface that connects the hosts."
            )
        targets = _listening(stack, interface.addresses).targets if interface.addresses else []
        return {**response, "interface": interface.name, "targets": targets}

    return join_round(opened.store, info.rank, info.world_size, describe, info.timeout)


def _choose(info: RendezvousInfo, opened: OpenStore) -> Interface | None:
    return choose_interface(
        info.requested, gloo=info.gloo, num_nodes=info.num_nodes, local_address=opened.local_address
    )


def _decide(
    info: RendezvousInfo, opened: OpenStore, responses: Mapping[int, Entry], stack: contextlib.ExitStack
) -> list[HostNetwork]:
    """Put ranks together by host, and choose rank 0's interface towards the others."""
    machines: dict[str, list[int]] = {this_machine(): [0]}
    for rank in sorted(responses):
        machines.setdefault(responses[rank]["machine"], []).append(rank)
    own_ranks, *others = machines.values()
    speakers = [responses[ranks[0]] for ranks in others]
    if not others:
        own = choose_alone(info.requested, gloo=info.gloo)
    else:
        own = _choose(info, opened) or interface_towards(
            address for speaker in speakers for address, _ in speaker["targets"]
        )
    own_targets = _listening(stack, own.addresses).targets if own.addresses else []
    hosts = [
        HostNetwork(host=socket.gethostname(), ranks=tuple(own_ranks), interface=own.name, targets=tuple(own_targets)),
        *hosts_from([{**speaker, "ranks": ranks} for speaker, ranks in zip(speakers, others, strict=True)]),
    ]
    if others:
        check_leaves_host(hosts)
    return hosts


def _check_reachability(round_: RendezvousRound, network: ChosenNetwork) -> None:
    """Let the first rank of every host try all other hosts, and raise the same error on every rank."""
    own = network.host_of(round_.rank)
    speakers = [f"{_REACHED}/{host.ranks[0]}" for host in network.hosts]
    if round_.rank == own.ranks[0]:
        round_.publish(f"{_REACHED}/{round_.rank}", _try_hosts(own, network.hosts))
    if round_.rank == 0:
        with _failing(round_):
            if not round_.wait(*speakers, limit=_VERDICT_LIMIT):
                raise RendezvousError("rank 0 did not hear which hosts the others reach. Look for their errors.")
            problems = [problem for speaker in speakers for problem in round_.read(speaker)]
            if problems:
                raise NetworkInterfaceError(
                    f"{'; '.join(problems)}. Set `network.interface` to the interface that connects the hosts, or to"
                    " `auto`."
                )
        round_.publish(_REACHED, True)
    elif not round_.wait(_REACHED, limit=2 * _VERDICT_LIMIT):
        raise RendezvousError(
            f"rank {round_.rank} did not hear from rank 0 which hosts are reached. Look for its error."
        )


def _try_hosts(own: HostNetwork, hosts: Sequence[HostNetwork]) -> list[str]:
    """Return a sentence for every address that cannot be reached from this host."""
    others = {target: host for host in hosts if host is not own for target in host.targets}
    over = f" over `{own.interface}`" if own.interface else ""
    return [
        f"host {own.host}, rank {own.ranks[0]},{over} does not reach host {others[target].host} at {target[0]}"
        f"{f' (`{others[target].interface}`)' if others[target].interface else ''}: {reason}"
        for target, reason in explain_failures(others).items()
    ]


def _move(round_: RendezvousRound, network: ChosenNetwork, info: RendezvousInfo) -> dist.Store:
    """Leave the store that listens everywhere for one that listens on the chosen address only."""
    if info.rank == 0:
        address = network.hosts[0].addresses[0] if len(network.hosts) > 1 else loopback_address()
        opened = serve_store(address, 0, info.world_size, info.timeout)
        assert isinstance(opened.store, dist.TCPStore)
        round_.publish(_MOVED, [address, opened.store.port])
        others = info.world_size - 1
        if not poll(lambda: opened.store.add(_ARRIVED, 0) >= others, time.monotonic() + _VERDICT_LIMIT):
            raise RendezvousError("other ranks did not follow to rank 0's store. Look for their errors.")
        return opened.store
    if not round_.wait(_MOVED, limit=_VERDICT_LIMIT):
        raise RendezvousError(f"rank {round_.rank} did not hear from rank 0 where its store is. Look for its error.")
    address, port = round_.read(_MOVED)
    store = connect_store(address, port, rank=info.rank, timeout=info.timeout).store
    store.add(_ARRIVED, 1)
    return store


def _listening(stack: contextlib.ExitStack, addresses: Sequence[str]) -> Listener:
    listener = Listener(addresses)
    stack.callback(listener.close)
    return listener


def _as_row(host: HostNetwork) -> dict[str, Any]:
    return {"host": host.host, "ranks": host.ranks, "interface": host.interface, "targets": host.targets}


@contextlib.contextmanager
def _failing(round_: RendezvousRound) -> Iterator[None]:
    """Let the others know of an error that is about to be raised."""
    try:
        yield
    except (NetworkInterfaceError, RendezvousError) as error:
        round_.fail(error)
        raise
