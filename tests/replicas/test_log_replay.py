"""Values logged in a step equal those of one device."""

import functools
import warnings

import pytest
import torch
from torch.nn import functional

from tests.support.training import Classifier, balanced, log_values

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:You called `self.log\(.*but the value needs to be floating"),
    pytest.mark.filterwarnings(r"ignore:`self.log\('(constant|step)', ...\)` logs the mean over the replicas of whole"),
]


class Logging(Classifier):
    """Logs in every way; `scores` differ between samples."""

    def training_step(self, batch, batch_idx):
        features, labels = batch
        loss = functional.cross_entropy(self.network(features), labels)
        scores = features[:, 0]
        self.log("both", scores.mean(), on_step=True, on_epoch=True)
        self.log("number", float(scores.mean()), on_step=False, on_epoch=True)
        self.log("largest", scores.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("smallest", scores.min(), on_step=True, on_epoch=True, reduce_fx=torch.min)
        self.log("total", scores.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log_dict({"one": scores.mean() + 1, "two": scores.mean() + 2}, on_step=True, on_epoch=True)
        self.log("own_size", scores.mean(), on_step=True, on_epoch=True, batch_size=len(scores))
        self.log("positional", scores.mean(), True, False, True, True)
        self.log("count", (scores > 0).sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("last_label", labels.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("first_label", labels.min(), on_step=True, on_epoch=True, reduce_fx=min)
        self.log("rows", len(scores), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("constant", 3, on_step=True, on_epoch=True)
        positive = scores[scores > 0.5]
        if len(positive):
            self.log("positive", positive.mean(), on_step=False, on_epoch=True, batch_size=len(positive))
        return loss


def run(module, strategy="auto", devices=1):
    """Return the values that are logged in every step, and at the end of training."""
    _, steps, epoch = log_values(module, strategy, devices)
    return steps, {name: float(value) for name, value in epoch.items()}


run_alone = functools.cache(run)


def loss_of(module, batch):
    return functional.cross_entropy(module.network(batch[0]), batch[1])


@pytest.mark.parametrize(("split", "devices"), [([2, 6], 2), ([0, 8], 2), ([2, 3, 3], 3), (None, 2)])
def test_every_step_and_every_epoch_logs_what_one_device_logs(split, devices):
    steps, epoch = run(Logging, balanced(split=split), devices)
    expected_steps, expected_epoch = run_alone(Logging)
    assert epoch == pytest.approx(expected_epoch, abs=1e-9)
    assert len(epoch) > 20
    for values, expected in zip(steps, expected_steps, strict=True):
        assert values == pytest.approx(expected, abs=1e-9)


def test_the_test_fails_when_chunks_have_equal_weights():
    _, epoch = run(Logging, balanced(split=[2, 6], weight_by="equal"), 2)
    _, expected = run_alone(Logging)
    assert abs(epoch["both_epoch"] - expected["both_epoch"]) > 1e-3


class Whole(Classifier):
    """Logs whole numbers and truth values."""

    def training_step(self, batch, batch_idx):
        scores = batch[0][:, 0]
        positive = (scores > 0).sum()
        self.log("yes", torch.tensor(True))
        self.log("yes_mean", torch.tensor(True), reduce_fx="avg")
        self.log("any", (scores > 1).any(), reduce_fx="max")
        self.log("all", bool((scores > 0).all()), reduce_fx="min")
        self.log("most", positive, reduce_fx=torch.max)
        self.log("position", batch_idx)
        self.log("rows", len(scores), reduce_fx="sum")
        self.log("total", int(positive), reduce_fx="sum")
        self.log_dict({"counted": positive, "counted_too": int(positive)}, reduce_fx="sum")
        for name, mean in (("text", "AVG"), ("function", torch.mean)):  # of the chunks, which floats show
            self.log(name, positive, reduce_fx=mean)
        self.log_dict({"dictionary": positive}, reduce_fx="mean")
        self.log("expected", positive.double())
        return loss_of(self, batch)


@pytest.mark.filterwarnings("ignore:`self.log.*logs the mean over the replicas of whole")
def test_whole_numbers_and_truth_values_equal_those_of_one_device():
    steps, epoch = run(Whole, balanced([2, 6]), 2)
    expected_steps, expected_epoch = run(Whole)
    assert len(epoch) == 14
    means = ("text", "function", "dictionary", "expected")
    for values, expected in zip([*steps, epoch], [*expected_steps, expected_epoch], strict=True):
        found, _ = ([logged.pop(name) for name in means] for logged in (values, expected))
        assert found == pytest.approx(found[-1:] * 4, abs=1e-12)
        most, expected_most = values.pop("most"), expected.pop("most")
        assert 0 < most <= expected_most  # the largest of the chunks, by `reduce_fx`
        assert values == expected


def warnings_of(step, split):
    """Return the keys and texts of the warnings about logged values, each of which comes once."""

    class Warned(Classifier):
        def training_step(self, batch, batch_idx):
            step(self, batch[0][:, 0])
            return loss_of(self, batch)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values, _ = run(Warned, balanced(split), 2)
    texts = [str(warning.message) for warning in caught if str(warning.message).startswith("`self.log(")]
    return {text.split("'")[1]: text for text in texts}, len(texts), values


def test_a_warning_names_each_key_whose_whole_numbers_are_averaged_and_no_other():
    def step(module, scores):
        module.log("count", (scores > 0).sum())
        module.log("rows", len(scores))
        module.log("mixed", scores.abs().argmin() == 0)
        module.log_dict({"constant": 3})
        module.log("added", len(scores), reduce_fx="sum")
        module.log("largest", len(scores), reduce_fx=max)
        module.log("mean", float(len(scores)), reduce_fx="mean")

    by_key, number, values = warnings_of(step, [2, 6])
    assert sorted(by_key) == ["constant", "count", "mixed", "rows"]
    assert number == 4
    assert all("logs the mean over the replicas of whole numbers" in text for text in by_key.values())
    assert (values[0]["added"], values[0]["largest"], values[0]["constant"]) == (8, 6, 3)
    assert values[0]["rows"] == values[0]["mean"] == (2 * 2 + 6 * 6) / 8


@pytest.mark.parametrize("split", [[4, 4], [2, 6]])
def test_one_batch_size_for_chunks_of_different_sizes_is_warned_about(split):
    def step(module, scores):
        module.log("whole", scores.mean(), on_step=True, on_epoch=True, batch_size=8)
        module.log("own", scores.mean(), on_step=True, on_epoch=True, batch_size=len(scores))

    by_key, number, values = warnings_of(step, split)
    if split == [2, 6]:
        (text,) = by_key.values()
        assert number == 1
        assert text.startswith("`self.log('whole', ...)` gives chunks of different sizes the same weight")
        assert values[0]["whole_step"] != pytest.approx(values[0]["own_step"], abs=1e-3)
        return
    # The last batch has 3 samples, in chunks of 2 and 1.
    assert all(one["whole_step"] == pytest.approx(one["own_step"], abs=1e-12) for one in values[:3])
    assert list(by_key) == ["whole"]


@pytest.mark.parametrize("value", ["warmup", torch.zeros(2), {"inner": {"a": 1.0}}], ids=["text", "vector", "nested"])
def test_a_value_that_cannot_be_logged_is_refused_with_its_key(value):
    class Wrong(Classifier):
        def training_step(self, batch, batch_idx):
            self.log("phase", value)
            return loss_of(self, batch)

    with pytest.raises(ValueError, match=r"self\.log\(phase, .*was called, but"):
        run(Wrong, balanced([2, 6]), 2)


def test_batch_sizes_that_count_something_in_each_chunk_may_agree_by_chance():
    agreed = []

    def count(batch):
        return int((1 + (batch[0][:, 1] > 0)).sum())

    class Boxes(Classifier):
        def training_step(self, batch, batch_idx):
            boxes = 1 + (batch[0][:, 1] > 0).double()
            losses = functional.cross_entropy(self.network(batch[0]), batch[1], reduction="none")
            loss = (losses * boxes).sum() / boxes.sum()
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=count(batch))
            agreed.append(count(batch))
            return loss

    strategy = balanced(split=[4, 4], weight_by=count)
    steps, epoch = run(Boxes, strategy, 2)
    assert any(one == other for one, other in zip(agreed[::2], agreed[1::2], strict=True))
    expected_steps, expected_epoch = run(Boxes)
    assert epoch == pytest.approx(expected_epoch, abs=1e-9)
    assert steps == [pytest.approx(step, abs=1e-9) for step in expected_steps]
