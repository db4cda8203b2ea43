import pytest
import torch

from lightning_ddp_ext.distributed.flat_tensors import divide_into_buckets, send_all

META = torch.device("meta")


def test_tensors_are_copied_in_order_with_shapes_and_types_unless_they_are_there():
    tensors = [torch.ones(2), torch.ones(3, 2, dtype=torch.float64), torch.ones(()), torch.ones(4, dtype=torch.int64)]
    sent = send_all(tensors, META)
    assert [(t.shape, t.dtype, t.device.type) for t in sent] == [(t.shape, t.dtype, "meta") for t in tensors]
    assert sent[0]._base is sent[2]._base is not None
    assert all(sent is tensor for sent, tensor in zip(send_all(tensors, torch.device("cpu")), tensors, strict=True))
    assert send_all([], META) == []
    sparse = send_all([torch.ones(2), torch.eye(2).to_sparse()], META)[1]  # travels alone
    assert sparse.is_sparse
    assert sparse.device.type == "meta"


@pytest.mark.parametrize(("limit", "expected"), [(1, [[0], [1], [2]]), (8, [[0, 1], [2]]), (100, [[0, 1, 2]])])
def test_buckets_are_filled_in_order_up_to_their_size(limit, expected):
    assert divide_into_buckets([torch.ones(1)] * 3, range(3), limit) == expected
