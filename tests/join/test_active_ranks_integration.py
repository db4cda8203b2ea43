"""Collectives of a step are those of the ranks that have data. One launch for all."""

from types import FunctionType

import pytest
import torch.distributed as dist

from tests.join import uneven_phase_ranks as ranks
from tests.support.processes import run_processes
from tests.support.rank_processes import RankTimeoutError

# On ranks 0 and 2, which give 1 and 3; rank 1 has run out of data.
EXPECTED = {
    "all_reduce": (4, 4),
    "all_reduce_of_the_largest": (-1, -1),
    "all_reduce_async": (4, 4),
    "all_reduce_in_a_thread": (4, 4),
    "all_reduce_of_a_group_kept_from_before": (4, 4),
    "all_reduce_of_another_group_of_all": (4, 4),
    "all_reduce_of_some_that_are_active": (4, 4),
    "all_reduce_coalesced": ([4, -4], [4, -4]),
    "all_gather": ([[1, 1], [0, 0], [3, 3]],) * 2,
    "all_gather_single": ([[1, 1], [0, 0], [3, 3]],) * 2,
    "all_gather_into_tensor": ([[1, 1], [0, 0], [3, 3]],) * 2,
    "all_gather_object": ([{"rank": 0}, None, {"rank": 2}],) * 2,
    "broadcast": (3, 3),
    "broadcast_object": ([{"rank": 2}],) * 2,
    "reduce": (None, 4),
    "reduce_to_the_joined_rank": (1, 3),
    "gather": (None, [1, 0, 3]),
    "gather_to_the_joined_rank": ("passed", "passed"),
    "gather_object": (None, [{"rank": 0}, None, {"rank": 2}]),
    "scatter": (1, 3),
    "scatter_object": ([{"for": 0}], [{"for": 2}]),
    "reduce_scatter": ([4, 4], [400, 400]),
    "reduce_scatter_single": ([4, 4], [400, 400]),
    "reduce_scatter_tensor": ([4, 4], [400, 400]),
    "all_to_all": ([1, 0, 3], [100, 0, 300]),
    "all_to_all_single": ([1, 0, 3], [100, 0, 300]),
    "barrier": ("passed", "passed"),
    "send_and_receive": (1, 1),
    "send_and_receive_later": (1, 1),
    "send_and_receive_in_a_batch": (1, 1),
    "send_and_receive_objects": ([{"rank": 0}],) * 2,
    "receive_from_any_rank": (None, 0),
    "monitored_barrier": ("passed", "passed"),
    "device_mesh": (3, 3),
    "functional_all_reduce": (4, 4),
    "functional_all_reduce_of_a_named_group": (4, 4),
    "functional_all_reduce_of_a_mesh": (4, 4),
    "gradient_through_all_gather": (([1, 0, 3], 2), ([1, 0, 3], 200)),
    "collective_in_a_backward_pass": (4, 4),
}
REFUSED = {
    "broadcast_from_the_joined_rank": "sends from rank 1, but rank 1 has run out of data",
    "send_to_the_joined_rank": "a message to or from rank 1 cannot arrive, but rank 1 has run out of data",
    "a_new_group": "a new process group needs every rank",
    "new_subgroups": "a new process group needs every rank",
    "new_subgroups_by_enumeration": "a new process group needs every rank",
    "shrink_group": "a new process group needs every rank",
    "split_group": "`ProcessGroup.split_group` is not known to work among some of the ranks",
    "all_gather_coalesced": "`ProcessGroup.allgather_coalesced` is not known",
    "gather_single": "`ProcessGroup.gather_single` is not known",
    "gather_into_tensor": "`ProcessGroup.gather_single` is not known",
    "get_backend_impl": "`ProcessGroup.get_backend` is not known",
    "a_collective_that_is_not_known": "`ProcessGroup.reduce_scatter_tensor_coalesced` is not known",
    "a_method_of_a_torch_to_come": "`ProcessGroup.all_shuffle` is not known",
}
# Public functions of `torch.distributed` that need no other rank, or are no part of a step.
LOCAL = {
    "breakpoint", "destroy_process_group", "get_backend", "get_backend_config", "get_default_backend_for_device",
    "get_global_rank", "get_group_rank", "get_node_local_rank", "get_pg_count", "get_process_group_ranks", "get_rank",
    "get_world_size", "init_process_group", "is_available", "is_backend_available", "is_gloo_available",
    "is_initialized", "is_mpi_available", "is_nccl_available", "is_torchelastic_launched", "is_ucc_available",
    "is_xccl_available", "record_comm", "register_rendezvous_handler", "rendezvous", "set_timeout", "supports_complex",
}  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return run_processes(ranks.run_cases, 3, timeout=60)


def available(cases):
    return [(name, expected) for name, expected in cases.items() if name not in ranks.ABSENT]


@pytest.mark.parametrize(("name", "expected"), available(EXPECTED))
def test_a_collective_is_one_of_the_active_ranks(found, name, expected):
    assert (found[0][0][name], found[2][0][name]) == expected


@pytest.mark.parametrize(("name", "expected"), available(REFUSED))
def test_what_cannot_be_made_right_raises_on_every_active_rank(found, name, expected):
    for rank in ranks.ACTIVE:
        assert found[rank][0][name].startswith(f"rank {rank}: ")
        assert expected in found[rank][0][name]


def test_a_group_of_which_some_have_run_out_is_named(found):
    of_ranks = [results.get("a_group_with_the_joined_rank") for results, _ in found]
    assert "a process group of ranks 0, 1 has only some of the active ranks" in of_ranks[0]
    assert of_ranks[2] == "not a member"


def test_everything_was_tried_and_all_ranks_are_back_afterwards(found):
    assert set(found[0][0]) | ranks.ABSENT == set(EXPECTED) | set(REFUSED) | {"a_group_with_the_joined_rank"}
    assert [total for _, total in found] == [6, 6, 6]


def test_every_public_function_of_torch_has_a_case_or_needs_no_other_rank():
    public = {name for name, value in vars(dist).items() if type(value) is FunctionType and not name.startswith("_")}
    called = {name for function in ranks.CASES.values() for name in function.__code__.co_names}
    assert len(public) > 50
    assert public - called - ranks.ABSENT - LOCAL == set()


def test_groups_of_ranks_that_do_not_come_again_are_given_up():
    found = run_processes(ranks.use_many_groups, 3, timeout=60)
    assert [reduced for reduced, _ in found] == [[3, 4, 1] * 10, [3, 5, 2] * 10, [4, 5, 3] * 10]
    assert all(sockets < 15 for _, sockets in found)  # of 50 if all were kept; backends take a moment to close theirs


def test_without_redirection_active_ranks_wait_for_the_joined_one():
    with pytest.raises(RankTimeoutError, match="in all_reduce"):
        run_processes(ranks.wait_in_vain, 2, timeout=10)
