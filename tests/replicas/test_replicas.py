import functools
from collections import defaultdict, deque

import pytest
import torch
from torch import nn

from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.replicas.changed_attributes import AttributeMirror
from lightning_ddp_ext.replicas.replica import Replica, Replicas
from tests.support.devices import device, virtual_devices_lack

pytestmark = pytest.mark.usefixtures("tensors_on_device")


def replicate(module, count=2):
    replicas = Replicas(module, [device()] * count)
    replicas.refresh()
    return replicas


def apply(layer, inputs):
    return layer(inputs)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)
        self.tied = self.first
        self.register_buffer("count", torch.zeros(()))
        self.layers = [self.first, self.second]
        self.by_method = self.second.forward
        self.by_partial = functools.partial(self.second.forward)
        self.by_argument = functools.partial(apply, self.second)
        self.by_set = {self.second}
        self.by_frozen = frozenset({self.second})
        self.by_queue = deque([self.second], maxlen=3)
        self.by_table = defaultdict(list, layer=(self.second, [self.second]))
        self.data = tuple(range(5))

    def forward(self, inputs):
        return self.by_argument(self.tied(inputs)) + self.layers[1](self.first(inputs))


def test_replicas_compute_the_same_with_separate_parameters():
    net = Net()
    inputs = torch.randn(5, 3)
    for replica in replicate(net):
        assert torch.equal(replica.module(inputs), net(inputs))
        own = {id(p) for p in replica.module.parameters()}
        assert len(own) == 4
        assert not own & {id(p) for p in net.parameters()}


def test_parameters_on_the_same_device_alias_the_masters_storage():
    net = Net()
    replicas = replicate(net)
    replica = replicas[1]
    with torch.no_grad():
        net.first.weight.fill_(0.5)
    assert torch.equal(replica.module.first.weight, net.first.weight)
    net.first.weight.data = torch.full_like(net.first.weight, 2.0)  # ends the aliasing
    replicas.refresh()
    assert torch.equal(replica.module.first.weight, net.first.weight)


def test_references_outside_the_module_tree_lead_to_the_replica_and_data_is_shared():
    net = Net()
    replica = replicate(net)[1].module
    assert replica.tied is replica.first
    assert replica.layers == [replica.first, replica.second]
    assert replica.by_method.__self__ is replica.second
    assert replica.by_partial.func.__self__ is replica.second
    assert replica.by_argument.args == (replica.second,)
    assert replica.by_set == replica.by_frozen == {replica.second}
    assert (*replica.by_queue, replica.by_queue.maxlen) == (replica.second, 3)
    assert replica.by_table == {"layer": (replica.second, [replica.second])}
    assert replica.by_table["other"] == []
    assert replica.data is net.data


@pytest.mark.parametrize(
    "hide",
    [
        lambda net: setattr(net, "call", lambda inputs: net.second(inputs)),
        lambda net: setattr(net, "call", lambda inputs, layer=net.second: layer(inputs)),
        lambda net: setattr(net, "call", lambda inputs, *, layer=net.second: layer(inputs)),
        lambda net: setattr(net, "call", functools.partial(lambda inputs: net.second(inputs))),
        lambda net: setattr(net, "calls", {"layer": [lambda inputs: net.second.forward(inputs)]}),
        lambda net, outputs={}: setattr(net, "outputs", outputs) or hook(net, lambda *_: outputs.clear()),
        lambda net: hook(net, lambda *_: net.layers.clear()),
        lambda net: hook(net.first, nested(lambda: net)),
    ],
    ids=["closure", "default", "keyword", "partial", "containers", "dictionary", "hook", "nested"],
)
def test_functions_that_hold_parts_of_the_module_are_refused(hide):
    net = Net()
    replicas = replicate(net)
    mirror = AttributeMirror(replicas)
    hide(net)
    message = (
        r"`self\.(call|calls|_forward_hooks|first\._forward_hooks)` holds the function `.*<lambda>.*` \(.*"
        r"test_replicas\.py, line \d+\) with a part of the module"
    )
    with pytest.raises(UnsupportedFeatureError, match=message):
        AttributeMirror(replicate(net))
    with pytest.raises(UnsupportedFeatureError, match=message):
        mirror.push()


def hook(layer, function):
    layer.register_forward_hook(function)


def nested(find):
    return lambda layer, inputs, output: find().second(output)


def test_functions_that_hold_data_are_shared():
    net, losses = Net(), []
    net.scale = lambda inputs, by=3.0: losses.append(inputs) or by * inputs
    net.losses = losses
    assert replicate(net)[1].module.scale is net.scale


def test_gradients_are_added_to_the_masters_and_cleared():
    net = Net()
    replicas = replicate(net, 3)
    inputs = torch.randn(6, 3)
    for _ in range(2):
        for index, part in ((0, inputs[:2]), (2, inputs[2:])):
            replicas[index].module(part).sum().backward()
        replicas.reduce_gradients([0, 2])
        assert all(p.grad is None for replica in replicas for p in replica.module.parameters())
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    replicas[0].module.first(inputs).sum().backward()
    replicas.reduce_gradients([0, 1])
    assert [p.grad is None for p in net.parameters()] == [False, False, True, True]  # unused by the replicas
    net.zero_grad()
    (2 * net(inputs)).sum().backward()
    for gradient, parameter in zip(gradients, net.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_hooks_of_parameters_see_the_whole_gradient_once():
    net = nn.Linear(2, 1, bias=False)
    seen, accumulated = [], []
    net.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient.clamp(max=3.0))
    net.weight.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
    replicas = replicate(net)
    for replica in replicas:
        replica.module(torch.tensor([[1.0, 2.0]])).sum().backward()
    assert not seen
    replicas.reduce_gradients([0, 1])
    assert [g.tolist() for g in seen] == [[[2.0, 4.0]]]
    assert net.weight.grad.tolist() == [[2.0, 3.0]]
    assert [g.tolist() for g in accumulated] == [[[2.0, 3.0]]]


def test_gradients_that_come_from_other_devices_only_have_the_strides_of_their_parameters(monkeypatch):
    net = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    replicas = replicate(net)
    inputs = torch.randn(2, 3, 5, 5)
    replicas[1].module(inputs).sum().backward()

    def send_all(tensors, devices):
        return [[tensor.contiguous() for tensor in tensors] for _ in devices]

    monkeypatch.setattr("lightning_ddp_ext.replicas.replica.send_all", send_all)
    replicas.reduce_gradients([1])
    (expected,) = torch.autograd.grad(net(inputs).sum(), [net.weight])
    assert torch.equal(net.weight.grad, expected)
    assert net.weight.grad.stride() == net.weight.stride() == expected.stride()


def test_weights_of_recurrent_layers_on_other_devices_are_flattened_when_they_are_built_and_resized(monkeypatch):
    flattened = []
    net = nn.Sequential(nn.LSTM(2, 3))
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda self: flattened.append(self))
    replicas = Replicas(net, [device(), torch.device("meta")])
    for _ in range(2):
        replicas.refresh()
    assert flattened == [replicas[1].module[0]]
    net.half()
    replicas.refresh()
    assert flattened == [replicas[1].module[0], net[0], replicas[1].module[0]]  # `half` itself flattens the module's


@virtual_devices_lack("sparse tensors")
def test_sparse_gradients_are_added():
    net = nn.Embedding(5, 2, sparse=True)
    replicas = replicate(net)
    for replica, index in zip(replicas, (1, 3), strict=True):
        replica.module(torch.tensor([index])).sum().backward()
    replicas.reduce_gradients([0, 1])
    assert net.weight.grad.is_sparse
    assert net.weight.grad.to_dense().sum(1).tolist() == [0, 2, 0, 2, 0]


def test_parameters_are_sent_in_the_first_batch_of_an_evaluation_and_after_changes(monkeypatch):
    net = nn.Linear(2, 1, bias=False)
    replicas = replicate(net)
    sent, original = [], Replica.receive_parameters
    monkeypatch.setattr(Replica, "receive_parameters", lambda *args: sent.append(1) or original(*args))

    def count(step):
        sent.clear()
        replicas.refresh(step)
        return len(sent)

    assert [count(step) for step in ("training_step", "training_step", "test_step", "test_step")] == [2, 2, 2, 0]
    with torch.no_grad():
        net.weight.add_(1)
    assert count("test_step") == 2
    net.weight.data = torch.ones(1, 2)
    assert count("test_step") == 2
    assert replicas[1].module.weight.tolist() == [[1, 1]]
    assert [count(step) for step in ("test_step", "predict_step", "training_step")] == [0, 2, 2]


class CompiledFunction(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.call = torch.compile(super().forward, backend="eager")

    def forward(self, inputs):
        return self.call(inputs)


@pytest.mark.parametrize(
    "build",
    [lambda: nn.LSTM(3, 4), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), CompiledFunction],
    ids=["recurrent", "parametrized", "compiled function"],
)
def test_parts_that_refer_to_parameters_in_other_ways_use_the_replicas(build):
    net = build()
    replica = replicate(net)[1].module
    inputs = torch.randn(4, 3)
    output, expected = replica(inputs), net(inputs)
    torch.testing.assert_close(output, expected)
    (output[0] if isinstance(output, tuple) else output).sum().backward()
    assert all(p.grad is not None for p in replica.parameters())
    assert all(p.grad is None for p in net.parameters())
    torch._dynamo.reset()


def test_a_step_may_freeze_parameters_but_not_change_them_in_place():
    net = Net()
    replicas = replicate(net)
    replicas[0].module.first.requires_grad_(False)
    with pytest.raises(
        UnsupportedFeatureError, match=r"has frozen the parameter `first\.weight` on some replicas only"
    ):
        replicas.adopt_requires_grad([0, 1], "training_step")
    assert net.first.weight.requires_grad
    replicas[1].module.first.requires_grad_(False)
    replicas.adopt_requires_grad([0, 1], "training_step")
    assert not net.first.weight.requires_grad
    with (
        pytest.raises(UnsupportedFeatureError, match=r"parameter `second\.weight` was changed in place inside"),
        replicas.refuse_changed_parameters([0, 1], "training_step"),
        torch.no_grad(),
    ):
        replicas[1].module.second.weight.mul_(0.5)


def test_changes_through_data_are_noticed_in_the_first_training_steps():
    def decay_in_place(weight):
        weight.data.mul_(0.5)

    def decay(weight):
        weight.data = weight.data * 0.5

    for change in (decay_in_place, decay):
        replicas = replicate(Net())
        for _ in range(2):
            with replicas.refuse_changed_parameters([0, 1], "training_step"):
                pass
            replicas.refresh()
        with (
            pytest.raises(
                UnsupportedFeatureError, match=r"a parameter was changed through `\.data` inside `training_step`"
            ),
            replicas.refuse_changed_parameters([0, 1], "training_step"),
        ):
            change(replicas[1].module.second.weight)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_lazy_and_torchscript_modules_are_refused():
    with pytest.raises(UnsupportedFeatureError, match="parameter `weight` is not initialised yet"):
        replicate(nn.LazyLinear(3))
    with pytest.raises(UnsupportedFeatureError, match="module `0` is a TorchScript module"):
        replicate(nn.Sequential(torch.jit.script(nn.Linear(1, 1))))
