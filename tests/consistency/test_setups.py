"""Ranks with different modules or settings learn it before they train, with the value of each rank."""

import torch
import torch.distributed as dist
from torch import nn

from lightning_ddp_ext.consistency import compare_setups, describe_arguments, describe_module, describe_versions
from lightning_ddp_ext.errors import ReplicaMismatchError


class Network(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 2)


def network(change=lambda network: None):
    made = Network()
    change(made)
    return describe_module(made)


def tie(network):
    network.last.bias = nn.Parameter(torch.zeros(2))
    network.again = network.last


def hook(state, bucket):
    pass


def other_hook(state, bucket):
    pass


ARGUMENTS = {"bucket_cap_mb": 25, "hook": hook, "names": {"b", "a"}, "object": object(), "nothing": None}
OTHER_ARGUMENTS = {"bucket_cap_mb": 25.0, "hook": other_hook, "names": {"a"}, "object": object()}
# The description of most ranks, and of the odd rank.
SETUPS = {
    "equal modules": (network, network),
    "equal versions": (describe_versions, describe_versions),
    "equal arguments": (lambda: describe_arguments(ARGUMENTS), lambda: describe_arguments(dict(ARGUMENTS))),
    "width": (network, lambda: describe_module(Network(4))),
    "frozen": (network, lambda: network(lambda made: made.first.bias.requires_grad_(False))),
    "head": (network, lambda: network(lambda made: made.add_module("head", nn.Linear(1, 1, bias=False)))),
    "tied": (lambda: network(lambda made: made.add_module("again", nn.Linear(3, 2))), lambda: network(tie)),
    "order": (network, lambda: network(lambda made: made.add_module("first", made._modules.pop("first")))),
    "buffer": (network, lambda: network(lambda made: setattr(made.norm, "running_mean", torch.zeros(3).double()))),
    "versions": (describe_versions, lambda: {**describe_versions(), "version of torch": "2.11.0"}),
    "arguments": (lambda: describe_arguments(ARGUMENTS), lambda: describe_arguments(OTHER_ARGUMENTS)),
    "own": (lambda: {"seed": 1}, lambda: {"seed": 2}),
}


def compare_all(odd_rank):
    """Return the message of each comparison, None for equal setups."""
    messages = {}
    for name, descriptions in SETUPS.items():
        try:
            compare_setups(descriptions[dist.get_rank() == odd_rank]())
            messages[name] = None
        except ReplicaMismatchError as error:
            messages[name] = str(error)
    return messages


MODULE = "Build the same module on every rank, with the same parameters frozen."
PREFIX = "ranks are not set up alike: "


def test_modules_versions_and_arguments_that_differ_are_named_and_equal_ones_are_not(two):
    expected = {
        **dict.fromkeys(("equal modules", "equal versions", "equal arguments")),
        "frozen": f"parameter `first.bias` is float32 [3] trained on rank 0 but float32 [3] frozen on rank 1. {MODULE}",
        "head": f"parameter `head.weight` is missing on rank 0 but float32 [1, 1] trained on rank 1. {MODULE}",
        "order": "order of entries, of which number 0 is parameter `first.weight` on rank 0 but parameter"
        " `norm.weight` on rank 1. Create and register them in the same order on every rank.",
        "buffer": "buffer `norm.running_mean` is float32 [3] on rank 0 but float64 [3] on rank 1."
        " Build the same module on every rank, and change it in the same steps. Exclude a buffer that holds other"
        " values on each rank with `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`.",
        "versions": f"version of torch is {torch.__version__} on rank 0 but 2.11.0 on rank 1."
        " Use the same versions on every rank.",
        "arguments": "argument `bucket_cap_mb` is 25 on rank 0 but 25.0 on rank 1; argument `hook` is"
        f" {__name__}.hook on rank 0 but {__name__}.other_hook on rank 1; argument `names` is {{a, b}} on"
        " rank 0 but {a} on rank 1; and 1 more. Give the strategy the same arguments on every rank.",
        "own": "seed is 1 on rank 0 but 2 on rank 1. Make it equal on every rank.",
    }
    (_, found), (_, second) = two
    assert found == second
    assert {name: found[name] for name in expected} == {
        name: message and f"{PREFIX}{message}" for name, message in expected.items()
    }
    assert found.keys() - expected == {"width", "tied"}
    first = "parameter `first.weight` is float32 [3, 2] trained on rank 0 but float32 [4, 2] trained on rank 1; "
    assert found["width"].startswith(f"{PREFIX}{first}parameter `first.bias` is ")
    assert found["width"].endswith(f"; and 4 more. {MODULE}")
    tied = "parameter `again.weight` is float32 [2, 3] trained on rank 0 but float32 [2, 3] trained, the same as"
    assert tied in found["tied"]


def test_the_ranks_of_each_value_are_named(three):
    messages = [of_rank for _, of_rank in three]
    assert messages[0] == messages[1] == messages[2]
    named = "parameter `first.bias` is float32 [3] frozen on rank 0 but float32 [3] trained on ranks 1, 2."
    assert messages[0]["frozen"] == f"{PREFIX}{named} {MODULE}"
