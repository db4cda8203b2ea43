"""What a step has changed, found on one rank and taken over on another; two modules of one process stand for ranks."""

import copy
import warnings
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric

from lightning_ddp_ext.distributed.serialization import unpack
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.steps.step_mirror import StepMirror, pack_effects


class Network(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.metric = MeanMetric()
        self.tau = 1.0
        self.outputs = []
        self.names = {}


class Counter:
    """The part of a Trainer, a precision plugin or a reducer that the mirror reads after a manual step."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def has_unsynchronized(self, parameters):
        return False


class Rank:
    """A module, its optimizer, and what mirrors its steps."""

    def __init__(self, module, number):
        self.module = module
        self.optimizer = torch.optim.Adam(module.layer.parameters())
        manual = SimpleNamespace(optim_step_progress=Counter())
        loop = SimpleNamespace(epoch_loop=SimpleNamespace(manual_optimization=manual))
        trainer = SimpleNamespace(
            optimizers=[self.optimizer], lr_scheduler_configs=[], global_rank=number, fit_loop=loop,
            precision_plugin=Counter(),
        )  # fmt: skip
        self.mirror = StepMirror(trainer, module, Counter())


@pytest.fixture
def ranks():
    module = Network()
    return Rank(module, 0), Rank(copy.deepcopy(module), 1)


def changes(rank, step):
    rank.mirror.remember()
    step(rank.module)
    found = rank.mirror.changes()
    return unpack(pack_effects(found))[0] if found else None


def run(module):
    """A step that changes nothing but gradients, running statistics and what belongs to its batch."""
    output = module.layer(torch.randn(3, 2))
    module.metric.update(output.detach())
    module.outputs.append(output)
    module.last = output.sum()
    output.sum().backward()


@pytest.mark.filterwarnings("error")
def test_nothing_is_sent_where_nothing_has_changed(ranks):
    changes(ranks[0], run)
    for _ in range(5):
        assert changes(ranks[0], run) is None


def test_attributes_that_ranks_share_are_taken_and_others_stay(ranks):
    active, shadow = ranks
    shadow.module.other = 5
    for rank in ranks:
        rank.module.best = float("nan")  # each another object

    def step(module):
        module.tau *= 0.5
        module.best = 3.0
        module.decay, module.other = ("cosine", 2), 6
        if hasattr(module, "warmup"):
            del module.warmup

    for rank in ranks:
        rank.module.warmup = 3
    shadow.mirror.take(changes(active, step))
    assert (shadow.module.tau, shadow.module.best) == (0.5, 3.0)
    assert (shadow.module.decay, shadow.module.other) == (("cosine", 2), 5)
    assert not hasattr(shadow.module, "warmup")
    shadow.module.tau = 0.4
    shadow.mirror.take(changes(active, step))
    assert shadow.module.tau == 0.4


def test_parameters_are_taken_in_any_memory_format():
    module = Network()
    module.layer.append(nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last))
    active, shadow = Rank(module, 0), Rank(copy.deepcopy(module), 1)

    def step(module):
        with torch.no_grad():
            module.layer[3].weight.mul_(torch.arange(2.0))

    shadow.mirror.take(changes(active, step))
    assert torch.equal(shadow.module.layer[3].weight, module.layer[3].weight)
    assert shadow.module.layer[3].weight.is_contiguous(memory_format=torch.channels_last)


def test_buffers_of_other_shapes_come_to_the_device_of_the_module_that_owns_them(ranks):
    for rank in ranks:
        rank.module.register_buffer("scale", None)
        rank.module.layer[0].register_buffer("usage", None)
        rank.module.layer[2].register_buffer("history", torch.zeros(1))
    active, shadow = ranks
    shadow.module.layer.to("meta")

    def step(module):
        module.scale = module.layer[0].usage = torch.ones(2)
        module.layer[2].history = torch.ones(3)

    shadow.mirror.take(changes(active, step))
    assert torch.equal(shadow.module.scale, torch.ones(2))
    assert (shadow.module.layer[0].usage.device.type, shadow.module.layer[0].usage.shape) == ("meta", (2,))
    assert (shadow.module.layer[2].history.device.type, shadow.module.layer[2].history.shape) == ("meta", (3,))
    shadow.mirror.take(changes(active, lambda module: setattr(module, "scale", None)))
    assert shadow.module.scale is None


def test_attributes_with_the_names_that_optimizers_have_are_taken(ranks):
    active, shadow = ranks
    for rank in ranks:
        rank.module.state, rank.module.defaults = "warmup", 1
        rank.optimizer.trainer = 1

    def step(module):
        module.state = module.param_groups = "main"
        module.defaults = 2
        active.optimizer.trainer = 2

    shadow.mirror.take(changes(active, step))
    assert (shadow.module.state, shadow.module.param_groups, shadow.module.defaults) == ("main", "main", 2)
    assert shadow.optimizer.trainer == 2


@pytest.mark.parametrize(
    ("name", "step"), [("2.p", lambda layer: setattr(layer[2], "p", 0.25)), ("training", lambda layer: layer.eval())]
)
def test_a_number_of_a_submodule_stays_and_is_named(ranks, name, step):
    with pytest.warns(UserWarning, match=rf"changes `self\.layer\.{name}`.*a number of the LightningModule"):
        assert changes(ranks[0], lambda module: step(module.layer)) is None


def test_gradients_of_a_manual_step_keep_their_parameters_and_other_parameters_are_an_error(ranks):
    for rank in ranks:
        rank.module.automatic_optimization = False
        rank.module.extra = nn.Linear(2, 2, bias=False)
        rank.module.last = nn.Linear(2, 2, bias=False)
    active, shadow = ranks
    del shadow.module.extra, shadow.module.last
    for name in ("last", "extra"):  # in another order
        setattr(shadow.module, name, nn.Linear(2, 2, bias=False))

    def backward(module):
        module.last.weight.grad = torch.ones(2, 2)

    def replace(module):
        module.extra = nn.Identity()
        backward(module)

    shadow.mirror.take(changes(active, backward))
    assert shadow.module.extra.weight.grad is None
    assert torch.equal(shadow.module.last.weight.grad, torch.ones(2, 2))
    changed = changes(active, replace)
    with pytest.raises(UnsupportedFeatureError, match=r"rank 1: .*parameter `extra.weight` is missing, and on this"):
        shadow.mirror.take(changed)


def test_a_rank_may_lack_a_module_without_parameters_that_every_step_makes(ranks):
    active, shadow = ranks

    def step(module):
        module.loss = nn.MSELoss()
        module.tau = 2.0

    shadow.mirror.take(changes(active, step))
    assert shadow.module.tau == 2.0


def test_a_replaced_module_is_an_error_under_automatic_optimization_too(ranks):
    active, shadow = ranks
    changed = changes(active, lambda module: setattr(module.layer, "2", nn.Identity()))
    with pytest.raises(
        UnsupportedFeatureError, match=r"module `layer\.2` is `Identity`, and on this .* `Dropout`\. Create"
    ):
        shadow.mirror.take(changed)
    shadow.module.layer[2] = nn.Identity()
    shadow.mirror.take(changed)


def test_schedulers_of_the_module_are_matched_by_name(ranks):
    active, shadow = ranks
    for rank, names in ((active, ("first",)), (shadow, ("second", "first"))):
        for name in names:
            setattr(rank.module, name, torch.optim.lr_scheduler.StepLR(rank.optimizer, 1))
        rank.optimizer.step()  # a scheduler warns if it comes first
    shadow.module.second.last_epoch = 7
    shadow.mirror.take(changes(active, lambda module: module.first.step()))
    assert (shadow.module.first.last_epoch, shadow.module.second.last_epoch) == (1, 7)
    third = torch.optim.lr_scheduler.StepLR(active.optimizer, 1)
    changed = changes(active, lambda module: setattr(module, "third", third))
    with pytest.raises(UnsupportedFeatureError, match=r"rank 1: .*scheduler `self.third` is `StepLR`.* missing"):
        shadow.mirror.take(changed)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_tensor_that_may_matter_to_training_is_named_once(ranks, in_place):
    active, _ = ranks
    active.module.center = torch.zeros(2)

    def step(module):
        if in_place:
            module.center += 1
        else:
            module.center = module.center + 1

    with pytest.warns(UserWarning, match="`training_step` changes `self.center`.*as a buffer"):
        assert changes(active, step) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changes(active, step)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("path", ["", "layer.0"])
def test_a_number_in_a_dictionary_stays_and_is_named(ranks, path, replaced):
    active, _ = ranks
    part = active.module.get_submodule(path)
    part.stats = {"tau": 1.0, "last": torch.zeros(1)}

    def step(module, tau):
        part.stats["last"] = torch.ones(1)  # belongs to a batch
        if replaced:
            part.stats = {**part.stats}
        part.stats["tau"] = tau

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert changes(active, partial(step, tau=1.0)) is None
    name = f"self.{path}.stats".replace("..", ".")
    with pytest.warns(UserWarning, match=rf"`training_step` changes `{name}`.*a number of the LightningModule"):
        assert changes(active, partial(step, tau=0.5)) is None


class Range(NamedTuple):
    low: float
    high: float


def test_a_named_tuple_is_named_although_other_tuples_may_belong_to_a_batch(ranks):
    active, _ = ranks
    active.module.range, active.module.outputs = Range(0, 0), (torch.zeros(1),)

    def step(module):
        module.outputs = (torch.ones(1),)
        module.range = Range(0, module.range.high + 1)

    with pytest.warns(UserWarning, match="`training_step` changes `self.range`"):
        assert changes(active, step) is None


def test_a_change_through_data_is_noticed_in_every_step(ranks):
    active, shadow = ranks
    for rank in ranks:
        rank.module.large = nn.Parameter(torch.zeros(2**18 + 1))  # compared by its fingerprint
    for weight in (active.module.layer[0].weight, active.module.large):
        for is_changed in (False, True, *5 * [False], True):
            changed = changes(active, lambda module: weight.data[-1].add_(1) if is_changed else None)  # noqa: B023
            assert (changed is not None) is is_changed
            if changed is not None:
                shadow.mirror.take(changed)
    assert torch.equal(active.module.layer[0].weight, shadow.module.layer[0].weight)
    assert torch.equal(active.module.large, shadow.module.large)


def test_optimizer_state_of_no_parameter_schedulers_and_a_learning_rate_on_a_device_are_sent(ranks):
    for rank in ranks:
        group = rank.optimizer.param_groups[0]
        rank.optimizer.state["step"] = torch.zeros(1)
        rank.module.schedule = torch.optim.lr_scheduler.StepLR(rank.optimizer, 1)
        rank.optimizer.step()  # a scheduler warns if it comes first
        group["lr"] = torch.tensor(0.1, device="meta" if rank is ranks[1] else "cpu")

    def step(module):
        ranks[0].optimizer.state["step"].add_(1)
        module.schedule.step()

    ranks[1].mirror.take(changes(ranks[0], step))
    assert ranks[1].optimizer.state["step"].item() == 1
    assert ranks[1].module.schedule.last_epoch == ranks[0].module.schedule.last_epoch == 1
    assert ranks[1].optimizer.param_groups[0]["lr"].device.type == "meta"
    ranks[1].optimizer.param_groups[0]["lr"] = 0.1
    ranks[1].mirror.take(changes(ranks[0], lambda module: ranks[0].optimizer.param_groups[0].update(lr=0.3)))
    assert ranks[1].optimizer.param_groups[0]["lr"] == 0.3


def test_changes_that_another_rank_cannot_take_are_errors(ranks):
    active, shadow = ranks
    added = {"params": [nn.Parameter(torch.zeros(1))]}
    changed = changes(active, lambda module: active.optimizer.add_param_group(added))
    with pytest.raises(UnsupportedFeatureError, match=r"optimizer 0 \(Adam\) is of 2 parameter groups, .* of 1"):
        shadow.mirror.take(changed)
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 5))
    changed = changes(active, lambda module: setattr(module, "layer", layer))
    with pytest.raises(
        UnsupportedFeatureError, match=r"rank 1: .* parameter `layer.1.weight` is torch.float32 \[5, 2\]"
    ):
        shadow.mirror.take(changed)
    with pytest.raises(UnsupportedFeatureError, match=r"holds `object` at `.*optimizer 0 .*\['schedule'\]`"):
        changes(active, lambda module: active.optimizer.param_groups[0].update(schedule=object()))
