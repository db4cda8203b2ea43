"""Batches of graphs, such as PyTorch Geometric's, are cut into graphs without a hook of the user."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ddp_ext import BatchSplitError
from lightning_ddp_ext.batches.splitting import batch_size_of, split_batch
from tests.parity import (
    CLASSES,
    FEATURES,
    Classifier,
    assert_same_training,
    balanced,
    both_ways,
    compare,
    quiet_trainer,
    seeded,
    train,
)


@dataclass
class Graph:
    nodes: Tensor
    edges: Tensor  # [2, edges], numbers of nodes
    label: Tensor


class GraphBatch:
    """Graphs as one large graph, whose attributes have different numbers of rows."""

    def __init__(self, graphs):
        sizes = torch.tensor([len(graph.nodes) for graph in graphs])
        starts = [0, *sizes.cumsum(0).tolist()]
        self.counts = [(len(graph.nodes), graph.edges.shape[1]) for graph in graphs]
        self.nodes = torch.cat([graph.nodes for graph in graphs])
        self.edges = torch.cat([graph.edges + start for graph, start in zip(graphs, starts, strict=False)], dim=1)
        self.labels = torch.cat([graph.label for graph in graphs])
        self.batch = torch.arange(len(graphs)).repeat_interleave(sizes)

    @classmethod
    def from_data_list(cls, graphs):
        return cls(graphs)

    def to_data_list(self):
        nodes = self.nodes.split([count for count, _ in self.counts])
        edges = self.edges.split([count for _, count in self.counts], dim=1)
        starts = torch.tensor([0, *(count for count, _ in self.counts)]).cumsum(0)
        parts = zip(nodes, edges, starts, self.labels.split(1), strict=False)
        return [Graph(node, edge - start, label) for node, edge, start, label in parts]

    @property
    def num_nodes(self):
        return len(self.nodes)

    def to(self, device, **options):
        moved = GraphBatch(self.to_data_list())
        moved.device = device
        for name in ("nodes", "edges", "labels", "batch"):
            setattr(moved, name, getattr(self, name).to(device))
        return moved


class Following(GraphBatch):
    """Lists the names of its attributes and supports `follow_batch`, as PyTorch Geometric does."""

    def __init__(self, graphs, follow_batch=()):
        super().__init__(graphs)
        for name in follow_batch:
            setattr(self, f"{name}_batch", self.batch)

    @classmethod
    def from_data_list(cls, graphs, follow_batch=()):
        return cls(graphs, follow_batch)

    def keys(self):
        return [name for name in vars(self) if name != "counts"]


def graphs(number):
    generator = torch.Generator().manual_seed(5)
    for _ in range(number):
        nodes = int(torch.randint(2, 7, (), generator=generator))
        yield Graph(
            torch.randn(nodes, FEATURES, dtype=torch.float64, generator=generator),
            torch.randint(0, nodes, (2, 2 * nodes), generator=generator),
            torch.randint(0, CLASSES, (1,), generator=generator),
        )


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


@pytest.mark.parametrize(("split", "devices"), [([2, 6], 2), ([0, 8], 2), ([2, 3, 3], 3)])
def test_training_on_batches_of_graphs_equals_one_device(split, devices):
    parallel = train(seeded(GraphClassifier), balanced(split), devices, loader=loader())
    strategy = parallel.trainer.strategy
    assert strategy.chunk_sizes == strategy.split_sizes(3)  # graphs of the last batch
    assert_same_training(parallel, train(seeded(GraphClassifier), loader=loader()))


def test_graphs_beside_other_entries_are_cut_with_them():
    def wrap(batch):
        return {"graph": batch, "features": torch.zeros(len(batch.labels), 2)}

    compare(GraphClassifier, {"loader": loader(wrap)})


def test_predictions_for_graphs_and_for_nodes_keep_their_order():
    def predict(strategy, devices):
        return quiet_trainer(strategy, devices, precision="64-true").predict(seeded(GraphClassifier), loader())

    expected, found = both_ways(predict)
    torch.testing.assert_close(found, expected)
    assert all(len(outputs["nodes"]) > len(outputs["logits"]) for outputs in found)


def test_graphs_are_counted_and_chunks_hold_what_a_loader_would_make_of_them():
    samples = list(graphs(8))
    batch = Following(samples, ["nodes"])
    assert batch_size_of(batch) == 8
    assert split_batch(batch, [0, 8]) == [None, batch]
    first, second = split_batch(batch, [3, 5])
    for chunk, part in ((first, samples[:3]), (second, samples[3:])):
        expected = Following(part, ["nodes"])
        assert vars(chunk).keys() == vars(expected).keys() == {*batch.keys(), "counts"}
        for name in vars(chunk).keys() - {"counts"}:
            assert torch.equal(getattr(chunk, name), getattr(expected, name))


def test_batches_that_cannot_be_cut_by_graphs_are_refused():
    batch = Following(list(graphs(4)))
    batch.noise = torch.zeros(4)
    with pytest.raises(BatchSplitError, match="`noise` of the batch of graphs"):
        split_batch(batch, [2, 2])
    with pytest.raises(BatchSplitError, match=r"ambiguous: `batch\[0\]` has 4, `batch\[1\]` has 3"):
        batch_size_of((GraphBatch(list(graphs(4))), torch.zeros(3)))
    with pytest.raises(BatchSplitError, match="`Linear` holds tensors but cannot be cut"):
        batch_size_of({"x": torch.zeros(4), "network": nn.Linear(2, 2)})
