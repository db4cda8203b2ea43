"""Training on batches of every kind and size, of graphs, and from one loader or several, equals one device."""

from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ddp_ext import BatchSplitError
from lightning_ddp_ext.batches.splitting import count_samples, split_batch
from tests.parity import (
    CLASSES,
    FEATURES,
    Classifier,
    Evaluated,
    assert_same_training,
    balanced,
    batches,
    both_ways,
    compare,
    dataset,
    quiet_trainer,
    seeded,
    train,
)
from tests.strategies.toolkit import Stream


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
            batch = (batch.features.to(self.device), batch.labels.to(self.device))
        self.log_dict({}, batch_size=len(batch[1]))
        return functional.cross_entropy(self.network(batch[0]), batch[1])


@pytest.mark.parametrize("options", [{"split": [2, 6]}, {"gpu0_batch_size": 0}])
def test_a_module_may_cut_its_batches_itself(options):
    compare(Scattering, {"loader": batches(collate_fn=Pairs)}, **options)


def test_chunks_of_another_number_than_the_devices_are_refused():
    class Wrong(Scattering):
        def scatter_batch(self, batch, split):
            return super().scatter_batch(batch, split)[:1]

    with pytest.raises(BatchSplitError, match=r"`scatter_batch` returned 1 chunks for the sizes \[4, 4\]"):
        train(Wrong(), balanced(), 2, loader=batches(8, collate_fn=Pairs))


class TwoSources(Classifier):
    """Takes a dictionary or a list of batches, of which some may have run out."""

    def training_step(self, batch, batch_idx):
        parts = [part for part in (batch.values() if isinstance(batch, dict) else batch) if part is not None]
        loss = sum(functional.cross_entropy(self.network(features), labels) for features, labels in parts)
        self.log("loss", loss, on_epoch=True, batch_size=len(parts[0][1]))
        return loss


@pytest.mark.parametrize(
    ("mode", "kind"), [("min_size", dict), ("max_size_cycle", dict), ("max_size", dict), ("max_size", list)]
)
def test_loaders_that_are_read_at_once(mode, kind):
    def options():
        loaders = {"a": batches(40), "b": batches(24)}
        return {"loader": CombinedLoader(loaders if kind is dict else list(loaders.values()), mode)}

    single, _ = compare(TwoSources, options)
    assert single.trainer.global_step == 3 * (3 if mode == "min_size" else 5)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: batches(num_workers=2, persistent_workers=True), {}),
        (lambda: DataLoader(Stream(list(dataset(27))), batch_size=8), {"max_steps": 6, "max_epochs": -1}),
        (lambda: batches(shuffle=True), {}),
    ],
    ids=["workers", "no length", "shuffled"],
)
def test_loaders_of_every_kind(make, options):
    compare(Evaluated, lambda: {"loader": make(), **options})


@dataclass
class Graph:
    nodes: Tensor
    edges: Tensor  # [2, edges], numbers of nodes
    label: Tensor


class GraphBatch:
    """Graphs as one large graph, whose attributes have different numbers of rows, as PyTorch Geometric makes it."""

    def __init__(self, graphs, follow_batch=()):
        sizes = torch.tensor([len(graph.nodes) for graph in graphs])
        starts = [0, *sizes.cumsum(0).tolist()]
        self.counts = [(len(graph.nodes), graph.edges.shape[1]) for graph in graphs]
        self.nodes = torch.cat([graph.nodes for graph in graphs])
        self.edges = torch.cat([graph.edges + start for graph, start in zip(graphs, starts, strict=False)], dim=1)
        self.labels = torch.cat([graph.label for graph in graphs])
        self.batch = torch.arange(len(graphs)).repeat_interleave(sizes)
        for name in follow_batch:
            setattr(self, f"{name}_batch", self.batch)

    @classmethod
    def from_data_list(cls, graphs, follow_batch=()):
        return cls(graphs, follow_batch)

    def to_data_list(self):
        nodes = self.nodes.split([count for count, _ in self.counts])
        edges = self.edges.split([count for _, count in self.counts], dim=1)
        starts = torch.tensor([0, *(count for count, _ in self.counts)]).cumsum(0)
        parts = zip(nodes, edges, starts, self.labels.split(1), strict=False)
        return [Graph(node, edge - start, label) for node, edge, start, label in parts]

    def keys(self):
        return [name for name in vars(self) if name not in ("counts", "device")]

    @property
    def num_nodes(self):
        return len(self.nodes)

    def to(self, device, **options):
        moved = GraphBatch(self.to_data_list())
        moved.device = device
        for name in ("nodes", "edges", "labels", "batch"):
            setattr(moved, name, getattr(self, name).to(device))
        return moved


def graphs(number):
    generator = torch.Generator().manual_seed(5)
    for _ in range(number):
        nodes = int(torch.randint(2, 7, (), generator=generator))
        yield Graph(
            torch.randn(nodes, FEATURES, dtype=torch.float64, generator=generator),
            torch.randint(0, nodes, (2, 2 * nodes), generator=generator),
            torch.randint(0, CLASSES, (1,), generator=generator),
        )


def beside(batch):
    return {"graph": batch, "features": torch.zeros(len(batch.labels), 2)}


def loader(wrap=lambda batch: batch):
    return DataLoader(list(graphs(27)), batch_size=8, collate_fn=lambda samples: wrap(GraphBatch(samples)))


class GraphClassifier(Classifier):
    def hidden(self, graph):
        messages = torch.zeros_like(graph.nodes).index_add(0, graph.edges[1], graph.nodes[graph.edges[0]])
        return graph.nodes + messages.tanh()

    def forward(self, graph):
        assert graph.device == self.device
        pooled = graph.nodes.new_zeros(len(graph.labels), FEATURES).index_add(0, graph.batch, self.hidden(graph))
        return self.network(pooled)

    def training_step(self, batch, batch_idx):
        graph = batch["graph"] if isinstance(batch, dict) else batch
        logits = self(graph)
        self.accuracy(logits, graph.labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, batch_size=len(graph.labels))
        loss = functional.cross_entropy(logits, graph.labels)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(graph.labels))
        return loss

    def predict_step(self, batch, batch_idx):
        return {"logits": self(batch), "nodes": self.hidden(batch), "labels": batch.labels.tolist()}


@pytest.mark.parametrize(("split", "wrap"), [([2, 6], beside), ([0, 5, 3], lambda batch: batch)])
def test_training_on_batches_of_graphs_equals_one_device(split, wrap):
    parallel = train(seeded(GraphClassifier), balanced(split), len(split), loader=loader(wrap))
    strategy = parallel.trainer.strategy
    assert strategy.chunk_sizes == strategy.split_sizes(3)  # graphs of the last batch
    assert_same_training(parallel, train(seeded(GraphClassifier), loader=loader(wrap)))


def test_predictions_for_graphs_and_for_nodes_keep_their_order():
    def predict(strategy, devices):
        return quiet_trainer(strategy, devices, precision="64-true").predict(seeded(GraphClassifier), loader())

    expected, found = both_ways(predict)
    torch.testing.assert_close(found, expected)
    assert all(len(outputs["nodes"]) > len(outputs["logits"]) for outputs in found)


def test_graphs_are_counted_and_chunks_hold_what_a_loader_would_make_of_them():
    samples = list(graphs(8))
    batch = GraphBatch(samples, ["nodes"])
    assert count_samples(batch) == 8
    assert split_batch(batch, [0, 8]) == [None, batch]
    first, second = split_batch(batch, [3, 5])
    for chunk, part in ((first, samples[:3]), (second, samples[3:])):
        expected = GraphBatch(part, ["nodes"])
        assert vars(chunk).keys() == vars(expected).keys() == {*batch.keys(), "counts"}
        for name in vars(chunk).keys() - {"counts"}:
            assert torch.equal(getattr(chunk, name), getattr(expected, name))


def test_batches_that_cannot_be_cut_by_graphs_are_refused():
    batch = GraphBatch(list(graphs(4)))
    batch.noise = torch.zeros(4)
    with pytest.raises(BatchSplitError, match="`noise` of the batch of graphs"):
        split_batch(batch, [2, 2])
    with pytest.raises(BatchSplitError, match=r"ambiguous: `batch\[0\]` has 4, `batch\[1\]` has 3"):
        count_samples((GraphBatch(list(graphs(4))), torch.zeros(3)))
    with pytest.raises(BatchSplitError, match="`Linear` holds tensors but cannot be cut"):
        count_samples({"x": torch.zeros(4), "network": nn.Linear(2, 2)})
