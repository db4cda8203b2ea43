"""Dictionaries that a step writes to: each replica has its own, and what is written comes back."""

from collections import Counter, defaultdict

import pytest
import torch
from torch import nn

from lightning_ddp_ext.replicas.attributes import AttributeMirror
from lightning_ddp_ext.replicas.replica import Replicas

CPU = torch.device("cpu")


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.features = {}
        self.layer.register_forward_hook(lambda layer, inputs, output: self.features.update(out=output))
        self.outputs = defaultdict(list)
        self.labels = Counter(a=1)
        self.settings = {"scale": 2.0}
        direct = self.direct = {}
        self.layer.register_forward_hook(lambda layer, inputs, output: direct.update(out=output))


@pytest.fixture
def mirrored():
    module = Module()
    replicas = Replicas(module, [CPU, CPU])
    replicas.refresh()
    return module, replicas, AttributeMirror(replicas)


def step(mirrored, function, sizes=(2, 6)):
    """Run `function(module, index)` on each replica, as a step."""
    _, replicas, mirror = mirrored
    mirror.push()
    mirror.lend([0, 1])
    for index, replica in enumerate(replicas):
        function(replica.module, index)
    mirror.collect([0, 1], list(sizes))


def test_what_a_hook_stores_is_read_by_the_same_replica(mirrored):
    _, replicas, mirror = mirrored
    mirror.push()
    mirror.lend([0, 1])
    outputs = [replica.module.layer(torch.full((1, 2), float(index))) for index, replica in enumerate(replicas)]
    for replica, output in zip(replicas, outputs, strict=True):
        assert replica.module.features["out"] is output
        assert replica.module.direct["out"] is output  # the hook holds this one without the module


def test_of_different_values_the_first_is_seen_and_each_replica_keeps_its_own(mirrored):
    module, replicas, _ = mirrored
    with pytest.warns(UserWarning, match=r"`self.features` got entries inside a step, of a value of their own"):
        step(mirrored, lambda part, index: part.features.update(state=10.0 + index))
    seen = []
    step(mirrored, lambda part, index: seen.append(part.features["state"]))
    assert (module.features["state"], seen) == (10.0, [10.0, 11.0])
    module.features["state"] = 5.0
    step(mirrored, lambda part, index: seen.append(part.features["state"]))
    assert seen[2:] == [5.0, 5.0]
    assert replicas[0].module.features is not module.features


def test_entries_under_different_keys_all_come_back(mirrored, recwarn):
    module, _, _ = mirrored
    step(mirrored, lambda part, index: part.features.update({f"sample {index}": index}))
    assert module.features == {"sample 0": 0, "sample 1": 1}
    step(mirrored, lambda part, index: part.features.update(common=len(part.features)))
    assert module.features["common"] == 2
    assert not recwarn.list


def test_lists_under_a_key_are_extended_in_the_order_of_the_replicas(mirrored):
    module, replicas, _ = mirrored
    for _ in range(2):
        step(mirrored, lambda part, index: part.outputs["loss"].extend([index] * (index + 1)))
    assert module.outputs == {"loss": [0, 1, 1, 0, 1, 1]}
    module.outputs.clear()
    step(mirrored, lambda part, index: part.outputs["loss"].append(index))
    assert module.outputs == {"loss": [0, 1]}
    module.outputs["loss"].clear()
    step(mirrored, lambda part, index: part.outputs["loss"].append(index))
    assert module.outputs == {"loss": [0, 1]}
    assert replicas[1].module.outputs["new"] == []


def test_counts_are_added_up(mirrored):
    module, _, _ = mirrored
    for _ in range(2):
        step(mirrored, lambda part, index: part.labels.update("ab"[index] * (index + 1)))
    assert module.labels == {"a": 3, "b": 4}
    module.settings.update(steps=0, seen=0)
    for _ in range(2):
        step(mirrored, lambda part, index: part.settings.update(steps=part.settings["steps"] + 1))
        step(mirrored, lambda part, index: part.settings.update(seen=part.settings["seen"] + (2, 6)[index]))
    assert (module.settings["steps"], module.settings["seen"]) == (2, 16)


def test_changes_on_the_module_reach_every_replica(mirrored):
    module, replicas, _ = mirrored

    def settings():
        step(mirrored, lambda part, index: None)
        return [replica.module.settings for replica in replicas]

    module.settings["scale"] = 3.0
    assert settings() == [{"scale": 3.0}] * 2
    del module.settings["scale"]
    assert settings() == [{}] * 2
    module.settings = {"fresh": 1}
    assert settings() == [{"fresh": 1}] * 2


def test_entries_that_every_replica_removes_are_removed(mirrored):
    module, _, _ = mirrored
    step(mirrored, lambda part, index: part.settings.pop("scale"))
    assert module.settings == {}


def test_what_is_written_after_the_step_comes_back_too(mirrored):
    module, replicas, mirror = mirrored
    step(mirrored, lambda part, index: None)
    for replica in replicas:
        replica.module.features["gradient norm"] = 1.5
    mirror.collect_responses([0, 1], [2, 6])
    assert module.features == {"gradient norm": 1.5}


def test_a_dictionary_that_a_step_replaces_stays_with_its_replica(mirrored):
    module, replicas, _ = mirrored

    def replace(part, index):
        part.features = {"state": index}

    with pytest.warns(UserWarning, match=r"`self.features` was set inside a step"):
        step(mirrored, replace)
    module.temperature = 1.0  # another attribute changes
    step(mirrored, lambda part, index: None)
    assert [replica.module.features["state"] for replica in replicas] == [0, 1]


def test_long_dictionaries_are_shared():
    module = nn.Module()
    module.table = dict.fromkeys(range(2_000))
    replicas = Replicas(module, [CPU, CPU])
    replicas.refresh()
    mirror = AttributeMirror(replicas)
    mirror.lend([0, 1])
    assert replicas[1].module.table is module.table
