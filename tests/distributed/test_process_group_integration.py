"""Process groups of one node."""

import pytest

from tests.distributed.rendezvous_scenarios import play_scenarios
from tests.support.processes import run_processes

SOON = 10.0  # seconds; time limits are 1 or 2


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


def errors(rows, kind, *parts):
    for row in rows:
        assert row["error"].startswith(f"{kind}: "), row["error"] or row["output"]
        assert row["seconds"] < SOON
        for part in parts:
            assert part in row["error"]


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("auto", 3), ("loopback", 3), ("nothing chosen", 3), ("one rank", 1), ("three ranks", 6), ("tcp", 3),
        ("file", 3), ("tcp under torchrun", 3), ("restarts", 3), ("moved from a mute program", 3),
        ("moved from another run", 3), ("two runs", 3),
    ],
)  # fmt: skip
def test_the_ranks_of_one_host_find_each_other(outcomes, name, total):
    assert {value["sum"] for value in values(outcomes[name])} == {total}


@pytest.mark.parametrize(("name", "chosen"), [("auto", "lo"), ("loopback", "lo"), ("nothing chosen", None)])
def test_gloo_and_nccl_are_told_in_their_own_syntax(outcomes, name, chosen):
    for value in values(outcomes[name]):
        assert value["GLOO_SOCKET_IFNAME"] == chosen
        assert value["NCCL_SOCKET_IFNAME"] == (chosen and f"={chosen}")


@pytest.mark.parametrize("name", ["auto", "nothing chosen", "tcp"])
def test_the_store_of_one_host_listens_on_the_loopback_address(outcomes, name):
    for value in values(outcomes[name]):
        assert set(value["listening"]) <= {"127.0.0.1"}


@pytest.mark.parametrize("strategy", ["ddp", "ddp_join"])
def test_while_training_runs_no_socket_has_another_address_than_the_chosen_one(outcomes, strategy):
    for value in values(outcomes[f"training, {strategy}"]):
        assert value["steps"] == 2
        assert value["listening"] == ["127.0.0.1"]  # gloo, and on rank 0 the store
        assert value["connected"] == ["127.0.0.1"]


def test_a_store_that_had_to_listen_everywhere_has_moved(outcomes):
    for value in values(outcomes["unknown address"]):
        assert value["listening"] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("file of all", "the file can be written by other users (its mode is 666)"),
        ("file of a group", "the file can be written by other users (its mode is 660)"),
        ("folder of all", "can be written by all users"),
    ],
)
def test_a_file_that_others_can_write_is_no_place_to_meet(outcomes, name, problem):
    errors(outcomes[name], "RendezvousError", problem, "Use a path in a folder that only you can write")


def test_ranks_meet_in_a_file_of_a_folder_where_only_owners_can_replace_theirs(outcomes):
    assert {value["sum"] for value in values(outcomes["folder such as /tmp"])} == {3}


def test_a_process_group_is_kept_unless_its_size_is_another(outcomes):
    for again, error in values(outcomes["twice"]):
        assert again is None
        assert "of 2 in an earlier process group" in error


def test_a_file_of_a_crashed_run_is_named(outcomes):
    errors(outcomes["leftover"], "RendezvousError", "leftover` was used before", "Delete the file")


def test_a_missing_folder_is_named(outcomes):
    errors(outcomes["missing folder"], "RendezvousError", "no folder", "Create it")


def test_a_port_of_another_program_is_named(outcomes):
    rank_0, rank_1 = outcomes["taken port"]
    errors([rank_0], "RendezvousError", "cannot be listened on", "Address already in use", "Choose another port")
    errors([rank_1], "RendezvousError", "is not the store of rank 0", "Choose a port that nothing else uses")


def test_ports_that_are_all_taken_are_named(outcomes):
    errors(outcomes["no free port"], "RendezvousError", "rank 0, are all in use", "Set `MASTER_PORT` to a free one")


def test_a_rank_0_that_is_at_none_of_its_ports_is_named(outcomes):
    place = "could not connect to rank 0 at 127.0.0.1:"
    errors(outcomes["rank 0 not found"], "RendezvousError", "rank 1 on node", place, " or ")


def test_missing_ranks_are_named(outcomes):
    errors(outcomes["rank 1 missing"], "RendezvousError", "rank 1 of 2 ranks did not join in time", "Check that")
    errors(outcomes["rank 0 missing"], "RendezvousError", "rank 1 on node", "could not connect to rank 0 at 127.0.0.1:")


def test_all_reduces_are_timed_alike_on_all_ranks_until_the_time_is_over(outcomes):
    first, second = values(outcomes["timed all-reduces"])
    assert first == second
    unlimited, limited = first
    assert [row[0] for row in unlimited] == [1024, 4096]
    assert [row[0] for row in limited] == [1024]
    assert all(seconds > 0 and world_size == 2 for _, seconds, world_size in unlimited + limited)
