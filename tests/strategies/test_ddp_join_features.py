"""Evaluation, logging, collectives, loaders and failures under `ddp_join`. One launch for all."""

from itertools import chain

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from lightning_ddp_ext import DDPJoinStrategy
from tests.strategies.join_cases import batch_samplers, changing, evaluation, run_cases
from tests.strategies.join_cases import samplers as own_samplers
from tests.strategies.join_ranks import samples
from tests.support.processes import run_processes

RANKS = range(3)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_processes(run_cases, 3, str(tmp_path_factory.mktemp("checkpoints")), timeout=240)


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets")
@pytest.mark.filterwarnings("ignore:`pos_label` automatically set")
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 10])
def test_evaluation_counts_every_sample_once(found, number):
    expected, confusion, _ = evaluation.evaluate(number, strategy="auto", devices=1)
    for rank in RANKS:
        values, found_confusion, collected = found[rank]["evaluation"][number]
        assert values == pytest.approx(expected, rel=1e-9)
        assert found_confusion == confusion
        assert collected == list(range(number))[rank::3]
    assert expected["number"] == expected["hook"] == expected["seen"] == number


@pytest.mark.filterwarnings("ignore:Metric .* will save")
@pytest.mark.filterwarnings("ignore:The variance of")
@pytest.mark.parametrize("number", range(1, 11))
def test_metrics_that_keep_lists_are_those_of_one_process(found, number):
    expected = evaluation.evaluate_lists(number, strategy="auto", devices=1)
    assert expected["number"] == expected["callback's number"] == number
    for rank in RANKS:
        assert found[rank]["metrics_with_lists"][number] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("number", [1, 2, 7])
def test_prediction_returns_every_sample_once(found, number):
    assert [found[rank]["prediction"][number] for rank in RANKS] == [list(range(number))[rank::3] for rank in RANKS]


def test_steps_communicate_among_the_ranks_that_have_data(found):
    steps = [[0, 1, 2], [0, 1], [0], [0]]  # the ranks with data
    for rank in RANKS:
        own = [active for active in steps if rank in active]
        for active, values in zip(own, found[rank]["in_the_step"][0], strict=True):
            assert values["rows"] == values["rows of a dictionary"] == len(active)
            assert values["total"] == sum(other + 1 for other in active)
            assert values["names"] == [f"rank {other}" if other in active else None for other in RANKS]
            assert values["largest"] == -1


def test_synchronised_values_are_those_of_the_ranks_that_have_data(found):
    steps = [[0, 1, 2], [0, 1], [0], [0]]
    for rank in RANKS:
        metrics = found[rank]["in_the_step"][1]
        for number, active in enumerate(steps):
            values = [other + 1 for other in active]
            expected = {"mean": sum(values) / len(values), "sum": sum(values), "max": max(values), "min": min(values)}
            assert {name: metrics[number][name] for name in expected} == expected
            assert metrics[number]["start_step"] == metrics[number]["end"] == expected["mean"]
            assert metrics[number]["shared"] == expected["mean"]
            assert metrics[number]["own"] == rank + 1


def test_values_of_epoch_hooks_count_on_every_rank(found):
    for rank in RANKS:
        metrics = found[rank]["in_the_step"][2]
        assert metrics["epoch"] == 2
        assert metrics["mean_rank"] == pytest.approx((1 * 4 + 2 * 2 + 3) / 7)
        assert metrics["start_epoch"] == pytest.approx((1 * 4 + 2 * 2 + 3) / 7)


def test_values_of_steps_that_weigh_nothing_count_once_per_rank_with_data(found):
    for rank in RANKS:
        metrics, over_epoch = found[rank]["a_step_that_weighs_nothing"]
        expected = [{"mean": 2, "sum": 6, "max": 3, "min": 1}, {"mean": 1.5, "sum": 3, "max": 2, "min": 1}]
        assert [{name: seen[name] for name in expected[0]} for seen in metrics] == expected
        assert over_epoch == pytest.approx((2 * 6 + 1.5 * 4) / 10)


def test_arguments_that_differ_are_told(found):
    for rank in RANKS:
        told = "argument `uneven_inputs` is join on ranks 0, 2 but stop on rank 1"
        assert told in found[rank]["arguments_that_differ"]


def test_a_metric_is_that_of_all_ranks_in_every_epoch(found):
    assert [found[rank]["a_metric_over_epochs"] for rank in RANKS] == [pytest.approx((1 + 1 + 2) / 3)] * 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a_broadcast_from_a_joined_rank", "sends from rank 2, but rank 2 has run out of data"),
        (
            "keys_that_differ_in_the_uneven_phase",
            "rank 1 logs `odd` with `sync_dist=True` in `training_step`, rank 2 does not",
        ),
        (
            "keys_that_differ_after_a_manual_backward",
            "rank 1 logs `odd` with `sync_dist=True` in `training_step`, rank 0 does not",
        ),
        ("refusing_uneven_data", "rank 2 runs out of data after batch 1, while rank 0 has 4 batches"),
        ("refusing_uneven_streams", "rank 2 ran out of data after batch 1, other ranks have more"),
        ("a_failure_in_the_uneven_phase", "boom"),
    ],
)
def test_an_error_is_told_on_every_rank(found, name, expected):
    for rank in RANKS:
        assert expected in found[rank][name]


def test_ranks_that_wait_say_which_rank_has_failed(found):
    assert found[0]["a_failure_in_the_uneven_phase"] == "ArithmeticError: boom"
    for rank in (1, 2):
        told = "OtherRankError: rank 0 failed: ArithmeticError: boom (at step 2, training, batch 2, in training_step ("
        assert found[rank]["a_failure_in_the_uneven_phase"].startswith(told)


@pytest.mark.parametrize("name", ["an_exit_in_the_uneven_phase", "an_exit_that_is_saved"])
def test_ranks_that_wait_are_told_that_a_rank_has_left_by_itself(found, name):
    assert found[0][name] == "left"
    for rank in (1, 2):
        assert found[rank][name].startswith("OtherRankError: rank 0 ended the run while others still waited")


def test_the_order_in_which_keys_are_logged_does_not_matter(found):
    assert [found[rank]["keys_in_another_order"] for rank in RANKS] == [(1.0, 2.0)] * 3


def test_several_loaders_end_on_each_rank_as_they_would_there(found):
    expected = {  # steps of each rank: loaders with 4, 1, 2 and 1, 3, 2 batches
        "min_size": (1, 1, 2),
        "max_size": (4, 3, 2),
        "max_size_cycle": (4, 3, 2),
    }
    for mode, steps in expected.items():
        outcomes = [found[rank]["several_loaders"][mode] for rank in RANKS]
        assert [len(seen) for seen, _, _ in outcomes] == list(steps)
        for rank, (_, shadow_ranks, digests) in enumerate(outcomes):
            assert shadow_ranks == [step >= steps[rank] for step in range(max(steps))]
            assert digests == outcomes[0][2]


@pytest.mark.parametrize("in_hook", [False, True], ids=["given", "of a hook"])
@pytest.mark.parametrize("name", batch_samplers.SAMPLERS)
@pytest.mark.parametrize("strategy", ["ddp_join", "ddp_checkpoint"])
def test_batch_samplers_keep_the_size_of_batches_and_their_samplers(found, strategy, in_hook, name):
    of_ranks = [found[rank]["batch_samplers"][0][strategy, in_hook, name] for rank in RANKS]
    pads = strategy == "ddp_checkpoint" or "DistributedSampler" in name
    for rank, batches in enumerate(of_ranks):
        sizes = [3, 3] if pads or rank < 2 else [3, 2]
        assert [len(batch) for batch in batches] == ([3] if "drops" in name and sizes[-1] < 3 else sizes) * 2
    seen = {index for batches in of_ranks for batch in batches for index in batch}
    if "weighted" in name:
        assert seen <= set(range(batch_samplers.FIRST))
    elif "drops" not in name:
        assert seen == set(range(batch_samplers.SAMPLES))


@pytest.mark.parametrize("name", own_samplers.SAMPLERS)
def test_what_a_sampler_draws_is_dealt_out_once_in_every_epoch(found, name):
    for epoch in range(2):
        dealt = [list(chain.from_iterable(found[rank]["samplers"][name][epoch])) for rank in RANKS]
        assert sorted(chain.from_iterable(dealt)) == list(range(batch_samplers.SAMPLES))
        if name == "by epoch":
            assert [indices[0] for indices in dealt] == [epoch, epoch + 1, epoch + 2]


def test_lightning_loses_the_size_of_a_batch_samplers_batches(found):
    for rank in RANKS:
        assert {len(batch) for batch in found[rank]["batch_samplers"][1]} == {1}


def test_a_batch_sampler_predicts_every_sample_once(found):
    batches = [batch for rank in RANKS for batch in found[rank]["prediction_with_a_batch_sampler"]]
    assert sorted(chain.from_iterable(batches)) == list(range(batch_samplers.SAMPLES))
    assert max(map(len, batches)) == 3


@pytest.mark.parametrize(
    "name",
    [
        "batches_that_are_changed",
        "normalisation",
        "manual_optimization",
        "compressed_gradients",
        "an_optimizer_inside_of_the_backward_pass",
    ],
)
def test_ranks_stay_identical(found, name):
    assert found[0][name] == found[1][name] == found[2][name]
    assert not isinstance(found[0][name], str)


def test_hooks_see_a_batch_of_another_rank_where_a_rank_cannot_copy_its_own(found):
    digests, on_shadow_ranks = zip(*[found[rank]["batches_that_cannot_be_copied"] for rank in RANKS], strict=True)
    assert digests[0] == digests[1] == digests[2]
    assert list(map(len, on_shadow_ranks)) == [0, 2, 3]
    assert all(index < 10 for seen in on_shadow_ranks for indices in seen for index in indices)


def test_manual_optimization_counts_the_steps_of_all_ranks(found):
    assert found[0]["manual_optimization"][0] == 2 * 2 * 4


def test_parameters_that_are_whole_numbers_become_those_of_the_first_rank(found):
    assert [found[rank]["parameters_that_are_whole_numbers"] for rank in RANKS] == [[0, 1, 2]] * 3


def test_a_hook_that_would_not_reach_ranks_without_data_is_refused():
    with pytest.raises(ValueError, match="`ddp_comm_hook` must be one of torch's that keep no state"):
        DDPJoinStrategy(ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_state=object())


def test_statistics_of_averaged_weights_are_those_of_all_samples(found):
    mean = samples(14)[1].mean(0).tolist()
    assert [found[rank]["statistics_of_averaged_weights"] for rank in RANKS] == [pytest.approx(mean, rel=1e-9)] * 3


def test_manual_optimization_gives_scalers_and_sparse_gradients_to_ranks_without_data(found):
    states = [found[rank]["manual_optimization_of_words"][0] for rank in RANKS]
    assert states[0] == states[1] == states[2]
    assert [(is_sparse, scale) for is_sparse, scale, _ in states[2]] == [
        (True, 2.0 * 4 ** (1 + step)) for step in range(4)
    ]


def test_manual_optimization_leaves_alone_what_belongs_to_a_rank(found):
    for rank in RANKS:
        kept = [[rank] * 2, [1] * (rank + 1), [rank] * (rank + 1)]
        assert found[rank]["manual_optimization_of_words"][1] == kept


def test_manual_optimization_synchronises_what_is_logged_around_backward_passes(found):
    of_ranks = [found[rank]["logging_around_manual_backward_passes"] for rank in RANKS]
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    assert len(of_ranks[0][0]) == 4
    assert all(metrics.keys() >= {"before", "between"} for metrics in of_ranks[0][1])


def test_steps_for_averaged_weights_synchronise_what_they_log(found):
    means = [1, 0.5, 0, 0]  # of the ranks with data: all, 0 and 1, 0, 0
    assert [found[rank]["values_of_steps_for_averaged_weights"] for rank in RANKS] == [means] * 3


@pytest.mark.parametrize("counts", [(8, 4, 2), (2, 4, 8)], ids=str)
@pytest.mark.parametrize("name", changing.CHANGES)
def test_what_a_step_changes_is_changed_on_ranks_without_data(found, name, counts):
    alone, unchanged = (
        changing.fit_changing(change, changing.whole_batches(counts), strategy="auto", devices=1)[0]
        for change in (changing.CHANGES[name], lambda module: None)
    )
    for rank in RANKS:
        kept = found[rank]["changes_of_steps"][name, counts]
        for step, (own, first, expected) in enumerate(
            zip(kept, found[0]["changes_of_steps"][name, counts], alone, strict=True)
        ):
            assert torch.equal(own["tensors"], first["tensors"]), step
            torch.testing.assert_close(own["tensors"], expected["tensors"], rtol=0, atol=1e-12)
            assert {**own, "tensors": 0} == {**expected, "tensors": 0}, step
    settings = [[one[key] for key in one if key != "tensors"] for one in (alone[-1], unchanged[-1])]
    same_size = alone[-1]["tensors"].shape == unchanged[-1]["tensors"].shape
    assert (
        settings[0] != settings[1]
        or not same_size
        or not torch.allclose(*(one[-1]["tensors"] for one in (alone, unchanged)))
    )


def test_a_counter_of_samples_in_a_step_is_that_of_the_rank(found):
    assert [found[rank]["counters_of_samples"] for rank in RANKS] == [(16, 16), (8, 8), (0, 0)]


def test_second_order_optimizers_have_the_same_loss_on_ranks_without_data_in_any_precision(found):
    expected = changing.fit_second_order(changing.whole_batches((8, 4, 2)), strategy="auto", devices=1)
    for rank in RANKS:
        parameters = found[rank]["second_order_in_another_precision"]
        assert torch.equal(parameters, found[0]["second_order_in_another_precision"])
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("automatic", [True, False])
def test_state_in_lists_of_an_optimizer_and_a_buffer_changed_last_are_those_of_one_process(found, automatic):
    given = changing.whole_batches((8, 4, 2))
    expected, steps = changing.fit_with_history(automatic, given, strategy="auto", devices=1)
    for rank in RANKS:
        parameters, counted = found[rank]["optimizers_with_a_history"][automatic]
        assert torch.equal(parameters, found[0]["optimizers_with_a_history"][automatic][0])
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)
        assert counted == steps == (0 if automatic else 8)


@pytest.mark.parametrize("name", ["sized", "stream", "accumulated stream"])
def test_a_step_is_one_message_whether_loaders_know_their_length_or_not(found, name):
    """Of a small model; its first step takes more."""
    for rank in RANKS:
        later, first = found[rank]["messages"][name]
        assert later == [1, 1, 1]
        assert first > 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sized", "drops batches 3, 2, 0 of ranks 0 to 2, 9 samples in every epoch."),
        ("limited", "drops batches 1, 1, 0 of ranks 0 to 2, 4 samples in every epoch."),
        ("without last batches", "drops batches 3, 1, 0 of ranks 0 to 2, 8 samples in every epoch."),
        ("streams", "drops at least batches 1, 1, 0 of ranks 0 to 2, 3 samples."),
        ("finished batches", "drops at least batches 1, 1, 0 of ranks 0 to 2."),
        ("with short last batches", "drops batches 1, 1, 0 of ranks 0 to 2, 3 samples in every epoch."),
    ],
)
def test_what_stopping_leaves_out_is_said_once(found, name, expected):
    for rank in RANKS:
        assert found[rank]["what_stopping_leaves_out"][name] == [f'`uneven_inputs="stop"` {expected}']


def test_process_groups_are_gone_when_a_run_is_over(found):
    """With their threads, which forked workers of the next run would wait for."""
    for rank in RANKS:
        threads = found[rank]["repeated_runs"]
        assert len(threads) == 4
        assert threads == [threads[0]] * 4


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_resumed_run_ends_as_the_whole_one(found, steps):
    for rank in RANKS:
        resumed, whole = found[rank]["resuming"][steps]
        assert resumed == whole != []


def test_an_optimizer_draws_the_same_numbers_on_all_ranks_and_steps_draw_their_own(found):
    of_ranks = [found[rank]["optimizers_that_draw"] for rank in RANKS]
    for rank, (whole, resumed, drawn, drawn_again) in enumerate(of_ranks):
        assert whole == of_ranks[0][0]
        assert len(set(whole)) == 8
        assert resumed == whole[3:]
        # Rank 1 has two batches in an epoch, rank 2 has one; three steps were made before the interruption.
        assert drawn_again == drawn[[3, 2, 1][rank] :]
    assert len({number for _, _, drawn, _ in of_ranks for number in drawn}) == 2 * (4 + 2 + 1)


def test_a_run_that_resumes_has_the_buckets_that_had_grown(found):
    """On three ranks sums would be rounded differently."""
    for rank in RANKS:
        for resumed, whole in found[rank]["resuming_with_buckets_that_have_grown"]:
            assert resumed == whole != []


def test_before_the_end_of_a_window_a_rank_finds_its_own_gradient_or_none(found):
    missing, last = zip(*(found[rank]["gradients_within_a_window"] for rank in RANKS), strict=True)
    assert missing == ([False] * 4, [False, False, True, False], [False, False, True, False])
    assert last == (last[0],) * 3


def test_stopping_leaves_out_what_others_have_more(found):
    for rank in RANKS:
        shadow_ranks, seen, digests = found[rank]["stopping_at_the_shortest"]
        assert shadow_ranks == [False]
        assert len(seen) == 2
        assert digests == found[0]["stopping_at_the_shortest"][2]
        assert torch.is_grad_enabled()
