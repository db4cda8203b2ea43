import copy
from collections import defaultdict, deque
from functools import partial

import pytest
import torch
from torch import nn

from lightning_ddp_ext.replicas.changed_attributes import AttributeMirror
from lightning_ddp_ext.replicas.replica import Replicas
from tests.support.devices import device

pytestmark = pytest.mark.usefixtures("tensors_on_device")


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = 1.0
        self.outputs = []
        self.calls = 0
        self.registry = {"layer": self.layer}


class Mirrored:
    """A module, its replicas and their attribute mirror."""

    def __init__(self, module=None, *devices):
        self.module = Module() if module is None else module
        self.replicas = Replicas(self.module, devices or [device()] * 2)
        self.replicas.refresh()
        self.mirror = AttributeMirror(self.replicas)
        self.push = self.mirror.push

    @property
    def copies(self):
        return [replica.module for replica in self.replicas]

    def step(self, *changes, sizes=(2, 6)):
        """Push, apply one change to each replica, or the same to all, and pull."""
        self.push()
        for own, change in zip(self.copies, changes * (2 // len(changes)), strict=True):
            change(own)
        self.mirror.pull([0, 1], sizes)


def test_attributes_set_on_the_module_reach_every_replica():
    mirrored = Mirrored()
    module = mirrored.module
    module.scale = 3.0
    module.layer.note = "new"
    module.fresh = [1]
    del module.calls
    module.eval()
    module.registry["again"] = module.layer  # a dictionary that leads to parts of the module
    mirrored.push()
    for own in mirrored.copies:
        assert not any(part.training for part in own.modules())
        assert (own.scale, own.layer.note, own.fresh) == (3.0, "new", [1])
        assert not hasattr(own, "calls")
        assert own.registry["again"] is own.layer


def test_an_attribute_under_another_name_with_the_same_value_reaches_every_replica_and_comes_back():
    mirrored = Mirrored()
    module = mirrored.module
    module.warmup = True
    mirrored.push()

    def rename(before, after):
        def change(own):
            delattr(own, before)
            setattr(own, after, True)

        return change

    rename("warmup", "main")(module)
    mirrored.push()
    assert all(own.main and not hasattr(own, "warmup") for own in mirrored.copies)
    with pytest.warns(UserWarning, match=r"`self\.main` was changed inside a step"):  # a deletion is not merged
        mirrored.step(rename("main", "last"))
    assert module.last


def test_changes_of_deques_and_sets_end_with_the_step_and_are_warned_about(recwarn):
    module = Module()
    module.order, module.seen = deque([module.layer, 1], 2), {"a"}
    mirrored = Mirrored(module)

    def step(own):
        assert own.order[0] is own.layer
        assert own.order.maxlen == 2
        own.order.rotate()
        own.seen.add("b")

    for _ in range(2):
        mirrored.step(step)
    assert sorted(str(warning.message).split()[0] for warning in recwarn.list) == ["`self.order`", "`self.seen`"]
    assert module.order[0] is module.layer
    assert module.seen == {"a"}
    module.order.rotate()
    mirrored.push()
    assert all(own.order[1] is own.layer for own in mirrored.copies)


@pytest.mark.parametrize("owner", [lambda module: module, lambda module: module.layer])
def test_appended_entries_come_back_in_the_order_of_the_replicas(owner):
    mirrored = Mirrored()
    owner(mirrored.module).outputs = ["before"]
    mirrored.push()
    first, second = map(owner, mirrored.copies)
    second.outputs.append("b")
    first.outputs.append("a")
    assert first.outputs == ["before", "a"]
    mirrored.mirror.pull([0, 1], [2, 6])
    assert owner(mirrored.module).outputs == ["before", "a", "b"]
    assert first.outputs is owner(mirrored.module).outputs  # hooks in the backward pass still append to it


def test_counters_of_steps_come_back_and_a_counter_of_samples_is_warned_about():
    def count(size):
        def step(own):
            own.calls += size

        return step

    for sizes in ([2, 6], [4, 4]):
        mirrored = Mirrored()
        with pytest.warns(UserWarning, match="`self.calls` was changed inside a step by each replica"):
            mirrored.step(*map(count, sizes), sizes=sizes)
        assert mirrored.module.calls == sizes[0]


def test_numbers_and_texts_that_do_not_depend_on_the_chunk_come_back(recwarn):
    mirrored = Mirrored()

    def step(own):
        own.calls += 1
        own.phase = "warm"
        own.layer.scale = 0.5 * own.calls

    for sizes in ([1, 1], [4, 4], [2, 6]):
        mirrored.step(step, sizes=sizes)
    module = mirrored.module
    assert (module.calls, module.phase, module.layer.scale) == (3, "warm", 1.5)
    assert not recwarn.list


def test_values_that_disagree_stay_with_their_replicas_until_they_are_set_again(recwarn):
    mirrored = Mirrored()
    for first in (15.0, 10.0):
        mirrored.step(lambda own, v=first: setattr(own, "scale", v), lambda own, v=first: setattr(own, "scale", v + 1))
    (warning,) = recwarn.list
    assert str(warning.message).startswith("`self.scale` was changed inside a step")
    assert mirrored.module.scale == 10.0  # the first replica's
    mirrored.push()
    assert [own.scale for own in mirrored.copies] == [10.0, 11.0]
    mirrored.module.scale = None
    mirrored.push()
    assert [own.scale for own in mirrored.copies] == [None, None]


def test_an_attribute_that_only_the_last_replica_has_made_does_not_disturb_later_steps():
    mirrored = Mirrored()
    mirrored.push()
    mirrored.copies[1].state = 5
    mirrored.copies[1].found = [1]
    mirrored.copies[1].table = {"a": 1}
    with pytest.warns(UserWarning, match=r"`self.(found|table)` was changed inside a step"):
        mirrored.mirror.pull([1], [8])
    mirrored.module.scale = 2.0
    mirrored.step(lambda own: None)
    assert (mirrored.module.state, mirrored.module.found, mirrored.module.table) == (5, [1], {"a": 1})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("outputs", lambda module: module.outputs.clear()),
        ("outputs", lambda module: module.outputs.reverse()),
        ("outputs", lambda module: setattr(module, "outputs", ["new"])),
        ("features", lambda module: setattr(module, "features", torch.zeros(2))),
        ("layer.attention", lambda module: setattr(module.layer, "attention", 1)),
    ],
)
def test_a_change_of_one_replica_that_does_not_come_back_is_warned_about_once(name, change):
    mirrored = Mirrored()
    mirrored.module.outputs.extend(["one", "two"])
    with pytest.warns(UserWarning, match=f"`self.{name}` was changed inside a step by each replica"):
        mirrored.step(change, lambda own: None)
    mirrored.step(change, lambda own: None)  # a second warning would be an error
    assert mirrored.module.outputs == mirrored.copies[0].outputs


def test_a_list_that_each_replica_sets_stays_with_it_until_a_hook_sets_it():
    mirrored = Mirrored()
    with pytest.warns(UserWarning, match="`self.outputs` was changed"):
        mirrored.step(lambda own: setattr(own, "outputs", ["a"]), lambda own: setattr(own, "outputs", ["b"]))
    mirrored.module.scale = 2.0
    mirrored.push()
    assert [own.outputs for own in mirrored.copies] == [["a"], ["b"]]
    mirrored.module.outputs = []
    mirrored.step(lambda own: own.outputs.append(own.scale))
    assert mirrored.module.outputs == [2.0, 2.0]


def test_hooks_registered_on_the_module_run_on_every_replica_and_hooks_of_a_step_on_their_replica_alone():
    mirrored = Mirrored()
    module, called = mirrored.module, []
    module.features = []

    def store(owner, layer, inputs, output):
        owner.features.append(output)

    module.layer.register_forward_hook(partial(store, module))
    mirrored.push()
    mirrored.copies[0].layer.register_forward_hook(lambda *_: called.append(0))
    for own in mirrored.copies:
        own.layer(torch.ones(1, 2))
    assert module.features == []
    mirrored.mirror.pull([0, 1], [1, 1])
    assert len(module.features) == 2
    module.layer(torch.ones(1, 2))
    assert called == [0]


def test_tensors_that_were_changed_in_place_reach_other_devices():
    module = Module()
    module.table, module.other = torch.zeros(2), torch.zeros(2)
    mirrored = Mirrored(module, device(), torch.device("meta"))
    first, second = mirrored.copies
    for _ in range(2):
        before = second.table, second.other
        module.table += 1
        mirrored.push()
        assert second.table is not before[0]
        assert second.other is before[1]
        assert first.table is module.table
    before = second.table
    mirrored.push()
    module.table += 1  # by the first replica's step, which has the same tensor
    mirrored.mirror.pull([0, 1], [1, 1])
    mirrored.push()
    assert second.table is before


def test_tensors_in_containers_and_arguments_reach_other_devices():
    module, tensor = Module(), torch.ones(2)
    module.layer._masks, module.layer.table = [tensor], {"mask": (tensor,)}
    module.scaled = partial(torch.mul, tensor, out=[tensor])
    first, second = Mirrored(module, device(), torch.device("meta")).copies
    for own, expected in ((first, device()), (second, torch.device("meta"))):
        found = [*own.layer._masks, *own.layer.table["mask"], *own.scaled.args, *own.scaled.keywords["out"]]
        assert [one.device for one in found] == [expected] * 4


def test_tensors_that_hooks_or_replicas_compute_alike_cause_no_warning(recwarn):
    module = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 2)), nn.Linear(2, 2))
    nn.utils.prune.l1_unstructured(module[1], "weight", 0.5)
    mirrored = Mirrored(module)

    def step(own):
        own(torch.randn(4, 3))
        own[1].normalised = own[1].weight_orig / 2

    mirrored.step(step)
    assert torch.equal(module[1].weight, mirrored.copies[0][1].weight)
    assert torch.equal(module[1].normalised, module[1].weight_orig / 2)
    assert not recwarn.list


def test_a_list_that_leads_to_parts_of_the_module_is_not_taken_for_a_changed_one(recwarn):
    module = Module()
    module.parts = [module.layer, {"weight": module.layer.weight}]
    mirrored = Mirrored(module)
    for _ in range(2):
        mirrored.step(lambda own: None)
        assert mirrored.copies[1].parts[0] is mirrored.copies[1].layer
    assert not recwarn.list


class Storing(nn.Module):
    """Stores outputs in dictionaries, one of which a hook gets as an argument."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.direct = {}
        self.features = defaultdict(list, scale=2.0, known=[], nested={"deep": [{"deeper": []}]})
        self.layer.register_forward_hook(self.store)
        self.layer.register_forward_hook(partial(store_in, self.direct))

    def store(self, layer, inputs, output):
        self.features.update(out=output)


def store_in(features, layer, inputs, output):
    features.update(out=output)


def test_a_replica_reads_its_own_entries_until_the_step_ends_and_a_warning_names_the_dictionary_once(recwarn):
    mirrored = Mirrored(Storing())
    module = mirrored.module

    def step(own):
        assert "out" not in own.features
        output = own.layer(torch.rand(1, 2))
        assert own.features["out"] is own.direct["out"] is output

    for _ in range(2):
        mirrored.step(step)
    assert (module.direct, len(module.features)) == ({}, 3)
    messages = sorted(str(warning.message) for warning in recwarn.list)
    assert [message.split()[0] for message in messages] == ["`self.direct`", "`self.features`"]
    module.features["known"].append(1)
    module.direct = {"state": [1]}
    mirrored.push()
    assert all((own.features["known"], own.direct) == ([1], {"state": [1]}) for own in mirrored.copies)
    assert mirrored.copies[0].direct["state"] is not module.direct["state"]


def test_containers_that_are_no_attributes_are_shared_by_partial_functions():
    module, held = Module(), {"list": [], "dictionary": {}}
    module.layer.register_forward_hook(partial(store_all, held["list"], features=held["dictionary"]))
    mirrored = Mirrored(module)
    mirrored.step(lambda own: own.layer(torch.ones(1, 2)))
    assert (len(held["list"]), len(held["dictionary"])) == (2, 1)


def store_all(outputs, layer, inputs, output, features):
    outputs.append(output)
    features.update(out=output)


def test_a_list_in_a_hook_and_in_an_attribute_gets_the_items_of_all_replicas(recwarn):
    module = Module()
    module.layer.register_forward_hook(partial(store_all, module.outputs, features={}))
    Mirrored(module).step(lambda own: (own.layer(torch.ones(1, 2)), own.outputs.append("end")))
    assert sorted(map(str, module.outputs[2:])) == ["end", "end"]
    assert len(module.outputs) == 4
    assert not recwarn.list


def test_a_container_in_two_places_or_in_itself_has_one_copy():
    module = Module()
    module.first = module.layer.second = {"layer": module.layer}
    module.first["self"] = module.first
    own = Mirrored(module).copies[1]
    assert own.first is own.layer.second is own.first["self"]
    assert own.first["layer"] is own.layer


def test_a_number_set_on_the_only_active_replica_reaches_the_others_beside_a_value_that_stays():
    mirrored = Mirrored()
    mirrored.push()
    mirrored.copies[0].calls, mirrored.copies[0].state = 5, torch.ones(1)
    with pytest.warns(UserWarning, match="`self.state` was changed inside a step"):
        mirrored.mirror.pull([0], [2])
    mirrored.push()
    assert [own.calls for own in mirrored.copies] == [5, 5]


def test_no_change_of_a_dictionary_is_lost_without_a_warning():
    for write in (
        lambda module: module.features["known"].append(1),
        lambda module: module.features["nested"]["deep"][0]["deeper"].append(1),
        lambda module: module.features.update(scale=3.0),
        lambda module: module.features.pop("scale"),
    ):
        module = Storing()
        before = copy.deepcopy(module.features)
        with pytest.warns(UserWarning, match=r"`self.features` was changed inside a step"):
            Mirrored(module).step(lambda own: None, write)
        assert module.features == before


def test_long_dictionaries_are_shared():
    module = nn.Module()
    module.table = dict.fromkeys(range(2_000))
    module.nested = {number: [*range(100)] for number in range(11)}
    module.layers = {**module.nested, "layer": module}
    mirrored = Mirrored(module)
    mirrored.push()
    own = mirrored.copies[1]
    assert own.table is module.table
    assert own.nested is module.nested
    assert own.layers["layer"] is own
