"""The table of hooks on the page of `ddp_join`."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.strategies import shadow_hook_ranks as ranks
from tests.support.processes import run_processes

PAGE = (Path(__file__).parents[2] / "docs" / "ddp_join.md").read_text()
ROWS = re.findall(r"^\| (`on_before_batch_transfer`.*?|`\w+`.*?) \| (yes|\*\*no\*\*) \|", PAGE, re.MULTILINE)
PROMISED = {name: runs == "yes" for names, runs in ROWS for name in re.findall(r"`(\w+)`", names)}
EPOCH = ["on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_start", "on_validation_epoch_end"]
TRANSFER = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]


@pytest.fixture(scope="module")
def calls():
    return run_processes(ranks.fit_and_test, 2, timeout=120)


def counts(calls):
    return [Counter(name for name, *_ in of_rank) for of_rank in calls]


def test_the_page_names_every_hook_that_is_watched(calls):
    assert PROMISED.keys() | set(EPOCH) == counts(calls)[0].keys()


@pytest.mark.parametrize("hook", PROMISED)
def test_hooks_run_on_shadow_steps_as_the_page_says(calls, hook):
    active, joined = (count[hook] for count in counts(calls))
    assert active in (3, 9)  # batch transfers: training, validation and test
    assert joined == (active if PROMISED[hook] else 1)


def test_hooks_of_training_get_the_last_batch_and_outputs_with_a_loss_of_zero(calls):
    joined = calls[1]
    assert {batch for _, _, batch, _ in joined if batch is not None} == {10}
    outputs = [given for name, _, _, given in joined if name == "on_train_batch_end"]
    assert outputs[0]["loss"] > 0
    assert outputs[1:] == [{"loss": 0.0, "mark": 10.0}] * 2
    losses = [given for name, _, _, given in joined if name == "on_before_backward"]
    assert losses[0] > 0
    assert losses[1:] == [0.0, 0.0]


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"])
def test_hooks_find_the_gradient_of_all_ranks(calls, hook):
    active, joined = ([given for name, _, _, given in of_rank if name == hook] for of_rank in calls)
    assert active == joined
    assert all(active)


def test_shadow_steps_are_visible_but_before_the_transfer_and_in_epochs(calls):
    shadow_ranks = Counter(name for name, is_shadow, *_ in calls[1] if is_shadow)
    assert not set(shadow_ranks) & {"on_before_batch_transfer", *EPOCH}
    assert all(shadow_ranks[name] == 6 for name in TRANSFER[1:])
    assert (
        shadow_ranks["on_train_batch_start"]
        == shadow_ranks["optimizer_step"]
        == shadow_ranks["on_train_batch_end"]
        == 2
    )
    assert not any(is_shadow for _, is_shadow, *_ in calls[0])
