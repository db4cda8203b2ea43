"""`all_gather` of tensors of different sizes gives a program for `ddp` the values that it expects."""

import warnings
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from lightning_ddp_ext import BalancedDDPStrategy, DDPCheckpointStrategy, DDPJoinStrategy, RanksOutOfStepError
from lightning_ddp_ext.strategies import gathering
from lightning_ddp_ext.strategies.gathering import GatherMixin
from tests.strategies.toolkit import RANK, trainer
from tests.support.fake_group import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.all_gather. got different numbers of rows")

# ---------------------------------------------------------------- one call, on ranks in threads


class Stacking:
    """The `all_gather` of Lightning's strategies, which needs tensors of one size."""

    def all_gather(self, tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
        rows = [torch.empty_like(tensor) for _ in range(group.barrier.parties)]
        dist.all_gather(rows, tensor.contiguous(), group=group)
        return torch.stack(rows)


class Strategy(GatherMixin, Stacking):
    pass


def gathered(*by_rank: Any, left_out: Sequence[int] = ()) -> Any:
    """Return what each rank gets if it gathers its value."""

    def run(group: Any) -> Any:
        strategy = Strategy()
        return strategy.all_gather(by_rank[group.rank], group, is_left_out=group.rank in left_out)

    return run_ranks(len(by_rank), run)


DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_dtype_are_concatenated_in_the_order_of_ranks(dtype):
    whole = (torch.arange(24).reshape(3, 8) % 5).to(dtype).T  # not contiguous
    parts = whole.split([1, 5, 2])
    for result in gathered(*parts):
        assert result.dtype == dtype
        assert torch.equal(result, whole[None])
        assert torch.equal(torch.cat(list(result)), result.flatten(0, 1))


def test_equal_sizes_are_stacked_as_under_lightning():
    for result in gathered(torch.zeros(2, 3), torch.ones(2, 3)):
        assert torch.equal(result, torch.stack([torch.zeros(2, 3), torch.ones(2, 3)]))
    for result in gathered(torch.tensor(1.0), torch.tensor(2.0)):
        assert result.tolist() == [1, 2]


@pytest.mark.parametrize("nothing", [torch.empty(0), torch.tensor([]), torch.empty(0, 2, dtype=torch.int64)])
def test_a_rank_without_rows_adds_none(nothing):
    rows = torch.tensor([[1, 2], [3, 4]])
    for result in gathered(rows, nothing, rows + 4):
        assert torch.equal(result, torch.arange(1, 9).reshape(1, 4, 2)), result
    assert [result.shape for result in gathered(torch.empty(0), torch.empty(0))] == [(2, 0), (2, 0)]


def test_each_tensor_of_a_container_is_gathered_by_itself():
    def of(rank):
        return {
            "rows": torch.full((1 + rank,), rank),
            "pair": (torch.full((2,), rank), "text"),
            "one": torch.tensor(rank),
        }

    for result in gathered(of(0), of(1)):
        assert result["rows"].tolist() == [[0, 1, 1]]
        assert result["pair"][0].tolist() == [[0, 0], [1, 1]]
        assert result["pair"][1] == "text"
        assert result["one"].tolist() == [0, 1]


def test_a_rank_that_is_left_out_may_have_other_sizes():
    for result in gathered(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(5, 7), left_out=[2]):
        assert torch.equal(result, torch.stack([torch.zeros(2, 3), torch.ones(2, 3)]))
    for result in gathered(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0), left_out=[0]):
        assert result.tolist() == [2, 3]


DIFFERENT = {
    "other dimensions": ([torch.zeros(3, 5), torch.zeros(2, 4)], "(3, 5)) on rank 0; ('', 'float32', 'cpu', (2, 4))"),
    "numbers of dimensions": ([torch.zeros(3), torch.zeros(3, 1)], "(3,)) on rank 0; ('', 'float32', 'cpu', (3, 1))"),
    "a number and rows": ([torch.tensor(1.0), torch.zeros(3)], "()) on rank 0; ('', 'float32', 'cpu', (3,)) on rank 1"),
    "a number and nothing": ([torch.tensor(1.0), torch.zeros(0)], "()) on rank 0; ('', 'float32', 'cpu', (0,)) on"),
    "dtypes": ([torch.zeros(3), torch.zeros(3).double()], "'float32', 'cpu', (3,)) on rank 0; ('', 'float64', 'cpu'"),
    "no tensor": ([torch.zeros(3), None], "got ('', 'float32', 'cpu', (3,)) on rank 0; None on rank 1"),
    "lists": ([[torch.zeros(2)] * 2, [torch.zeros(2)]], "got ('', 'float32', 'cpu', (2,)) on rank 0; None on rank 1"),
    "keys": ([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}], "('a', 'float32', 'cpu', (2,)) on rank 0; ('b', '"),
    "the order of keys": (
        [{"a": torch.zeros(2), "b": torch.ones(2)}, {"b": torch.ones(2), "a": torch.zeros(2)}], "on rank 0; ('b, a', "
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_differences_are_an_error_on_all_ranks_that_names_the_sizes(name):
    def run(group: Any) -> str:
        with pytest.raises(RanksOutOfStepError) as caught:
            Strategy().all_gather(values[group.rank], group)
        return str(caught.value)

    values, message = DIFFERENT[name]
    for error in run_ranks(2, run):
        assert "`all_gather` needs equally many tensors" in error
        assert message in error


def test_one_warning_says_that_rows_are_concatenated():
    gathering._WARNINGS.clear()
    with pytest.warns(UserWarning, match=r"`all_gather` got different numbers of rows"):
        gathered(torch.zeros(2), torch.zeros(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gathered(torch.zeros(2), torch.zeros(1))


def test_messages_do_not_grow_with_the_number_of_tensors():
    """One message says that all sizes are equal."""

    def count(number: int) -> int:
        sent = []

        def run(group: Any) -> None:
            exchange = type(group).exchange
            group.exchange = lambda tensor: (sent.append(group.rank), exchange(group, tensor))[1]
            Strategy().all_gather([torch.zeros(2)] * number, group)

        run_ranks(2, run)
        return sent.count(0) - number

    assert count(1) == count(5) == 1


# ---------------------------------------------------------------- programs on ranks

KINDS: dict[str, Callable[..., Any]] = {
    "ddp_checkpoint": DDPCheckpointStrategy,
    "ddp_join": DDPJoinStrategy,
    "balanced_ddp": BalancedDDPStrategy,
}
IDIOMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda found: found.mean(dim=tuple(range(found.dim() - 1))),
    "flatten": lambda found: found.flatten(0, 1),
    "view": lambda found: found.view(-1, found.shape[-1]),
    "reshape": lambda found: found.reshape(-1, found.size(-1)),
    "flatten to the last": lambda found: found.flatten(end_dim=-2),
    "list": lambda found: torch.cat(list(found)),
    "loop": lambda found: torch.cat([found[index] for index in range(len(found))]),
    "numel": lambda found: torch.tensor([found.numel()]),
}
HOOKS = ("on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end", "on_train_epoch_end")


def numbers(total: int) -> Tensor:
    return torch.stack([torch.arange(total), torch.arange(total) ** 2], dim=1).double()


class Positives(Metric):
    """Keeps the rows whose first number is large, so that some ranks keep none."""

    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx="cat")

    def update(self, rows: Tensor) -> None:
        if (large := rows[rows[:, 0] > 5]).numel():
            self.rows.append(large)

    def compute(self) -> Tensor:
        rows = torch.cat(self.rows) if isinstance(self.rows, list) else self.rows
        return rows.sum()


class Collecting(LightningModule):
    """Collects rows, and gathers them at the end of each epoch as programs for `ddp` do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.positives = Positives()
        self.rows: list[Tensor] = []
        self.found: dict[str, dict[str, Any]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rows.append(batch[0])
        self.positives.update(batch[0])
        return self.scale * batch[0].mean()

    validation_step = test_step = predict_step = training_step

    def end(self, hook: str) -> None:
        rows = torch.cat(self.rows) if self.rows else torch.empty(0)
        found = self.all_gather({"rows": rows, "number": len(rows)})
        self.found[hook] = {name: idiom(found["rows"]).tolist() for name, idiom in IDIOMS.items()}
        self.found[hook]["samples"] = int(found["number"].sum())
        self.found[hook]["positives"] = float(self.positives.compute())
        self.positives.reset()
        self.rows.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


for hook in HOOKS:
    setattr(Collecting, hook, partialmethod(Collecting.end, hook))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("ddp_checkpoint", (6, 5, 4)),
        ("ddp_join", (7, 4, 2)),
        ("ddp_join", (7, 1, 0)),
        ("balanced_ddp", (13, 0, 0)),
        ("balanced_ddp", (7, 1, 0)),
    ],
)
def test_programs_for_ddp_get_the_value_of_all_samples(kind, counts):
    """Gather in every hook; each rank has its samples, and `balanced_ddp` shares all of them."""
    rows = numbers(sum(counts))
    data = TensorDataset(rows)
    part = range(len(data)) if kind == "balanced_ddp" else torch.arange(len(data)).split(counts)[RANK].tolist()
    loader = DataLoader(torch.utils.data.Subset(data, part), batch_size=3)
    module, made = Collecting(), trainer(strategy=KINDS[kind]())
    made.fit(module, loader)
    for run in (made.validate, made.test):
        run(module, loader, verbose=False)
    made.predict(module, loader, return_predictions=False)
    assert sorted(module.found) == sorted(HOOKS)
    for values in module.found.values():
        assert values.pop("samples") == len(rows)
        assert values.pop("positives") == rows[rows[:, 0] > 5].sum()
        assert values.pop("numel") == [2 * len(rows)]
        torch.testing.assert_close(torch.tensor(values.pop("mean")).double(), rows.mean(0))
        assert len(values) == 6
        for of_idiom in values.values():
            assert sorted(of_idiom) == rows.tolist()
