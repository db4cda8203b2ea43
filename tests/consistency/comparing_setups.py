"""How ranks may be set up, alike and not; imported by `comparing_ranks`, which see."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from lightning_ddp_ext.consistency.setups import (
    compare_setups,
    describe_arguments,
    describe_module,
    describe_versions,
)
from lightning_ddp_ext.errors import ReplicaMismatchError


class Network(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 2)


def wider() -> Mapping[str, object]:
    return describe_module(Network(4))


def frozen() -> Mapping[str, object]:
    network = Network()
    network.first.bias.requires_grad_(False)
    return describe_module(network)


def with_another_head() -> Mapping[str, object]:
    network = Network()
    network.head = nn.Linear(1, 1, bias=False)
    return describe_module(network)


def tied() -> Mapping[str, object]:
    network = Network()
    network.last.bias = nn.Parameter(torch.zeros(2))
    network.again = network.last
    return describe_module(network)


def untied() -> Mapping[str, object]:
    network = Network()
    network.again = nn.Linear(3, 2)
    return describe_module(network)


def in_another_order() -> Mapping[str, object]:
    network = Network()
    network.first = network._modules.pop("first")
    return describe_module(network)


def with_a_double_buffer() -> Mapping[str, object]:
    network = Network()
    network.norm.running_mean = network.norm.running_mean.double()
    return describe_module(network)


def network() -> Mapping[str, object]:
    return describe_module(Network())


def versions() -> Mapping[str, object]:
    return describe_versions()


def other_versions() -> Mapping[str, object]:
    return {**describe_versions(), "version of torch": "2.11.0"}


def hook(state: object, bucket: object) -> None:
    pass


def other_hook(state: object, bucket: object) -> None:
    pass


def arguments() -> Mapping[str, object]:
    given = {"bucket_cap_mb": 25, "hook": hook, "names": {"b", "a"}, "object": object(), "nothing": None}
    return describe_arguments(given)


def other_arguments() -> Mapping[str, object]:
    return describe_arguments({"bucket_cap_mb": 25.0, "hook": other_hook, "names": {"a"}, "object": object()})


SETUPS: dict[str, tuple[Callable[[], Mapping[str, object]], Callable[[], Mapping[str, object]]]] = {
    "equal modules": (network, network),
    "equal versions": (versions, versions),
    "equal arguments": (arguments, arguments),
    "width": (network, wider),
    "frozen": (network, frozen),
    "head": (network, with_another_head),
    "tied": (untied, tied),
    "order": (network, in_another_order),
    "buffer": (network, with_a_double_buffer),
    "versions": (versions, other_versions),
    "arguments": (arguments, other_arguments),
    "own": (lambda: {"seed": 1}, lambda: {"seed": 2}),
}


def compare_all_setups(changed_rank: int) -> dict[str, str | None]:
    """Return the message of each comparison, None where there is nothing to tell."""
    messages: dict[str, str | None] = {}
    for name, (usual, other) in SETUPS.items():
        description = (other if dist.get_rank() == changed_rank else usual)()
        try:
            compare_setups(description)
            messages[name] = None
        except ReplicaMismatchError as error:
            messages[name] = str(error)
    return messages
