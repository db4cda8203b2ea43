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


@pytest.fixture
def mirrored():
    module = Module()
    replicas = Replicas(module, [CPU, CPU])
    replicas.refresh()
    return module, replicas, AttributeMirror(replicas)


def test_attributes_set_on_the_module_reach_every_replica(mirrored):
    module, replicas, mirror = mirrored
    module.scale = 3.0
    module.layer.note = "new"
    module.fresh = [1]
    del module.calls
    mirror.push()
    for replica in replicas:
        assert replica.module.scale == 3.0
        assert replica.module.layer.note == "new"
        assert replica.module.fresh == [1]
        assert not hasattr(replica.module, "calls")


def test_modes_reach_every_replica(mirrored):
    module, replicas, mirror = mirrored
    module.eval()
    mirror.push()
    assert not any(part.training for replica in replicas for part in replica.module.modules())


def test_containers_that_were_rewritten_follow_changes_in_place(mirrored):
    module, replicas, mirror = mirrored
    module.registry["again"] = module.layer
    mirror.push()
    assert replicas[1].module.registry["again"] is replicas[1].module.layer


def test_appended_entries_come_back_in_the_order_of_the_replicas(mirrored):
    module, replicas, mirror = mirrored
    module.outputs.append("before")
    mirror.push()
    mirror.lend([0, 1])
    replicas[1].module.outputs.append("b")
    replicas[0].module.outputs.append("a")
    assert replicas[0].module.outputs == ["before", "a"]
    mirror.collect([0, 1], [2, 6])
    assert module.outputs == ["before", "a", "b"]
    mirror.lend([0, 1])
    assert replicas[1].module.outputs == ["before", "a", "b"]


def test_a_counter_that_every_replica_advances_comes_back(mirrored):
    module, replicas, mirror = mirrored
    mirror.lend([0, 1])
    for replica in replicas:
        replica.module.calls += 1
    mirror.collect([0, 1], [2, 6])
    assert module.calls == 1


def test_values_that_disagree_stay_with_their_replicas_until_they_are_set_again(mirrored):
    module, replicas, mirror = mirrored
    for expect_warning in (True, False):
        mirror.lend([0, 1])
        for index, replica in enumerate(replicas):
            replica.module.scale = 10.0 + index + 5 * expect_warning
        if expect_warning:
            with pytest.warns(UserWarning, match=r"`self.scale` was set inside a step"):
                mirror.collect([0, 1], [2, 6])
        else:
            mirror.collect([0, 1], [2, 6])
    assert module.scale == 10.0  # the first replica's
    assert [replica.module.scale for replica in replicas] == [10.0, 11.0]
    mirror.push()
    assert replicas[1].module.scale == 11.0
    module.scale = None
    mirror.push()
    assert [replica.module.scale for replica in replicas] == [None, None]


def test_a_new_attribute_of_a_step_is_warned_about(mirrored):
    _, replicas, mirror = mirrored
    mirror.lend([0])
    replicas[0].module.features = torch.zeros(2)
    with pytest.warns(UserWarning, match=r"`self.features` was set inside a step"):
        mirror.collect([0], [4])


def test_counters_of_samples_are_added_up(mirrored):
    module, replicas, mirror = mirrored
    for sizes, total in (([4, 4], 8), ([1, 1], 10)):
        mirror.push()
        mirror.lend([0, 1])
        for replica, size in zip(replicas, sizes, strict=True):
            replica.module.calls += size
        mirror.collect([0, 1], sizes)
        assert module.calls == total


def test_what_a_step_sets_on_a_submodule_is_warned_about(mirrored):
    _, replicas, mirror = mirrored
    mirror.lend([0, 1])
    replicas[1].module.layer.attention = torch.zeros(2)
    with pytest.warns(UserWarning, match=r"`self.layer.attention` was set inside a step"):
        mirror.collect([0, 1], [2, 6])


def test_lists_of_submodules_are_collected_in_order(mirrored):
    module, replicas, mirror = mirrored
    module.layer.seen = []
    mirror.push()
    mirror.lend([0, 1])
    replicas[1].module.layer.seen.append("b")
    replicas[0].module.layer.seen.append("a")
    mirror.collect([0, 1], [2, 6])
    assert module.layer.seen == ["a", "b"]
    assert replicas[0].module.layer.seen is module.layer.seen


@pytest.mark.parametrize("change", [lambda items: items.clear(), lambda items: items.__setitem__(0, "other")])
def test_a_list_that_is_changed_in_another_way_is_warned_about(mirrored, change):
    module, replicas, mirror = mirrored
    module.outputs.extend(["one", "two"])
    mirror.push()
    mirror.lend([0, 1])
    change(replicas[0].module.outputs)
    with pytest.warns(UserWarning, match=r"`self.outputs` was changed inside a step other than by appending"):
        mirror.collect([0, 1], [2, 6])
    assert module.outputs == ["one", "two"]


def test_a_list_that_is_replaced_is_warned_about(mirrored):
    module, replicas, mirror = mirrored
    mirror.lend([0, 1])
    replicas[0].module.outputs = ["new"]
    with pytest.warns(UserWarning, match=r"`self.outputs` was set inside a step to a list of its own"):
        mirror.collect([0, 1], [2, 6])
    assert module.outputs == []


def test_hooks_registered_later_run_on_the_replica(mirrored):
    module, replicas, mirror = mirrored
    module.features = []
    module.layer.register_forward_hook(lambda layer, inputs, output: module.features.append(output))
    mirror.push()
    mirror.lend([0, 1])
    for replica in replicas:
        replica.module.layer(torch.ones(1, 2))
    assert module.features == []
    mirror.collect([0, 1], [1, 1])
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
    mirror.lend([0, 1])
    module.table += 1  # by the first replica's step, which has the same tensor
    mirror.collect([0, 1], [1, 1])
    mirror.push()
    assert replicas[1].module.table is before


def test_weights_that_hooks_compute_from_parameters_are_no_state():
    module = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 2)), nn.Linear(2, 2))
    nn.utils.prune.l1_unstructured(module[1], "weight", 0.5)
    replicas = Replicas(module, [CPU, CPU])
    replicas.refresh()
    mirror = AttributeMirror(replicas)
    mirror.push()
    mirror.lend([0, 1])
    for replica in replicas:
        replica.module(torch.randn(4, 3))
    mirror.collect([0, 1], [1, 3])  # without a warning
    assert torch.equal(module[1].weight, replicas[0].module[1].weight)


def test_a_list_that_leads_to_parts_of_the_module_is_not_taken_for_a_changed_one(recwarn):
    module = Module()
    module.parts = [module.layer, {"weight": module.layer.weight}]
    replicas = Replicas(module, [CPU, CPU])
    replicas.refresh()
    mirror = AttributeMirror(replicas)
    for _ in range(2):
        mirror.push()
        mirror.lend([0, 1])
        assert replicas[1].module.parts[0] is replicas[1].module.layer
        mirror.collect([0, 1], [2, 6])
    assert not recwarn.list


def test_a_tensor_that_every_replica_computes_alike_is_not_warned_about(mirrored, recwarn):
    module, replicas, mirror = mirrored
    mirror.lend([0, 1])
    for replica in replicas:
        replica.module.layer.normalised = replica.module.layer.weight / 2
    mirror.collect([0, 1], [2, 6])
    assert not recwarn.list
    assert torch.equal(module.layer.normalised, module.layer.weight / 2)
