"""One launch of two ranks that runs all checks of `reducer_checks`; a test for each."""

import pytest

from tests.reducer.reducer_checks import CHECKS, run_checks
from tests.reducer.reducer_ranks import go_on_with_states, repeat_synchronisations
from tests.support.processes import run_processes

EXACT = 1e-12
FLOAT32 = 1e-6
FLOAT16 = 1e-3

EXPECTED = {
    "parameters_and_buffers_start_as_the_first_ranks": 0.0,
    "weights_make_uneven_batches_exact": EXACT,
    "a_late_parameter_of_a_bucket_that_has_left_gets_its_gradient": EXACT,
    "gradients_of_unused_parameters_stay_none": [False, False, True, True],
    "a_rank_without_data_gets_the_gradients_of_the_others": EXACT,
    "hooks_of_parameters_see_the_gradient_of_all_ranks": [2, 0, 0, 0, 5],
    "a_loss_that_counts_nothing_may_be_nan": True,
    "what_only_ranks_that_count_nothing_have_used_stays_none": [False, True, True] * 3,
    "no_rank_with_data_leaves_no_gradient": [True] * 4,
    "no_rank_with_data_leaves_no_gradient_of_a_backward_pass_either": [True, False, True],
    "no_rank_with_data_keeps_what_was_synchronised_before": (EXACT,) * 4,
    "no_rank_with_data_drops_on_all_ranks_what_one_had_not_synchronised": [True, True, False, False],
    "synchronising_again_adds_to_the_mean": EXACT,
    "zero_grad_in_place_or_never": EXACT,
    "sparse_gradients": (EXACT, "torch.sparse_coo"),
    "sparse_gradients_that_one_rank_lacks": EXACT,
    "a_sparse_embedding_tied_to_a_dense_layer": EXACT,
    "sparse_gradients_of_functions": EXACT,
    "the_state_of_a_module_with_dense_gradients_is_left_alone": EXACT,
    "several_types_in_one_module": [
        *["torch.complex64"],
        *["torch.float64"] * 2,
        *["torch.bfloat16"] * 2,
        *["torch.float32"] * 2,
    ],
    "bfloat16_as_torch_does_it": True,
    "channels_last_gradients_keep_their_layout": True,
    "an_infinity_on_one_rank_skips_the_step_on_all": (0.0, 0.0),
    "a_module_converted_after_the_first_step": "torch.float64",
    "double_backward_through_the_loss": EXACT,
    "training_goes_on_after_a_forward_pass_that_failed": EXACT,
    "buffers_become_equal_after_every_step": (EXACT, 0.0, 3),
    "buffers_become_equal_where_no_rank_counts": (EXACT, 0.0),
    "whole_numbers_come_from_the_first_rank_with_data": [1, 3, 5, 6, -1, 0, 0, 0],
    "buffers_that_change_silently": 0.0,
    "a_state_tells_which_buffers_change_silently": [True, True, False, True],
    "buffers_without_changes_cost_nothing": [],
    "buffers_of_many_kinds": [],
    "values_that_all_ranks_have_stay_what_they_are": True,
    "large_buffers_travel_only_if_they_differ": (0.0, 0.0, 0),
    "buffers_that_change_their_shape_on_all_ranks": 0.0,
    "a_buffer_that_becomes_none_and_comes_back": [0.5, 0.5, -1.0, 0.5, -1.0, 0.5, 0.5, 0.5, 0.5, 0.5],
    "buffers_that_are_registered_late": 0.0,
    "a_buffer_replaced_several_times_between_two_steps": 0.0,
    "buffers_that_share_memory_among_elements": (0.0, 0),
    "a_buffer_that_is_not_dense": 0.0,
    "what_torch_is_told_to_ignore": [*[True] * 6, [], 0.0],
    "frozen_layers_stop_travelling": (2, EXACT),
    "what_ranks_tell_travels_with_the_gradients": {
        **{f"torch.{name}": (1, True) for name in ("float64", "float32", "float16", "bfloat16")},
        "torch.complex64": (2, True),
    },
    "a_stop_that_one_rank_wants_reaches_all": [False, True, False],
    "gradients_outside_a_synchronisation_are_noticed": [True, False, False],
    "allreduce_hook": FLOAT32,
    "fp16_compress_hook": FLOAT16,
    "fp16_compress_hook_with_large_weights": FLOAT16,
    "bf16_compress_hook": (1e-2, 0.0),
    "hooks_that_issue_collectives_later_do_not_meet_those_of_buffers": 0.0,
    "hooks_with_state_see_the_same_units_in_every_step": FLOAT32,
    "post_local_sgd_hook": FLOAT32,
    "power_sgd_hook": FLOAT32,
    "several_buckets_with_hooks": 0.0,
    "compiled_modules": EXACT,
}


@pytest.fixture(scope="module")
def results():
    return run_processes(run_checks, 2, timeout=90)


@pytest.mark.parametrize("name", EXPECTED)
def test_on_every_rank(results, name):
    for rank, found in enumerate(results):
        assert _agrees(found[name], EXPECTED[name]), f"rank {rank}: {found[name]}"


def test_equal_weights_are_wrong_for_uneven_batches(results):
    """The negative control of every check of a weighted mean."""
    assert all(found["equal_weights_are_wrong_for_uneven_batches"] > 1e-3 for found in results)


def test_ranks_that_are_out_of_step_are_told(results):
    for rank, found in enumerate(results):
        assert (
            f"RanksOutOfStepError: rank {rank} synchronises gradients at position {3 + rank}"
            in found["ranks_out_of_step"]
        )


@pytest.mark.parametrize(
    ("name", "number"), [("an_error_on_one_rank_is_noticed", 2), ("an_error_of_arguments_on_one_rank_is_noticed", 1)]
)
def test_ranks_of_which_one_has_failed_are_told(results, name, number):
    for rank, found in enumerate(results):
        assert found[name].startswith(
            f"rank {rank} makes its synchronisation {number + rank} of gradients, others theirs of number"
            f" {number + 1 - rank}."
        )


def test_a_hook_that_one_rank_has_is_told(results):
    for found in results:
        assert (
            "use of a communication hook is True on rank 0 but False on rank 1"
            in found["a_hook_that_one_rank_has_is_told"]
        )


def test_what_a_gradient_is_does_not_depend_on_when_its_bucket_was_made():
    """Three ranks add up in another order if a message has another length."""
    for found in run_processes(repeat_synchronisations, 3, timeout=60):
        assert found == dict.fromkeys(found, True) != {}


def test_a_reducer_with_the_state_of_another_rounds_as_it_does():
    """Without it, three ranks do not: with other buckets, or other beliefs, sums are made in another order."""
    for found in run_processes(go_on_with_states, 3, timeout=60):
        assert found["with its state"] == 0
        assert found["without"] > 0
        assert found["without what ranks believe"] > 0
        assert found["of another setup"] == found["without"]
        of_different_steps, too_late = found["errors"]
        assert of_different_steps.startswith(
            "ReplicaMismatchError: ranks are not set up alike: state of the reducer is"
        )
        assert too_late.startswith("RuntimeError: The reducer has learned something already.")


def test_ranks_whose_buffers_differ_in_shape_are_told(results):
    for found in results:
        error = found["buffers_that_differ_in_shape"]
        assert "ReplicaMismatchError" in error
        assert "buffer `seen` is float32 [2] on rank 0 but float32 [3] on rank 1. Build" in error


def test_a_synchronisation_that_failed_is_the_last(results):
    for rank, found in enumerate(results):
        failed, refused = found["training_does_not_go_on_after_a_backward_pass"]
        assert failed == ""
        assert refused.startswith(f"rank {rank}: the last synchronisation failed after its backward pass had begun")


def test_every_check_is_looked_at():
    assert set(CHECKS) - set(EXPECTED) == {
        "buffers_that_differ_in_shape",
        "a_hook_that_one_rank_has_is_told",
        "an_error_of_arguments_on_one_rank_is_noticed",
        "an_error_on_one_rank_is_noticed",
        "equal_weights_are_wrong_for_uneven_batches",
        "ranks_out_of_step",
        "training_does_not_go_on_after_a_backward_pass",
    }


def _agrees(found, expected):
    if isinstance(expected, tuple):
        return isinstance(found, tuple) and all(map(_agrees, found, expected))
    if isinstance(expected, float):
        return isinstance(found, float) and found <= expected
    return found == expected
