"""Rendezvous of one node, successful and not; forked from a process that has everything imported."""

import os
import signal
import socket
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.distributed import rank_server
from tests.distributed.rank_programs import (
    join,
    join_and_die,
    join_twice,
    join_unaware,
    serve_as_agent,
    time_all_reduces,
    train,
)
from tests.support.ports import free_port


def play_scenarios(folder):
    """Play all scenarios, and return the outcomes of their ranks by name."""
    folder = Path(folder)
    return {name: scenario(folder) for name, scenario in SCENARIOS.items()}


def _ranks(function, folder, *, limit=20.0, world_size=2, only=None, late=None, **settings):
    settings = {"world_size": world_size, "main_address": "127.0.0.1", **settings}
    if "main_port" not in settings:
        settings["main_port"] = free_port()
    ranks = range(world_size) if only is None else only
    jobs = [{"rank": rank, "arguments": {**settings, "rank": rank}} for rank in ranks]
    if late is not None:
        jobs[late]["arguments"]["delay"] = 0.5
    return rank_server.run(function, jobs, limit, folder)


@contextmanager
def _agent(folder, **arguments):
    port = free_port()
    agent = os.fork()
    if agent == 0:
        rank_server.work(serve_as_agent, {"port": port, **arguments}, folder / "agent")
    try:
        yield port
    finally:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)


def _with_agent(folder, attempts):
    """Run attempts one after the other on one store, as torchrun does when it restarts workers."""
    with _agent(folder) as port:
        env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [attempt(env=env, main_port=port) for attempt in attempts]


def _restarts(folder):
    # A rank that comes early finds the keys of the attempt before in the store.
    failed = partial(_ranks, join, folder, only=[0], timeout=1)
    attempts = [partial(_ranks, join, folder, late=late, network_interface="auto") for late in (0, None, 0, 1)]
    first, *others = _with_agent(folder, [failed, *attempts])
    assert "rank 1 of 2 ranks did not join in time" in first[0]["error"], first[0]["output"]
    return [outcome for outcomes in others for outcome in outcomes]


def _tcp_under_torchrun(folder):
    return _with_agent(folder, [partial(_ranks, join, folder, init_method=f"tcp://127.0.0.1:{free_port()}")])[0]


def _leftover(folder):
    path = folder / "leftover"
    init_method = f"file://{path}"
    _ranks(join_and_die, folder, init_method=init_method)
    assert path.exists()
    return _ranks(join, folder, init_method=init_method, late=1)


def _taken_port(folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        return _ranks(join, folder, main_port=other.getsockname()[1], timeout=2)


def _shared_file(folder, *, file_mode=None, folder_mode=0o700):
    info = folder / f"shared-{file_mode}-{folder_mode}"
    info.mkdir()
    info.chmod(folder_mode)
    path = info / "meeting"
    if file_mode is not None:
        path.touch()
        path.chmod(file_mode)
    return _ranks(join, folder, init_method=f"file://{path}", umask=0)


def _train(strategy, folder, **settings):
    return _ranks(train, folder, strategy=strategy, limit=60.0, **settings)


def _unknown_address(folder):
    # An address that leads here but is not of this node, as a translated one: rank 0 has to listen on all addresses.
    return _ranks(join_unaware, folder, network_interface="auto")


def _moved_from_a_mute_program(folder, **settings):
    with socket.create_server(("127.0.0.1", 0)) as other:  # accepts, and never answers
        return _ranks(join, folder, main_port=other.getsockname()[1], run="mine", **settings)


def _moved_from_another_run(folder):
    with _agent(folder, run="other") as port:
        return _ranks(join, folder, main_port=port, other_ports=[free_port(), free_port()], run="mine")


def _two_runs(folder):
    """Four ranks of two runs, which want the same ports; those that search come first."""
    ports = [free_port() for _ in range(3)]
    jobs = []
    for number, (run, rank) in enumerate((run, rank) for run in ("one", "two") for rank in (0, 1)):
        arguments = {
            "world_size": 2, "rank": rank, "main_address": "127.0.0.1", "main_port": ports[0],
            "other_ports": ports[1:], "run": run, "delay": 0.0 if rank else 0.5,
        }  # fmt: skip
        jobs.append({"rank": number, "arguments": arguments})
    return rank_server.run(join, jobs, 20.0, folder)


def _no_free_port(folder):
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [taken.getsockname()[1] for taken in (one, two)]
        return _ranks(join, folder, only=[0], main_port=ports[0], other_ports=ports[1:], run="mine", timeout=2)


SCENARIOS = {
    "auto": lambda folder: _ranks(join, folder, network_interface="auto"),
    "loopback": lambda folder: _ranks(join, folder, network_interface="loopback"),
    "nothing chosen": lambda folder: _ranks(join, folder),
    "one rank": lambda folder: _ranks(join, folder, world_size=1, network_interface="auto"),
    "three ranks": lambda folder: _ranks(join, folder, world_size=3, network_interface="auto"),
    "tcp": lambda folder: _ranks(join, folder, init_method=f"tcp://localhost:{free_port()}"),
    "file": lambda folder: _ranks(join, folder, init_method=f"file://{folder}/meeting", network_interface="auto"),
    "twice": lambda folder: _ranks(join_twice, folder),
    "tcp under torchrun": _tcp_under_torchrun,
    "restarts": _restarts,
    "leftover": _leftover,
    "file of all": lambda folder: _shared_file(folder, file_mode=0o666),
    "file of a group": lambda folder: _shared_file(folder, file_mode=0o660),
    "folder of all": lambda folder: _shared_file(folder, folder_mode=0o777),
    "folder such as /tmp": lambda folder: _shared_file(folder, folder_mode=0o1777),
    "unknown address": _unknown_address,
    "training, ddp": partial(_train, "ddp", network_interface="auto"),
    "training, ddp_join": partial(_train, "ddp_join", network_interface="auto"),
    "missing folder": lambda folder: _ranks(join, folder, init_method=f"file://{folder}/missing/meeting"),
    "taken port": _taken_port,
    "moved from a mute program": lambda folder: _moved_from_a_mute_program(folder, other_ports=[free_port()]),
    "moved from another run": _moved_from_another_run,
    "two runs": _two_runs,
    "no free port": _no_free_port,
    "rank 0 not found": lambda folder: _ranks(join, folder, only=[1], timeout=1, other_ports=[free_port()], run="mine"),
    "rank 1 missing": lambda folder: _ranks(join, folder, only=[0], timeout=1),
    "rank 0 missing": lambda folder: _ranks(join, folder, only=[1], timeout=1),
    "timed all-reduces": lambda folder: _ranks(time_all_reduces, folder),
}
