"""Replicas that Lightning's `ddp` trains are compared; what one rank has of its own is named."""

import pytest

from tests.support.processes import run_processes

from . import consistency_ranks as ranks

pytestmark = pytest.mark.timeout(300)
LIMIT = 240
LAUNCHED = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}  # as torchrun does


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def outcomes(request):
    """What every rank reports of every case."""
    by_rank = run_processes(ranks.train_all, request.param, list(ranks.CASES), timeout=LIMIT, env=LAUNCHED)
    return {name: [outcome[name] for outcome in by_rank] for name in ranks.CASES}


@pytest.mark.parametrize(
    "name",
    [
        "adam", "amsgrad", "momentum", "sgd", "rmsprop", "lbfgs", "own data, buffers by default",
        "own data, buffers ignored", "two optimizers",
    ],
)  # fmt: skip
def test_replicas_that_are_identical_are_not_mentioned(outcomes, name):
    for outcome in outcomes[name]:
        assert outcome.message is None
        assert outcome.comparisons == ranks.STEPS
        assert 0 < outcome.seconds < outcome.training_seconds
        assert outcome.equal


FOUND = {
    "parameter": "parameter `first.weight`, float32 [4, 5], of rank 1 differs from {}: 1 element differs, first at"
    " [1, 2] ",
    "zero": "parameter `last.weight`, float32 [3, 4], of rank 1 differs from {}: 1 element differs, first at [1, 2]"
    " -0 instead of 0, by up to 0 (relative 0) (1 of ",
    "nan": "parameter `norm.bias`, float32 [4], of rank 1 differs from {}: 1 element differs, first at [3] nan"
    " instead of ",
    "buffer": "buffer `norm.running_var`, float32 [4], of rank 1 differs from {}: 1 element differs, first at [2] ",
    "count": "buffer `norm.num_batches_tracked`, int64 [], of rank 1 differs from {}: 1 element differs, first 4"
    " instead of 3, by up to 1 (relative 0.25) (1 of ",
    "exp_avg": "`exp_avg` of `first.bias` in optimizer 0, float32 [4], of rank 1 differs from {}: 1 element differs,"
    " first at [0] ",
    "momentum_buffer": "`momentum_buffer` of `last.bias` in optimizer 0, float32 [3], of rank 1 differs from {}: 1 ",
    "momentum of the second": "`momentum_buffer` of `last.bias` in optimizer 1, float32 [3], of rank 1 differs from ",
    "state": "`exp_avg` of `norm.weight` in optimizer 0 is missing on rank 1, but float32 [4] on {} (3 of ",
    "learning rate": "`lr` of group 0 in optimizer 0, float64 [], of rank 1 differs from {}: 1 element differs, first"
    " 0.02",
}


@pytest.mark.parametrize("name", FOUND)
def test_what_one_rank_has_of_its_own_is_named(outcomes, name):
    others = "rank 0" if len(outcomes[name]) == 2 else "ranks 0, 2"
    steps = 2 if name == "momentum of the second" else 1  # in a batch
    for outcome in outcomes[name]:
        assert outcome.message.startswith(
            f"replicas differ after step {3 * steps}, unlike after step {2 * steps}: {FOUND[name].format(others)}"
        )
        assert (outcome.step, outcome.comparisons) == (3 * steps, 3)
        assert outcome.message == outcomes[name][0].message


def test_a_flipped_bit_is_measured(outcomes):
    message = outcomes["exp_avg"][0].message
    assert message.count("e-") > 0
    relative = float(message.split("(relative ")[1].split(")")[0])
    assert 0 < relative < 2**-22


@pytest.mark.parametrize("name", ["unseen parameter", "unseen state", "unseen thawing"])
def test_without_the_callback_nobody_notices(outcomes, name):
    for outcome in outcomes[name]:
        assert outcome.message is None
        assert outcome.step == ranks.STEPS
        assert not outcome.equal


def test_a_layer_that_ddp_does_not_synchronise_is_named(outcomes):
    for outcome in outcomes["thawed"]:
        assert outcome.message.startswith(
            "replicas differ after step 3, unlike after step 2: parameter `first.weight`, float32 [4, 5], of rank"
        )
        assert "Look for code that runs on one rank only" in outcome.message


def test_buffers_that_ddp_lets_differ_are_named_if_asked_for(outcomes):
    for outcome in outcomes["own data, buffers"]:
        assert outcome.message.startswith("replicas differ after step 1: buffer `norm.running_mean`, float32 [4], of ")
        assert outcome.message.endswith("exclude it with `ignore=['norm.running_mean']`.")


def test_names_may_be_ignored_with_the_state_of_their_optimizer(outcomes):
    for outcome in outcomes["ignored"]:
        assert outcome.message is None
        assert outcome.comparisons == 3


def test_a_warning_lets_training_go_on(outcomes):
    first, *others = outcomes["warning"]
    assert len(first.warnings) == ranks.STEPS - 2
    assert first.warnings[0].startswith("replicas differ after step 3, unlike after step 2: parameter `first.weight`")
    for outcome in (first, *others):
        assert (outcome.message, outcome.step, outcome.comparisons) == (None, ranks.STEPS, ranks.STEPS)
    assert not any(outcome.warnings for outcome in others)


@pytest.mark.parametrize(
    ("name", "comparisons", "beginning"),
    [
        ("every 2", 2, "replicas differ after step 4, unlike after step 2: parameter `first.weight`"),
        ("at the end", 1, "replicas differ after step 6: parameter `first.weight`"),
    ],
)
def test_replicas_are_compared_every_n_steps_and_in_the_end(outcomes, name, comparisons, beginning):
    for outcome in outcomes[name]:
        assert outcome.comparisons == comparisons
        assert outcome.message.startswith(beginning)
        assert outcome.message.endswith("Set `every_n_steps=1` to find the step of the first difference.")


@pytest.mark.parametrize(
    ("name", "steps", "comparisons"),
    [
        ("every 4", 6, 2),  # after step 4, and in the end
        ("accumulation", 3, 3),
        ("accumulation over two epochs, every 2", 4, 2),  # windows of 4 and 2 batches in each epoch
        ("by hand", 6, 3),
    ],
)
def test_steps_are_counted_rather_than_batches(outcomes, name, steps, comparisons):
    for outcome in outcomes[name]:
        assert outcome.message is None
        assert (outcome.step, outcome.comparisons) == (steps, comparisons)


def test_a_step_that_one_rank_leaves_out_is_named(outcomes):
    for rank, outcome in enumerate(outcomes["step left out"]):
        assert outcome.step == (2 if rank == 1 else 3)
        assert "parameter `first.weight`, float32 [4, 5], of rank 1 is not that of" in outcome.message
