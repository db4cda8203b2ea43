"""The gradient that reaches the optimizer is the one a single device computes on the whole batch."""

from collections import namedtuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_ddp_ext import BalancedDataParallelStrategy, BatchSplitError, UnsupportedFeatureError
from tests.parity import CLASSES, FEATURES, Classifier, dataset, quiet_trainer, relative_difference, seeded, train

SPLITS = [
    (None, 1),
    ([0, 8], 2),
    ([2, 6], 2),
    ([7, 1], 2),
    ([2, 3, 3], 3),
    (None, 2),
    (None, 4),
]


def balanced(split=None, **options):
    return BalancedDataParallelStrategy(split=split, **options)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(("split", "devices"), SPLITS)
@pytest.mark.parametrize("samples", [27, 25])  # last batches of 3 and of 1
def test_gradients_and_parameters_equal_one_device(split, devices, accumulate, samples):
    def loader():
        return DataLoader(dataset(samples), batch_size=8)

    options = {"accumulate_grad_batches": accumulate}
    single = train(seeded(Classifier), loader=loader(), **options)
    parallel = train(seeded(Classifier), balanced(split), devices, loader=loader(), **options)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12
    assert relative_difference(parallel.gradients.before_step, single.gradients.before_step) < 1e-12
    assert relative_difference(parallel.parameters, single.parameters) < 1e-12
    assert parallel.trainer.callback_metrics.keys() == single.trainer.callback_metrics.keys()
    for name, value in single.trainer.callback_metrics.items():
        torch.testing.assert_close(parallel.trainer.callback_metrics[name], value, rtol=1e-9, atol=1e-9)


def test_the_test_fails_when_chunks_weigh_the_same():
    single = train(seeded(Classifier))
    parallel = train(seeded(Classifier), balanced([2, 6], weight_by="ranks"), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) > 1e-2
    assert relative_difference(parallel.parameters, single.parameters) > 1e-3


def test_in_float32_gradients_agree_to_rounding():
    def run(*strategy):
        loader = DataLoader(dataset(27, torch.float32), batch_size=8)
        return train(seeded(Classifier), *strategy, loader=loader, precision="32-true", max_epochs=1)

    single, parallel = run(), run(balanced([2, 6]), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-5


def test_all_samples_on_one_replica_give_every_bit_of_one_device():
    single = train(seeded(Classifier))
    parallel = train(seeded(Classifier), balanced([0, 1]), 2)
    assert all(torch.equal(p, q) for p, q in zip(parallel.parameters, single.parameters, strict=True))


@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_with_worker_processes_work(persistent):
    def loader():
        return DataLoader(dataset(27), batch_size=8, num_workers=2, persistent_workers=persistent)

    single = train(seeded(Classifier), loader=loader())
    parallel = train(seeded(Classifier), balanced([2, 6]), 2, loader=loader())
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


@pytest.mark.parametrize("first", [0, 1, 2, 9])
def test_a_limited_first_device_gives_the_same_gradient(first):
    single = train(seeded(Classifier))
    parallel = train(seeded(Classifier), balanced(gpu0_batch_size=first), 3)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.05), ("value", 0.005)])
def test_clipping_sees_the_final_gradient(algorithm, limit):
    options = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": 2}
    single = train(seeded(Classifier), **options)
    parallel = train(seeded(Classifier), balanced([2, 6]), 2, **options)
    unclipped = train(seeded(Classifier), balanced([2, 6]), 2, accumulate_grad_batches=2)
    assert relative_difference(parallel.parameters, single.parameters) < 1e-12
    assert relative_difference(unclipped.parameters, single.parameters) > 1e-4


def test_losses_that_are_sums_are_added():
    class Summed(Classifier):
        def training_step(self, batch, batch_idx):
            return functional.cross_entropy(self.network(batch[0]), batch[1], reduction="sum")

    single = train(seeded(Summed))
    parallel = train(seeded(Summed), balanced([2, 6], weight_by="sum"), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


def test_a_callable_weighs_by_what_the_loss_is_a_mean_over():
    class Masked(Classifier):
        def training_step(self, batch, batch_idx):
            features, labels = batch
            labels = torch.where(features[:, 0] > 0.3, labels, -100)
            return functional.cross_entropy(self.network(features), labels)

    def counted(batch):
        return float((batch[0][:, 0] > 0.3).sum())

    def run(*strategy):
        return train(seeded(Masked), *strategy, loader=DataLoader(dataset(24), batch_size=8))

    single = run()
    assert all(gradient.isfinite().all() for gradient in single.gradients.after_backward)
    parallel = run(balanced([3, 5], weight_by=counted), 2)
    by_samples = run(balanced([3, 5]), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12
    assert relative_difference(by_samples.gradients.after_backward, single.gradients.after_backward) > 1e-2


Batch = namedtuple("Batch", ["features", "labels"])


# Lightning cannot count the samples of the tuple on a single device.
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda x, y: {"in": {"x": x}, "y": [y]}, lambda b: (b["in"]["x"], b["y"][0])),
        (lambda x, y: ([x], (y, torch.tensor(2.0))), lambda b: (b[0][0], b[1][0])),
        (lambda x, y: Batch(x, y), lambda b: (b.features, b.labels)),
        (lambda x, y: torch.cat([x, y[:, None].to(x)], dim=1), lambda b: (b[:, :FEATURES], b[:, FEATURES].long())),
    ],
    ids=["dict", "tuple", "namedtuple", "tensor"],
)
def test_nested_batches_are_cut(pack, unpack):
    class Unpacking(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(unpack(batch), batch_idx)

    def collate(samples):
        features, labels = zip(*samples, strict=True)
        return pack(torch.stack(features), torch.stack(labels))

    def loader():
        return DataLoader(dataset(27), batch_size=8, collate_fn=collate)

    single = train(seeded(Unpacking), loader=loader())
    parallel = train(seeded(Unpacking), balanced([2, 3, 3]), 3, loader=loader())
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


class Pairs:
    """A batch that only the module knows how to cut."""

    def __init__(self, samples):
        self.features, self.labels = (torch.stack(column) for column in zip(*samples, strict=True))


class Scattering(Classifier):
    def scatter_batch(self, batch, split):
        sizes = split(len(batch.labels))
        columns = zip(batch.features.split(sizes), batch.labels.split(sizes), sizes, strict=True)
        return [(features, labels) if size else None for features, labels, size in columns]

    def training_step(self, batch, batch_idx):
        if isinstance(batch, Pairs):
            batch = (batch.features, batch.labels)
        self.log_dict({}, batch_size=len(batch[1]))
        return functional.cross_entropy(self.network(batch[0]), batch[1])


def test_a_module_may_cut_its_batches_itself():
    def loader():
        return DataLoader(dataset(27), batch_size=8, collate_fn=Pairs)

    single = train(seeded(Scattering), loader=loader())
    for options in ({"split": [2, 6]}, {"gpu0_batch_size": 0}):
        parallel = train(seeded(Scattering), balanced(**options), 2, loader=loader())
        assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


def test_chunks_of_another_number_than_the_devices_are_refused():
    class Wrong(Scattering):
        def scatter_batch(self, batch, split):
            return super().scatter_batch(batch, split)[:1]

    with pytest.raises(BatchSplitError, match=r"`scatter_batch` returned 1 chunks for the sizes \[4, 4\]"):
        train(Wrong(), balanced(), 2, loader=DataLoader(dataset(8), batch_size=8, collate_fn=Pairs))


def test_combined_loaders_with_different_sizes_are_refused_by_name():
    loaders = {"a": DataLoader(dataset(8), batch_size=8), "b": DataLoader(dataset(4), batch_size=4)}
    with pytest.raises(BatchSplitError, match=r"ambiguous: `batch\['a'\]` has 8, `batch\['b'\]` has 4"):
        train(Classifier(), balanced(), 2, loader=CombinedLoader(loaders, "min_size"))


def test_training_step_may_return_a_dictionary():
    class Returning(Classifier):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "rows": batch[0][:, 0].detach()}

    class Outputs(Callback):
        rows = ()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            Outputs.rows = (outputs["rows"], batch[0][:, 0])
            assert outputs["loss"].ndim == 0

    single = train(seeded(Returning))
    parallel = train(seeded(Returning), balanced([2, 6]), 2, callbacks=[Outputs()])
    assert torch.equal(*Outputs.rows)
    assert relative_difference(parallel.parameters, single.parameters) < 1e-12


def test_an_override_of_backward_runs_on_the_combined_loss():
    class Scaling(Classifier):
        def backward(self, loss, *args, **kwargs):
            (3 * loss).backward(*args, **kwargs)

    single = train(seeded(Scaling))
    parallel = train(seeded(Scaling), balanced([2, 6]), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


def test_lbfgs_calls_the_step_several_times_for_one_batch():
    def build():
        return Classifier(torch.optim.LBFGS)

    single = train(seeded(build), max_epochs=1)
    parallel = train(seeded(build), balanced([2, 6]), 2, max_epochs=1)
    assert len(single.gradients.after_backward) > 20
    assert relative_difference(parallel.parameters, single.parameters) < 1e-8


def test_a_module_with_single_sample_batch_norm_trains():
    class Normalised(Classifier):
        def __init__(self):
            super().__init__()
            self.network = nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))

    strategy = balanced([1, 7])
    sizes = []

    class Sizes(Callback):
        def on_train_batch_end(self, trainer, *args):
            sizes.append(trainer.strategy.chunk_sizes)

    train(seeded(Normalised), strategy, 2, callbacks=[Sizes()], max_epochs=1)
    assert sizes == [[0, 8], [0, 8], [0, 8], [0, 3]]


class Evaluated(Classifier):
    def __init__(self):
        super().__init__()
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits = self.network(batch[0])
        self.val_accuracy(logits, batch[1])
        self.log("val_accuracy", self.val_accuracy, on_epoch=True)
        self.log("val_loss", functional.cross_entropy(logits, batch[1]))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return {"logits": self.network(batch[0]), "index": batch[1].tolist()}


@pytest.mark.parametrize(("split", "devices"), SPLITS)
@pytest.mark.parametrize("samples", [1, 2, 27])
def test_validation_and_test_equal_one_device(split, devices, samples):
    def run(strategy, count):
        trainer = quiet_trainer(strategy, count, precision="64-true")
        module = seeded(Evaluated)
        loaders = [DataLoader(dataset(samples), batch_size=8) for _ in range(2)]
        return [
            *trainer.validate(module, loaders[0], verbose=False),
            *trainer.test(module, loaders, verbose=False),
        ]

    for result, expected in zip(run(balanced(split), devices), run("auto", 1), strict=True):
        assert result == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("split", "devices"), SPLITS)
def test_predictions_keep_their_order(split, devices):
    def run(strategy, count):
        trainer = quiet_trainer(strategy, count, precision="64-true")
        return trainer.predict(seeded(Evaluated), DataLoader(dataset(27), batch_size=8))

    for result, expected in zip(run(balanced(split), devices), run("auto", 1), strict=True):
        torch.testing.assert_close(result["logits"], expected["logits"])
        assert result["index"] == expected["index"]


@pytest.mark.parametrize("first", ["single", "parallel"])
def test_a_checkpoint_resumes_on_the_other_number_of_devices(tmp_path, first):
    def run(strategy, devices, epochs, ckpt_path=None):
        module = seeded(Evaluated).double()  # before Lightning loads the checkpoint into it
        trainer = quiet_trainer(strategy, devices, precision="64-true", max_epochs=epochs)
        trainer.fit(module, DataLoader(dataset(27), batch_size=8), ckpt_path=ckpt_path)
        return module, trainer

    ways = {"single": ("auto", 1), "parallel": (balanced([2, 6]), 2)}
    second = "parallel" if first == "single" else "single"
    _, trainer = run(*ways[first], epochs=2)
    path = tmp_path / "half.ckpt"
    trainer.save_checkpoint(path)
    resumed, resumed_trainer = run(*ways[second], epochs=4, ckpt_path=path)
    reference, reference_trainer = run("auto", 1, epochs=4)
    assert resumed_trainer.global_step == reference_trainer.global_step
    assert relative_difference(list(resumed.parameters()), list(reference.parameters())) < 1e-12
    state = torch.load(path, weights_only=True)["state_dict"]
    assert state.keys() == Evaluated().state_dict().keys()


def test_callbacks_that_save_write_a_checkpoint_that_loads_on_one_device(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
    trainer = quiet_trainer(
        balanced([1, 3]), 2, precision="64-true", max_epochs=2, callbacks=[checkpoint], enable_checkpointing=True
    )
    module = seeded(Evaluated)
    loader = DataLoader(dataset(27), batch_size=8)
    trainer.fit(module, loader, loader)
    loaded = Evaluated.load_from_checkpoint(checkpoint.last_model_path).double()
    features = dataset(27).tensors[0]
    torch.testing.assert_close(loaded.network(features), module.network(features), rtol=1e-6, atol=1e-6)


class RandomSizes(Dataset):
    """Batches of every size from 1 to 9, one item each."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return dataset(9 - index)[:]


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_batches_smaller_than_the_number_of_devices_work(devices):
    def loader():
        return DataLoader(RandomSizes(), batch_size=None)

    single = train(seeded(Classifier), loader=loader(), max_epochs=1)
    for options in ({}, {"gpu0_batch_size": 1}, {"split": list(range(devices))}):
        parallel = train(
            seeded(Classifier), BalancedDataParallelStrategy(**options), devices, loader=loader(), max_epochs=1
        )
        assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


class Masked(Classifier):
    """Adds a mask of infinities, as hand-written attention does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, 0.0, float("-inf")]))

    def training_step(self, batch, batch_idx):
        labels = batch[1].clamp(max=1)
        return functional.cross_entropy(self.network(batch[0]) + self.mask.to(batch[0]), labels)


def test_infinities_in_buffers_survive():
    single, parallel = train(seeded(Masked)), train(seeded(Masked), balanced([2, 6]), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


class Recurring(Classifier):
    """Keeps a state that a hook resets."""

    def __init__(self):
        super().__init__()
        self.state = None

    def on_train_epoch_start(self):
        self.state = None

    def training_step(self, batch, batch_idx):
        logits = self.network(batch[0])
        if self.state is not None:
            logits = logits + self.state
        self.state = logits.detach()
        return functional.cross_entropy(logits, batch[1])


@pytest.mark.filterwarnings("ignore:`self.state` was set inside a step")
def test_state_of_replicas_can_be_reset_by_a_hook():
    def loader():
        return DataLoader(dataset(24), batch_size=8)

    single = train(seeded(Recurring), loader=loader())
    parallel = train(seeded(Recurring), balanced([2, 6]), 2, loader=loader())
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


def test_a_batch_that_comes_again_is_cut_again():
    class Augmented(Classifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * (1 + self.trainer.global_step), batch[1]

    class SameBatch:
        batch = dataset(8, torch.float32)[:]

        def __iter__(self):
            return iter([self.batch] * 4)

    options = {"precision": "32-true", "max_epochs": 1, "loader": SameBatch()}
    single = train(seeded(Augmented), **options)
    parallel = train(seeded(Augmented), balanced([2, 6]), 2, **options)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-5


def test_a_step_that_changes_parameters_is_refused():
    class Decaying(Classifier):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.network[0].weight.mul_(0.9)
            return super().training_step(batch, batch_idx)

    with pytest.raises(UnsupportedFeatureError, match=r"`network\.0\.weight` was changed in place"):
        train(Decaying(), balanced(), 2)
