import pytest
import torch
import torch.distributed as dist

from tests.support.fake_group import run_threads


def exchange():
    rank = torch.tensor(float(dist.get_rank()))
    total = rank.clone()
    dist.all_reduce(total, async_op=True).wait()
    pair = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        dist.all_reduce(rank, group=pair)
    return total.item(), rank.item()


def fail_on_rank_1(raises):
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    elif raises:
        raise LookupError("rank 1")


def test_ranks_on_threads_have_groups_of_their_own():
    assert run_threads(exchange, 3) == [(3.0, 2.0), (3.0, 1.0), (3.0, 2.0)]
    assert not dist.is_initialized()


def test_a_failing_thread_ends_the_collectives_of_others():
    with pytest.raises(LookupError, match="rank 1"):
        run_threads(fail_on_rank_1, 2, True)
    with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
        run_threads(fail_on_rank_1, 2, False, timeout=1)
    assert run_threads(dist.get_rank, 2) == [0, 1]
