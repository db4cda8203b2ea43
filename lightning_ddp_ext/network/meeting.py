"""How the ranks of a run agree on the network: what each one contributes to the roll call, and what follows."""

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_ddp_ext.errors import NetworkInterfaceError, RendezvousError
from lightning_ddp_ext.network.choosing import (
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
from lightning_ddp_ext.network.interfaces import AUTO, Interface, loopback_address
from lightning_ddp_ext.network.reachability import CONNECT_LIMIT, Listener, explain_failures
from lightning_ddp_ext.network.roll_call import (
    Entry,
    RollCall,
    answer_roll,
    call_roll,
    collect_entries,
    poll,
    publish_table,
)
from lightning_ddp_ext.network.stores import OpenStore, connect_store, serve_store

_REACHED = "reached"
_MOVED = "moved"
_ARRIVED = "arrived"
_VERDICT_LIMIT = CONNECT_LIMIT + 20.0  # seconds; ranks on busy hosts are late


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """What a rank knows before it has heard of the others.

    Attributes:
        backend: The back-end.
        rank: This rank.
        world_size: Number of ranks.
        num_nodes: Number of hosts.
        requested: Name of an interface, `"loopback"`, `"auto"` or None.
        timeout: How long to wait for the others.
        remedy: What to do about ranks that do not come.
        run: A name of the run, see `MeetingPlace`.
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
        """Whether gloo is among the back-ends."""
        return "gloo" in self.backend


def meet(meeting: Meeting, opened: OpenStore) -> tuple[ChosenNetwork, dist.Store]:
    """Agree with the other ranks on the network, and check that hosts reach each other over it.

    Args:
        meeting: What this rank knows.
        opened: The store where ranks meet.

    Returns:
        The network, and the store for the process group.

    Raises:
        NetworkInterfaceError: On every rank, if a host lacks its interface or hosts do not reach each other.
        RendezvousError: If ranks do not come in time.
    """
    with contextlib.ExitStack() as stack:
        lead = _lead if meeting.rank == 0 else _follow
        roll, table = lead(meeting, opened, stack)
        network = ChosenNetwork(meeting.backend, hosts_from(table["hosts"]))
        if table["checked"]:
            _check_reachability(roll, network)
        store: dist.Store = roll.store
        if table["moves"]:
            store = _move(roll, network, meeting)
        return network, dist.PrefixStore("process_group", store)


def report_problem(meeting: Meeting, opened: OpenStore, error: NetworkInterfaceError, limit: timedelta) -> None:
    """Let rank 0 know why this rank gives up, if it is there to be told.

    Args:
        meeting: What this rank knows.
        opened: The store where ranks meet.
        error: What is wrong.
        limit: How long to wait for rank 0's invitation.
    """

    def describe(invitation: Entry) -> Entry:
        raise error

    # Either rank 0 has been told, or it was not there in time; this rank raises its own error next, whichever.
    with contextlib.suppress(NetworkInterfaceError, RendezvousError):
        answer_roll(opened.store, meeting.rank, meeting.world_size, describe, limit)


def _lead(meeting: Meeting, opened: OpenStore, stack: contextlib.ExitStack) -> tuple[RollCall, Entry]:
    """Rank 0: invite, decide, and publish the decision."""
    searched: list[tuple[str, int]] = []
    if opened.local_address is None and not opened.everywhere and meeting.requested == AUTO:
        # A file: nobody knows yet where rank 0 is, so the others try all its addresses.
        port = _listening(stack, []).port
        searched = [(address, port) for address in all_addresses()]
    invitation = {"machine": this_machine(), "searched": searched, "run": meeting.run}
    roll = call_roll(opened.store, meeting.world_size, invitation, meeting.timeout)
    entries = collect_entries(roll, meeting.remedy)
    with _failing(roll):
        hosts = _decide(meeting, opened, entries, stack)
    several = len(hosts) > 1
    table = {
        "hosts": [_as_row(host) for host in hosts],
        "checked": several and all(host.targets for host in hosts),
        "moves": opened.everywhere and (not several or bool(hosts[0].targets)),
    }
    publish_table(roll, table, entries)
    return roll, table


def _follow(meeting: Meeting, opened: OpenStore, stack: contextlib.ExitStack) -> tuple[RollCall, Entry]:
    """All other ranks: say where they are and take rank 0's decision."""

    def describe(invitation: Entry) -> Entry:
        entry = {"host": socket.gethostname(), "machine": this_machine()}
        if entry["machine"] == invitation["machine"]:
            return entry  # rank 0 speaks for its host
        searched = [(address, port) for address, port in invitation["searched"]]
        interface = _choose(meeting, opened)
        if interface is None and searched:
            interface = search_interface(searched)
        if interface is None:
            raise NetworkInterfaceError(
                f"no interface of host {socket.gethostname()}, rank {meeting.rank}, was found to reach rank 0."
                " Set `network.interface` to the interface that connects the hosts."
            )
        targets = _listening(stack, interface.addresses).targets if interface.addresses else []
        return {**entry, "interface": interface.name, "targets": targets}

    return answer_roll(opened.store, meeting.rank, meeting.world_size, describe, meeting.timeout)


def _choose(meeting: Meeting, opened: OpenStore) -> Interface | None:
    return choose_interface(
        meeting.requested, gloo=meeting.gloo, num_nodes=meeting.num_nodes, local_address=opened.local_address
    )


def _decide(
    meeting: Meeting, opened: OpenStore, entries: Mapping[int, Entry], stack: contextlib.ExitStack
) -> list[HostNetwork]:
    """Put ranks together by host, and choose rank 0's interface towards the others."""
    machines: dict[str, list[int]] = {this_machine(): [0]}
    for rank in sorted(entries):
        machines.setdefault(entries[rank]["machine"], []).append(rank)
    own_ranks, *others = machines.values()
    speakers = [entries[ranks[0]] for ranks in others]
    if not others:
        own = choose_alone(meeting.requested, gloo=meeting.gloo)
    else:
        own = _choose(meeting, opened) or interface_towards(
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


def _check_reachability(roll: RollCall, network: ChosenNetwork) -> None:
    """Let the first rank of every host try all other hosts, and raise the same error on every rank."""
    own = network.host_of(roll.rank)
    speakers = [f"{_REACHED}/{host.ranks[0]}" for host in network.hosts]
    if roll.rank == own.ranks[0]:
        roll.publish(f"{_REACHED}/{roll.rank}", _try_hosts(own, network.hosts))
    if roll.rank == 0:
        with _failing(roll):
            if not roll.wait(*speakers, limit=_VERDICT_LIMIT):
                raise RendezvousError("rank 0 did not hear which hosts the others reach. Look for their errors.")
            problems = [problem for speaker in speakers for problem in roll.read(speaker)]
            if problems:
                raise NetworkInterfaceError(
                    f"{'; '.join(problems)}. Set `network.interface` to the interface that connects the hosts, or to"
                    " `auto`."
                )
        roll.publish(_REACHED, True)
    elif not roll.wait(_REACHED, limit=2 * _VERDICT_LIMIT):
        raise RendezvousError(f"rank {roll.rank} did not hear from rank 0 which hosts are reached. Look for its error.")


def _try_hosts(own: HostNetwork, hosts: Sequence[HostNetwork]) -> list[str]:
    """Return a sentence for every address that cannot be reached from this host."""
    others = {target: host for host in hosts if host is not own for target in host.targets}
    over = f" over `{own.interface}`" if own.interface else ""
    return [
        f"host {own.host}, rank {own.ranks[0]},{over} does not reach host {others[target].host} at {target[0]}"
        f"{f' (`{others[target].interface}`)' if others[target].interface else ''}: {reason}"
        for target, reason in explain_failures(others).items()
    ]


def _move(roll: RollCall, network: ChosenNetwork, meeting: Meeting) -> dist.Store:
    """Leave the store that listens everywhere for one that listens on the chosen address only."""
    if meeting.rank == 0:
        address = network.hosts[0].addresses[0] if len(network.hosts) > 1 else loopback_address()
        opened = serve_store(address, 0, meeting.world_size, meeting.timeout)
        assert isinstance(opened.store, dist.TCPStore)
        roll.publish(_MOVED, [address, opened.store.port])
        others = meeting.world_size - 1
        if not poll(lambda: opened.store.add(_ARRIVED, 0) >= others, time.monotonic() + _VERDICT_LIMIT):
            raise RendezvousError("other ranks did not follow to rank 0's store. Look for their errors.")
        return opened.store
    if not roll.wait(_MOVED, limit=_VERDICT_LIMIT):
        raise RendezvousError(f"rank {roll.rank} did not hear from rank 0 where its store is. Look for its error.")
    address, port = roll.read(_MOVED)
    store = connect_store(address, port, rank=meeting.rank, timeout=meeting.timeout).store
    store.add(_ARRIVED, 1)
    return store


def _listening(stack: contextlib.ExitStack, addresses: Sequence[str]) -> Listener:
    listener = Listener(addresses)
    stack.callback(listener.close)
    return listener


def _as_row(host: HostNetwork) -> dict[str, Any]:
    return {"host": host.host, "ranks": host.ranks, "interface": host.interface, "targets": host.targets}


@contextlib.contextmanager
def _failing(roll: RollCall) -> Iterator[None]:
    """Let the others know of an error that is about to be raised."""
    try:
        yield
    except (NetworkInterfaceError, RendezvousError) as error:
        roll.fail(error)
        raise
