"""Process groups of one node: ranks that find each other, and ranks that cannot."""

import os
import re
import resource
import signal
import socket
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.cli.doctor import measure_all_reduce
from lightning_ddp_ext.distributed import stores
from lightning_ddp_ext.distributed.process_group import init_process_group
from lightning_ddp_ext.errors import RendezvousError
from tests.distributed import rank_server
from tests.distributed.rank_programs import join, train
from tests.support.ports import free_port
from tests.support.processes import run_processes

SOON = 10.0  # seconds; time limits are 1 or 2
TIMEOUT = timedelta(seconds=10)


def join_unaware(**settings):
    """Join on a node that does not have the main address, although the address leads there."""
    stores._is_this_node = lambda host: False
    return join(**settings)


def join_and_die(**settings):
    """Create the process group, and end without tidying up."""
    init_process_group(backend="gloo", timeout=TIMEOUT, **settings)
    os.kill(os.getpid(), signal.SIGKILL)


def join_twice(**settings):
    """Create a process group, the same one again, and one of another size."""
    settings = {"backend": "gloo", "network_interface": "auto", **settings, "timeout": TIMEOUT}
    init_process_group(**settings)
    again = init_process_group(**settings)
    dist.barrier()
    try:
        init_process_group(**{**settings, "world_size": 3})
    except RendezvousError as error:
        return [again, str(error)]
    return [again, ""]


def join_again(**settings):
    """Create a process group after another one, which rank 0 destroys late: its store is still there."""
    settings = {"backend": "gloo", **settings, "timeout": TIMEOUT}
    values = []
    for _ in range(3):
        init_process_group(**settings)
        value = torch.ones(1)
        dist.all_reduce(value)
        values.append(value.item())
        if settings["rank"] == 0:
            time.sleep(0.7)
        dist.destroy_process_group()
    return values


def time_all_reduces(**settings):
    """Return the rows measured without a limit, and with one that is over at once."""
    init_process_group(backend="gloo", timeout=TIMEOUT, **settings)
    rows = [measure_all_reduce(torch.device("cpu"), sizes=(1024, 4096), limit=limit) for limit in (60.0, 0.0)]
    dist.destroy_process_group()
    return [[[row.size, row.seconds] for row in measured] for measured in rows]


def _ranks(function, folder, *, limit=20.0, world_size=2, only=None, late=None, **settings):
    settings = {"world_size": world_size, "main_address": "127.0.0.1", **settings}
    if "main_port" not in settings:
        settings["main_port"] = free_port()
    ranks = range(world_size) if only is None else only
    jobs = [{"rank": rank, "arguments": {**settings, "rank": rank}} for rank in ranks]
    if late is not None:
        jobs[late]["arguments"]["delay"] = 0.5
    return rank_server.run(function, jobs, limit, folder)


def serve_as_agent(*, port):
    """Own the store of all attempts, as torchrun's agent does."""
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while store.check([]):
        time.sleep(0.1)


def _with_agent(folder, attempts):
    """Run attempts one after the other on one store, as torchrun does when it restarts workers."""
    port = free_port()
    agent = os.fork()
    if agent == 0:
        rank_server.work(serve_as_agent, {"port": port}, folder / "agent")
    try:
        env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [attempt(env=env, main_port=port) for attempt in attempts]
    finally:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)


def _restarts(folder):
    # A rank that comes early finds the keys of the attempt before in the store.
    failed = partial(_ranks, join, folder, only=[0], timeout=1)
    attempts = [partial(_ranks, join, folder, late=late, network_interface="auto") for late in (0, None, 1)]
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


def _half_leftover(folder):
    """A file that rank 0 alone has used, so that rank 1 of the next run finds no trace of itself."""
    store = dist.FileStore(f"{folder}/half", 2)  # it deletes the file at its end
    store.set("joined/0", "process 1")
    return _ranks(join, folder, init_method=f"file://{folder}/half", late=1, timeout=60)


def _damaged(folder):
    """Files that are no rendezvous, or were one, and what else may stand at a path."""
    init_method = f"file://{folder}/damaged"
    _ranks(join_and_die, folder, init_method=init_method)
    whole = (folder / "damaged").read_bytes()
    assert len(whole) > 100
    contents = {"cut": whole[:-3], "half": whole[: len(whole) // 2], "text": b"my notes\n" * 20, "zeros": bytes(64)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "link").symlink_to(folder / "nowhere" / "file")
    os.mkfifo(folder / "pipe")
    names = [*contents, "folder", "link", "pipe"]
    return [row for name in names for row in _ranks(join, folder, init_method=f"file://{folder}/{name}", limit=15.0)]


def join_with_few_files(*, more, **settings):
    """Join where this process may open only some files more."""
    limit = psutil.Process().num_fds() + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    return join(**settings)


def join_with_a_low_soft_limit(**settings):
    """Join where this process may open only some files, unless it raises its limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 4, hard))
    return join(**settings)


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


# Ranks that find each other, and the sum of their numbers.
FOUND = {
    "auto": (partial(_ranks, join, network_interface="auto"), 3),
    "loopback": (partial(_ranks, join, network_interface="loopback"), 3),
    "nothing chosen": (partial(_ranks, join), 3),
    "one rank": (partial(_ranks, join, world_size=1, network_interface="auto"), 1),
    "low soft limit": (partial(_ranks, join_with_a_low_soft_limit), 3),
    "tcp": (lambda folder: _ranks(join, folder, init_method=f"tcp://localhost:{free_port()}"), 3),
    "file": (lambda folder: _ranks(join, folder, init_method=f"file://{folder}/meeting", network_interface="auto"), 3),
    "folder such as /tmp": (partial(_shared_file, folder_mode=0o1777), 3),
    "tcp under torchrun": (_tcp_under_torchrun, 3),
    "restarts": (_restarts, 3),
    # An address that leads here but is not of this node, as a translated one: the store listens everywhere, and moves.
    "unknown address": (partial(_ranks, join_unaware, network_interface="auto"), 3),
}
# Ranks that do not, and parts of the error of all ranks, or of each rank.
FAILED = {
    "file of all": (
        partial(_shared_file, file_mode=0o666),
        ["the file can be written by other users (its mode is 666)", "Use a path in a folder that only you can write"],
    ),
    "folder of all": (partial(_shared_file, folder_mode=0o777), ["can be written by all users"]),
    "leftover": (_leftover, ["leftover` was used before", "Delete the file"]),
    "leftover of rank 0": (_half_leftover, ["half` was used before: rank 0", "Delete the file"]),
    "damaged file": (_damaged, ["`init_method=file://", "on node", "Use a new name in a folder that you can write"]),
    "missing folder": (
        lambda folder: _ranks(join, folder, init_method=f"file://{folder}/missing/meeting"), ["no folder", "Create it"]
    ),
    "taken port": (_taken_port, {
        0: ["cannot be listened on", "Address already in use", "Choose another port"],
        1: ["is not the store of rank 0", "Choose a port that nothing else uses"],
    }),
    "rank 1 missing": (
        partial(_ranks, join, only=[0], timeout=1), ["rank 1 of 2 ranks did not join in time", "Check that"]
    ),
    "rank 0 missing": (
        partial(_ranks, join, only=[1], timeout=1), ["rank 1 on node", "could not connect to rank 0 at 127.0.0.1:"]
    ),
}  # fmt: skip
OTHERS = {
    "few files": partial(_ranks, join_with_few_files, world_size=4, more=18),
    "twice": partial(_ranks, join_twice),
    "one after another": partial(_ranks, join_again),
    "training": partial(_ranks, train, strategy="ddp", limit=60.0, network_interface="auto"),
    "timed all-reduces": partial(_ranks, time_all_reduces),
}


def play_scenarios(folder):
    """Play all scenarios, and return the outcomes of their ranks by name."""
    scenarios = {name: play for name, (play, _) in (FOUND | FAILED).items()} | OTHERS
    return {name: play(Path(folder)) for name, play in scenarios.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All scenarios in one launch, which imports torch once."""
    (played,) = run_processes(play_scenarios, 1, str(tmp_path_factory.mktemp("scenarios")), timeout=200)
    return played


def values(rows):
    for row in rows:
        assert not row["error"], row["output"]
        assert not row["timed_out"], row["output"]
    return [row["value"] for row in rows]


def test_ranks_of_one_node_find_each_other(outcomes):
    assert {name: {value["sum"] for value in values(outcomes[name])} for name in FOUND} == {
        name: {total} for name, (_, total) in FOUND.items()
    }


@pytest.mark.parametrize("name", FAILED)
def test_ranks_that_cannot_meet_name_the_reason_and_a_remedy_soon(outcomes, name):
    parts = FAILED[name][1]
    assert outcomes[name]
    for row in outcomes[name]:
        assert row["error"].startswith("RendezvousError: "), row["error"] or row["output"]
        assert row["seconds"] < SOON
        for part in parts[row["rank"]] if isinstance(parts, dict) else parts:
            assert part in row["error"]


@pytest.mark.parametrize(("name", "chosen"), [("auto", "lo"), ("loopback", "lo"), ("nothing chosen", None)])
def test_gloo_and_nccl_get_the_interface_in_their_own_syntax(outcomes, name, chosen):
    for value in values(outcomes[name]):
        assert value["GLOO_SOCKET_IFNAME"] == chosen
        assert value["NCCL_SOCKET_IFNAME"] == (chosen and f"={chosen}")


def test_no_socket_has_another_address_than_the_chosen_one(outcomes):
    for name in ("auto", "nothing chosen", "tcp"):
        for value in values(outcomes[name]):
            assert set(value["listening"]) <= {"127.0.0.1"}
    for value in values(outcomes["unknown address"]):
        assert value["listening"] == ["127.0.0.1"]
    for value in values(outcomes["training"]):
        assert value["steps"] == 2
        assert value["listening"] == ["127.0.0.1"]  # gloo, and on rank 0 the store
        assert value["connected"] == ["127.0.0.1"]


def test_all_ranks_hear_that_rank_0_may_not_open_as_many_files_as_it_needs(outcomes):
    errors = [row["error"] for row in outcomes["few files"]]
    assert len(errors) == 4
    for error in errors:
        assert re.match(
            r"BackendError: rank 0 of 4 needs \d+ open files for its connections, and may open \d+\.", error
        )
        assert "`ulimit -n " in error


def test_a_process_group_is_kept_unless_its_size_is_another(outcomes):
    for again, error in values(outcomes["twice"]):
        assert again is None
        assert "of 2 in an earlier process group" in error


def test_ranks_meet_again_while_rank_0_still_leaves(outcomes):
    assert values(outcomes["one after another"]) == [[2.0] * 3] * 2


def test_all_reduces_are_timed_alike_on_all_ranks_until_the_time_is_over(outcomes):
    first, second = values(outcomes["timed all-reduces"])
    assert first == second
    unlimited, limited = first
    assert [row[0] for row in unlimited] == [1024, 4096]
    assert [row[0] for row in limited] == [1024]
    assert all(seconds > 0 for _, seconds in unlimited + limited)
