"""Ranks that are not set up alike learn it before they train, with what each of them has."""

import pytest
import torch

from . import comparing_setups as setups

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def two(two_compared):
    return [compared.setups for compared in two_compared]


@pytest.fixture
def three(three_compared):
    return [compared.setups for compared in three_compared]


def test_equal_setups_are_silent(two, three):
    for messages in [*two, *three]:
        assert [name for name, message in messages.items() if message is None] == [
            "equal modules",
            "equal versions",
            "equal arguments",
        ]


def test_all_ranks_tell_the_same(two, three):
    assert two[0] == two[1]
    assert three[0] == three[1] == three[2]


MODULE = "Build the same module on every rank, with the same parameters frozen."
PREFIX = "ranks are not set up alike: "


def test_what_differs_in_the_module_is_named(two, three):
    assert two[0]["frozen"] == (
        f"{PREFIX}parameter `first.bias` is float32 [3] trained on rank 0 but float32 [3] frozen on rank 1. {MODULE}"
    )
    assert three[0]["frozen"] == (
        f"{PREFIX}parameter `first.bias` is float32 [3] frozen on rank 0 but float32 [3] trained on ranks 1, 2."
        f" {MODULE}"
    )
    assert two[0]["width"].startswith(
        f"{PREFIX}parameter `first.weight` is float32 [3, 2] trained on rank 0 but float32 [4, 2] trained on rank 1; "
        "parameter `first.bias` is "
    )
    assert two[0]["width"].endswith(f"; and 4 more. {MODULE}")
    assert two[0]["head"] == (
        f"{PREFIX}parameter `head.weight` is missing on rank 0 but float32 [1, 1] trained on rank 1. {MODULE}"
    )
    assert (
        "parameter `again.weight` is float32 [2, 3] trained on rank 0 but float32 [2, 3] trained, the same as"
        in (two[0]["tied"])
    )
    assert two[0]["order"] == (
        f"{PREFIX}order of entries, of which number 0 is parameter `first.weight` on rank 0 but parameter `norm.weight`"
        " on rank 1. Create and register them in the same order on every rank."
    )
    assert two[0]["buffer"] == (
        f"{PREFIX}buffer `norm.running_mean` is float32 [3] on rank 0 but float64 [3] on rank 1."
        " Build the same module on every rank, and change it in the same steps. Exclude a buffer that holds other"
        " values on each rank with `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`."
    )


def test_versions_and_arguments_are_named(two):
    torch_version = f"version of torch is {torch.__version__} on rank 0 but 2.11.0 on rank 1"
    assert two[0]["versions"] == f"{PREFIX}{torch_version}. Install the same versions on every host."
    assert two[0]["arguments"] == (
        f"{PREFIX}argument `bucket_cap_mb` is 25 on rank 0 but 25.0 on rank 1; argument `hook` is"
        f" {setups.__name__}.hook on rank 0 but {setups.__name__}.other_hook on rank 1; argument `names` is {{a, b}} on"
        " rank 0 but {a} on rank 1; and 1 more. Give the strategy the same arguments on every rank."
    )
    assert two[0]["own"] == f"{PREFIX}seed is 1 on rank 0 but 2 on rank 1. Make it equal on every rank."
