import copy
from collections import defaultdict

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
        self.scale = 1.0
        self.outputs = []
        self.calls = 0
        self.registry = {"layer": self.layer}


def mirror_of(module):
    replicas = Replicas(module, [CPU, CPU])
    replicas.refresh()
    return module, replicas, AttributeMirror(replicas)


@pytest.fixture
def mirrored():
    return mirror_of(Module())


def test_attributes_set_on_the_module_reach_every_replica(mirrored):
    module, replicas, mirror = mirrored
    module.scale = 3.0
    module.layer.note = "new"
    module.fresh = [1]
    del module.calls
    module.eval()
    mirror.push()
    assert not any(part.training for replica in replicas for part in replica.module.modules())
    for replica in replicas:
        assert replica.module.scale == 3.0
        assert replica.module.layer.note == "new"
        assert replica.module.fresh == [1]
        assert not hasattr(replica.module, "calls")


def test_containers_that_were_rewritten_follow_changes_in_place(mirrored):
    module, replicas, mirror = mirrored
    module.registry["again"] = module.layer
    mirror.push()
    assert replicas[1].module.registry["again"] is replicas[1].module.layer


@pytest.mark.parametrize("owner", [lambda module: module, lambda module: module.layer])
def test_appended_entries_come_back_in_the_order_of_the_replicas(mirrored, owner):
    module, replicas, mirror = mirrored
    owner(module).outputs = ["before"]
    mirror.push()
    owner(replicas[1].module).outputs.append("b")
    owner(replicas[0].module).outputs.append("a")
    assert owner(replicas[0].module).outputs == ["before", "a"]
    mirror.pull([0, 1], [2, 6])
    assert owner(module).outputs == ["before", "a", "b"]
    # Hooks that run in the backward pass still append to it.
    assert owner(replicas[0].module).outputs is owner(module).outputs
    mirror.push()
    assert owner(replicas[1].module).outputs == ["before", "a", "b"]


def test_counters_of_steps_come_back_and_counters_of_samples_are_added_up(mirrored):
    module, replicas, mirror = mirrored
    module.steps = 0
    for sizes, total in (([4, 4], 8), ([1, 1], 10), ([2, 6], 18)):
        mirror.push()
        for replica, size in zip(replicas, sizes, strict=True):
            replica.module.steps += 1
            replica.module.calls += size
        mirror.pull([0, 1], sizes)
        assert module.calls == total
    assert module.steps == 3


def test_values_that_disagree_stay_with_their_replicas_until_they_are_set_again(mirrored):
    module, replicas, mirror = mirrored
    for expect_warning in (True, False):
        mirror.push()
        for index, replica in enumerate(replicas):
            replica.module.scale = 10.0 + index + 5 * expect_warning
        if expect_warning:
            with pytest.warns(UserWarning, match=r"`self.scale` was set inside a step"):
                mirror.pull([0, 1], [2, 6])
        else:
            mirror.pull([0, 1], [2, 6])
    assert module.scale == 10.0  # the first replica's
    assert [replica.module.scale for replica in replicas] == [10.0, 11.0]
    mirror.push()
    assert replicas[1].module.scale == 11.0
    module.scale = None
    mirror.push()
    assert [replica.module.scale for replica in replicas] == [None, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: module.outputs.clear(), "`self.outputs` was changed inside a step other than by appending"),
        (lambda module: module.outputs.reverse(), "`self.outputs` was changed inside a step other than by appending"),
        (lambda module: setattr(module, "outputs", ["new"]), "`self.outputs` was set inside a step, to another list"),
        (lambda module: setattr(module, "features", torch.zeros(2)), "`self.features` was set inside a step"),
        (lambda module: setattr(module.layer, "attention", 1), "`self.layer.attention` was set inside a step"),
    ],
)
def test_a_change_that_has_no_single_meaning_is_warned_about(mirrored, change, message):
    module, replicas, mirror = mirrored
    module.outputs.extend(["one", "two"])
    mirror.push()
    change(replicas[0].module)
    with pytest.warns(UserWarning, match=message):
        mirror.pull([0, 1], [2, 6])
    assert module.outputs == ["one", "two"]


def test_hooks_registered_later_run_on_the_replica(mirrored):
    module, replicas, mirror = mirrored
    module.features = []
    module.layer.register_forward_hook(lambda layer, inputs, output: module.features.append(output))
    mirror.push()
    for replica in replicas:
        replica.module.layer(torch.ones(1, 2))
    assert module.features == []
    mirror.pull([0, 1], [1, 1])
    assert len(module.features) == 2


def test_tensors_that_were_changed_in_place_reach_other_devices():
    module = Module()
    module.table, module.other = torch.zeros(2), torch.zeros(2)
    replicas = Replicas(module, [CPU, torch.device("meta")])
    replicas.refresh()
    mirror = AttributeMirror(replicas)
    for _ in range(2):
        before = replicas[1].module.table, replicas[1].module.other
        module.table += 1
        mirror.push()
        assert replicas[1].module.table is not before[0]
        assert replicas[1].module.other is before[1]
        assert replicas[0].module.table is module.table
    before = replicas[1].module.table
    mirror.push()
    module.table += 1  # by the first replica's step, which has the same tensor
    mirror.pull([0, 1], [1, 1])
    mirror.push()
    assert replicas[1].module.table is before


def test_weights_that_hooks_compute_from_parameters_are_no_state():
    module = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 2)), nn.Linear(2, 2))
    nn.utils.prune.l1_unstructured(module[1], "weight", 0.5)
    _, replicas, mirror = mirror_of(module)
    mirror.push()
    for replica in replicas:
        replica.module(torch.randn(4, 3))
    mirror.pull([0, 1], [1, 3])  # without a warning
    assert torch.equal(module[1].weight, replicas[0].module[1].weight)


def test_a_list_that_leads_to_parts_of_the_module_is_not_taken_for_a_changed_one(recwarn):
    module = Module()
    module.parts = [module.layer, {"weight": module.layer.weight}]
    module, replicas, mirror = mirror_of(module)
    for _ in range(2):
        mirror.push()
        assert replicas[1].module.parts[0] is replicas[1].module.layer
        mirror.pull([0, 1], [2, 6])
    assert not recwarn.list


def test_a_tensor_that_every_replica_computes_alike_is_not_warned_about(mirrored, recwarn):
    module, replicas, mirror = mirrored
    mirror.push()
    for replica in replicas:
        replica.module.layer.normalised = replica.module.layer.weight / 2
    mirror.pull([0, 1], [2, 6])
    assert not recwarn.list
    assert torch.equal(module.layer.normalised, module.layer.weight / 2)


class Storing(nn.Module):
    """Stores outputs in dictionaries, one of which a hook holds without the module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        direct = self.direct = {}
        self.features = defaultdict(list, scale=2.0)
        self.layer.register_forward_hook(lambda layer, inputs, output: self.features.update(out=output))
        self.layer.register_forward_hook(lambda layer, inputs, output: direct.update(out=output))


def test_a_replica_reads_the_entries_that_it_has_stored_and_a_warning_names_the_dictionary_once(recwarn):
    module, replicas, mirror = mirror_of(Storing())
    for _ in range(2):
        mirror.push()
        outputs = [replica.module.layer(torch.rand(1, 2)) for replica in replicas]
        for replica, output in zip(replicas, outputs, strict=True):
            assert replica.module.features["out"] is replica.module.direct["out"] is output
        mirror.pull([0, 1], [1, 1])
    assert module.direct == {}
    assert module.features == {"scale": 2.0}
    messages = sorted(str(warning.message) for warning in recwarn.list)
    assert [message.split()[0] for message in messages] == ["`self.direct`", "`self.features`"]
    assert all("the copies are not merged" in message for message in messages)


@pytest.mark.parametrize(
    "write",
    [
        lambda module: module.features["new"].append(1),
        lambda module: module.features["known"].append(1),
        lambda module: module.features["nested"]["deep"].append(1),
        lambda module: module.features.update(scale=3.0),
        lambda module: module.features.pop("scale"),
    ],
)
def test_no_change_of_a_dictionary_is_lost_without_a_warning(write):
    module = Storing()
    module.features.update(known=[], nested={"deep": []})
    before = copy.deepcopy(module.features)
    module, replicas, mirror = mirror_of(module)
    mirror.push()
    write(replicas[1].module)
    with pytest.warns(UserWarning, match=r"`self.features` was changed inside a step, where"):
        mirror.pull([0, 1], [1, 1])
    assert module.features == before == replicas[0].module.features


def test_entries_stay_with_their_replica_until_the_dictionary_changes_on_the_module():
    module, replicas, mirror = mirror_of(Storing())

    def states():
        mirror.push()
        return [replica.module.features["state"] for replica in replicas]

    mirror.push()
    for index, replica in enumerate(replicas):
        replica.module.features["state"] = index
    with pytest.warns(UserWarning, match=r"`self.features` was changed inside a step"):
        mirror.pull([0, 1], [1, 1])
    assert states() == [0, 1]
    module.features["state"], module.other = 5, "also new"
    assert states() == [5, 5]
    module.features = {"state": [1]}
    assert states() == [[1], [1]]
    module.features["state"].append(2)
    assert states() == [[1, 2], [1, 2]]
    assert replicas[1].module.features["state"] is not module.features["state"]


def test_long_dictionaries_are_shared():
    module = nn.Module()
    module.table = dict.fromkeys(range(2_000))
    module, replicas, mirror = mirror_of(module)
    mirror.push()
    assert replicas[1].module.table is module.table


def test_a_hook_that_a_step_registers_runs_on_its_replica_alone():
    module, replicas, mirror = mirror_of(Module())
    mirror.push()
    called = []
    handle = replicas[0].module.layer.register_forward_hook(lambda *_: called.append(0))
    for replica in replicas:
        replica.module.layer(torch.ones(1, 2))
    module.layer(torch.ones(1, 2))
    assert called == [0]
    handle.remove()
    replicas[0].module.layer(torch.ones(1, 2))
    assert called == [0]
