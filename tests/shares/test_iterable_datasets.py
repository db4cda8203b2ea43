"""The content of a stream's batch, which ranks compare."""

import pickle
import threading

import numpy
import torch
from torch import Tensor

from lightning_ddp_ext.shares import iterable_datasets
from lightning_ddp_ext.shares.iterable_datasets import StreamIndices, hash_of_content


def sample(label: int = 3, noise: float = 0.0, key: str = "a") -> dict[str, object]:
    return {"image": torch.full((3, 2, 2), noise), "label": torch.tensor(label), "key": key, "scale": noise}


def of_samples(*samples: object) -> int:
    return hash_of_content(list(samples), most_dimensions=1)


def test_other_labels_keys_and_tokens_are_other_content_and_transformed_images_are_not():
    assert of_samples(sample(), sample(4)) == of_samples(sample(noise=1.0), sample(4, noise=0.5))
    found = [of_samples(*samples) for samples in ([sample()], [sample(4)], [sample(key="b")], [sample(), sample(4)])]
    assert len(set(found)) == 4
    tokens = [torch.tensor([1, 2, 3]), [1, 2, 3], numpy.array([1, 2, 3]), (1, "text", b"bytes", True, numpy.int64(3))]
    for own in tokens:
        assert of_samples(own) == of_samples(own) != of_samples(own[:2])


def test_other_numbers_are_compared_if_there_are_no_integers():
    assert of_samples((torch.zeros(2), 1.0)) != of_samples((torch.zeros(2), 2.0))
    assert of_samples((torch.zeros(2), 1.0, 5)) == of_samples((torch.ones(2), 2.0, 5))


def test_values_without_comparable_content_are_skipped():
    skipped: list[object] = [
        torch.zeros(2, 2), torch.eye(2).to_sparse(), torch.zeros(1, dtype=torch.complex64), numpy.zeros((2, 2)),
        numpy.array([object()]), object(), None, torch.zeros(2, device="meta"),
    ]  # fmt: skip
    assert of_samples(*skipped) == of_samples()
    assert of_samples(*skipped, 1) == of_samples(1)


def test_batches_have_one_more_dimension_than_samples():
    def of_batch(tokens: Tensor) -> int:
        return hash_of_content({"tokens": tokens, "masks": torch.arange(8).reshape(2, 2, 2)}, most_dimensions=2)

    assert of_batch(torch.tensor([[1, 2], [3, 4]])) != of_batch(torch.tensor([[1, 2], [3, 5]]))
    assert of_batch(torch.tensor([], dtype=torch.int64).reshape(0, 2)) == hash_of_content({}, most_dimensions=2)


def test_tensors_that_are_views_of_others_are_compared():
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert of_samples(values.conj().imag) == of_samples(torch.tensor([-2.0, 4.0])) != of_samples(values.imag)


def test_indices_sent_to_a_worker_are_not_those_that_this_thread_fetches():
    own, other = StreamIndices([None]), StreamIndices([None, None])
    list(own)
    thread = threading.Thread(target=pickle.dumps, args=[other])  # as the queue of a worker does
    thread.start()
    thread.join()
    assert iterable_datasets._fetching.indices is own
