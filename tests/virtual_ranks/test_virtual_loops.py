"""Loops of Fabric over virtual ranks: the same bits on any number of ranks, the gradient of one process, and misuse."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ddp_ext import RanksOutOfStepError, UnsupportedFeatureError, UnsynchronizedGradientsError
from lightning_ddp_ext.consistency import hash_training_state
from lightning_ddp_ext.fabric import BalancedDDPStrategy
from tests.strategies.toolkit import WORLD_SIZE, gather, run_on_ranks, values_of
from tests.virtual_ranks.models import MODELS, Images

pytestmark = pytest.mark.timeout(600)

VIRTUAL = 4


def launched(**options: Any) -> Fabric:
    strategy = BalancedDDPStrategy(**{"virtual_ranks": VIRTUAL, **options})
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=WORLD_SIZE)
    fabric.launch()
    return fabric


# ---------------------------------------------------------------- the same bits on any number of ranks


def train(
    name: str,
    folder: str = "",
    accumulated: int = 1,
    phase: int | None = None,
    virtual_ranks: int | None = VIRTUAL,
    shares: Sequence[float] = (1, 3, 2),  # none follow the measured speed
) -> str:
    """Train for two epochs, or in one phase of a run; return the hash of the training state."""
    model = MODELS[name]
    options: dict[str, Any] = {"split": shares[:WORLD_SIZE]} if shares and WORLD_SIZE > 1 else {}
    fabric = launched(virtual_ranks=virtual_ranks, **options, **model.strategy)
    fabric.seed_everything(7 + 10 * (phase or 0), verbose=False)
    own = model.make()
    own.log = lambda *_, **__: None  # type: ignore[method-assign]
    module, optimizer = fabric.setup(own, own.configure_optimizers())
    module.mark_forward_method("training_step")
    loader = fabric.setup_dataloaders(DataLoader(Images(model.samples), batch_size=16, shuffle=True))
    evaluated = fabric.setup_dataloaders(DataLoader(Images(6), batch_size=4))
    state = {"module": own, "optimizer": optimizer, "epoch": 0, "step": 0}
    if phase:
        fabric.load(Path(folder) / f"{phase - 1}.ckpt", state)
    for epoch in range(state["epoch"], 2):
        state["epoch"] = epoch
        for number, batch in enumerate(loader):
            ends = (number + 1) % accumulated == 0 or number + 1 == len(loader)
            for part in fabric.strategy.parts(batch):
                with fabric.no_backward_sync(module, enabled=not ends):
                    fabric.backward(module.training_step(part, number) / accumulated)
            if ends:
                optimizer.step()
                optimizer.zero_grad()
            state["step"] += 1
            if (phase == 0 and state["step"] == 1) or (phase == 1 and state["step"] == 4):
                fabric.save(Path(folder) / f"{phase}.ckpt", state)
                return ""
        own.eval()
        for batch in evaluated:  # parts of this rank, without a backward pass
            for images, _ in batch if virtual_ranks else [batch]:
                own.network(images)
        own.train()
    return hash_training_state(own, [optimizer.optimizer])


CASES: dict[str, Callable[[str], Any]] = {
    **{name: partial(train, name) for name in ("convolutions with batch normalisation", "transformer with dropout")},
    "uneven weights, windows of two": partial(train, "accumulation", accumulated=2),
    "a last batch of one sample": partial(train, "moving average", accumulated=2),
}
CONTROL = "without virtual ranks"


def take_turns(_: str) -> str:
    """Train two modules in turn on each batch, whose gradients meet in the first one."""
    fabric = launched()
    fabric.seed_everything(1, verbose=False)
    first, second = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Dropout(0.2)), nn.Linear(3, 3)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (first, second)]
    first, optimizers[0] = fabric.setup(first, optimizers[0])
    second, optimizers[1] = fabric.setup(second, optimizers[1])
    loader = fabric.setup_dataloaders(DataLoader(Images(20), batch_size=6))
    for batch in loader:
        for optimizer, is_second in zip(optimizers, (False, True), strict=True):
            optimizer.zero_grad()
            for images, labels in fabric.strategy.parts(batch):
                outputs = second(first(images)) if is_second else first(images)
                fabric.backward(functional.cross_entropy(outputs, labels))
            optimizer.step()
    return hash_training_state(nn.ModuleList([first, second]), [one.optimizer for one in optimizers])


@pytest.fixture(scope="module")
def on_ranks() -> dict[int, Any]:
    """Return the results of all cases on 1, 2 and 3 ranks."""
    cases = {**CASES, "two modules": take_turns, CONTROL: partial(train, "accumulation", virtual_ranks=None)}
    return {ranks: run_on_ranks(ranks, cases, timeout=200) for ranks in (1, 2, 3)}


@pytest.mark.parametrize("name", [*CASES, "two modules"])
def test_any_number_of_ranks_computes_the_same_bits(on_ranks: dict[int, Any], name: str) -> None:
    (expected,) = values_of(on_ranks[1], name)
    for ranks in (2, 3):
        assert values_of(on_ranks[ranks], name) == [expected] * ranks


def test_without_virtual_ranks_the_bits_differ(on_ranks: dict[int, Any]) -> None:
    assert len({value for of_ranks in on_ranks.values() for value in values_of(of_ranks, CONTROL)}) > 1


def test_a_run_continues_within_an_epoch_on_another_number_of_ranks(on_ranks: dict[int, Any], tmp_path: Path) -> None:
    name = "convolutions with batch normalisation"
    for phase, ranks in enumerate((3, 1, 2)):
        found = run_on_ranks(ranks, {name: partial(train, name, phase=phase, shares=())}, tmp_path)
        values_of(found, name)
    assert {*values_of(found, name)} == {*values_of(on_ranks[1], name)}


# ---------------------------------------------------------------- the gradient of one process


def loss_of(weight: Tensor, x: Tensor, rule: Any) -> Tensor:
    losses = (weight * x - 1).square()
    return losses.sum() if rule == "sum" else losses.mean()


def weight_of(batch: Any) -> float:
    return float(batch[0].sum())


def accumulate(rule: Any, window: int, is_dropped: bool, folder: str = "") -> list[float]:
    """Return the gradients after each of four batches of a rank, of which windows add up some."""
    fabric = launched(weight_by=rule)
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    model = fabric.setup(model)
    data = TensorDataset(torch.arange(1.0, 16.0, dtype=torch.float64)[:, None])
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4))
    gradients = []
    for number, batch in enumerate(loader):
        if is_dropped and number == 1:
            model.zero_grad()
        with fabric.no_backward_sync(model, enabled=(number + 1) % window != 0):
            for (x,) in fabric.strategy.parts(batch):
                divisor = 1 if rule == "sum" else window
                fabric.backward(loss_of(model(torch.ones_like(x)), x, rule) / divisor)
        gradients.append(float(model.weight.grad))
    return gradients


def of_one_process(rule: Any, window: int, is_dropped: bool) -> list[float]:
    """Return the gradients at the end of each window, which nothing zeroes between windows."""
    batches = torch.arange(1.0, 16.0, dtype=torch.float64)[:, None].split(4)
    found, total, sums, weights, length = [], 0.0, 0.0, 0.0, 0
    for number, batch in enumerate(batches):
        if is_dropped and number == 1:
            total = sums = weights = length = 0
        for part in torch.tensor_split(batch, VIRTUAL):
            if len(part):
                weight = torch.ones((), dtype=torch.float64, requires_grad=True)
                loss_of(weight, part, rule).backward()
                factor = weight_of([part]) if callable(rule) else 1.0 if rule == "sum" else float(len(part))
                sums, weights = sums + factor * float(weight.grad), weights + factor
        length += 1
        if (number + 1) % window == 0:
            total += sums if rule == "sum" else sums / weights * length / window
            sums = weights = length = 0
            found.append(total)
    return found


WINDOWS = [*product(("samples", "sum", weight_of), (1, 2), (False, True))]


def accumulate_all(_: str) -> list[list[float]]:
    return [accumulate(*case) for case in WINDOWS]


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_those_of_one_process_also_without_zeroing(ranks: int) -> None:
    for of_rank in values_of(run_on_ranks(ranks, [accumulate_all]), accumulate_all):
        for case, found in zip(WINDOWS, of_rank, strict=True):
            window = case[1]
            assert found[window - 1 :: window] == pytest.approx(of_one_process(*case), rel=1e-12), case


# ---------------------------------------------------------------- misuse


def prepare(size: int = 8, **options: Any) -> tuple[Any, ...]:
    fabric = launched(**options)
    model = nn.Linear(1, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return fabric, model, optimizer, fabric.setup_dataloaders(DataLoader(torch.ones(size, 1), batch_size=4))


def use(loop: str) -> None:
    fabric, model, optimizer, loader = prepare()
    for number, batch in enumerate(loader):
        if loop == "early weight":
            fabric.strategy.batch_weight = 2.0
        if loop == "no loop over parts":
            fabric.backward(model(batch[0]).mean())
        if loop == "local gradients":
            model(batch[0]).mean().backward()
        for part in fabric.strategy.parts(batch):
            if loop == "all-reduce":
                fabric.all_reduce(part)
            if loop == "clip":
                fabric.clip_gradients(model, optimizer, clip_val=1.0)
            if loop == "step":
                optimizer.step()
            if loop == "zeros":
                optimizer.zero_grad()
            loss = model(part).mean()
            if loop != "no backward":
                fabric.backward(loss, **({"retain_graph": True} if loop == "two passes" else {}))
            if loop == "two passes":
                fabric.backward(loss)
            if loop == "break" or (loop == "last break" and number == len(loader) - 1):
                break


MISUSE = {
    "no loop over parts": (RanksOutOfStepError, r"`fabric.backward` is called outside of it\. Call it once in"),
    "local gradients": (UnsynchronizedGradientsError, "a batch begins with gradients that have not been synchronised"),
    "all-reduce": (UnsupportedFeatureError, "`all_reduce` was called for one virtual rank"),
    "clip": (UnsupportedFeatureError, "`clip_gradients_value` was called for one virtual rank"),
    "step": (UnsupportedFeatureError, "`optimizer_step` was called for one virtual rank"),
    "zeros": (UnsynchronizedGradientsError, r"gradients were dropped between the parts of a batch\. Call `zero_grad`"),
    "no backward": (RanksOutOfStepError, "virtual rank 0 has made no backward pass, for which other ranks wait"),
    "two passes": (RanksOutOfStepError, "`fabric.backward` is called again in the same part"),
    "break": (RanksOutOfStepError, r"a loop over `fabric.strategy.parts` has ended before its last part.*`break`"),
    "last break": (RanksOutOfStepError, "a loop over `fabric.strategy.parts` has ended before its last part"),
    "early weight": (UnsupportedFeatureError, "`fabric.strategy.batch_weight` was set outside of the loop over the"),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("loop", MISUSE)
def test_misuse_of_parts_is_an_error_that_names_the_remedy(loop: str) -> None:
    error, text = MISUSE[loop]
    with pytest.raises(error, match=text):
        use(loop)


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.ranks(1)
def test_what_parts_do_not_support_is_refused() -> None:
    fabric, model, _, loader = prepare()
    other = fabric.setup_dataloaders(DataLoader(torch.ones(8, 1), batch_size=4))
    for batch, _ in zip(loader, other, strict=True):
        with pytest.raises(UnsupportedFeatureError, match="Iterate over the parts of one loader before the next one"):
            next(fabric.strategy.parts(batch))
    with pytest.raises(UnsupportedFeatureError, match=r"needs a module of `fabric.setup`, and the batch that a loop"):
        next(fabric.strategy.parts([torch.ones(1)]))
    with pytest.raises(UnsupportedFeatureError, match="an iterable dataset"):
        fabric.setup_dataloaders(DataLoader(Numbers(), batch_size=2))
    for batch in loader:
        for given, other in ((batch[1:], []), (batch, loader)):  # a part is missing; another loop over the loader
            next(iter(other), None)
            with pytest.raises(UnsupportedFeatureError, match="the batch that a loop over a loader"):
                next(fabric.strategy.parts(given))
    with pytest.raises(UnsupportedFeatureError, match="such as those of L-BFGS"):
        torch.optim.LBFGS(model.parameters()).step(lambda: torch.zeros(()))
    with pytest.raises(ValueError, match="`virtual_ranks=4` and `cost` exclude each other"):
        BalancedDDPStrategy(virtual_ranks=4, cost=len)


@pytest.mark.ranks(3)
def test_a_rank_without_a_part_takes_part_in_the_step() -> None:
    fabric, model, optimizer, loader = prepare(size=6)
    shadows = []
    for batch in loader:
        optimizer.zero_grad()
        for part in fabric.strategy.parts(batch):
            fabric.backward(model(part).mean())
        shadows.append(fabric.strategy.is_shadow)
        optimizer.step()
        assert float(model.bias.grad) == 1.0
    assert gather(shadows) == [[False, False], [False, False], [False, True]]
    assert len({*gather(hash_training_state(model, [optimizer.optimizer]))}) == 1


@pytest.mark.ranks(1)
def test_without_virtual_ranks_a_batch_is_its_only_part() -> None:
    fabric, *_, loader = prepare(virtual_ranks=None)
    assert [torch.equal(part, batch) for batch in loader for part in fabric.strategy.parts(batch)] == [True, True]


def alternate() -> None:
    """Accumulate gradients of two modules in turn, which are divided by the weights of both."""
    fabric, model, _, loader = prepare()
    other = fabric.setup(nn.Linear(1, 1))
    for batch in loader:
        for one in (model, other):
            with fabric.no_backward_sync(one):
                for part in fabric.strategy.parts(batch):
                    fabric.backward(one(part).mean())


@pytest.mark.ranks(1)
def test_accumulation_of_two_modules_in_turn_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="names another module than in the last backward pass"):
        alternate()


@pytest.mark.ranks(1)
def test_weights_are_set_in_each_loop_over_parts() -> None:
    """A loop over another loader may end in between."""
    fabric, model, _, loader = prepare(size=4)
    other = fabric.setup_dataloaders(DataLoader(torch.ones(8, 1), batch_size=4))
    for batch in loader:
        for part in chain(fabric.strategy.parts(batch), fabric.strategy.parts(batch)):
            assert len([*other]) == 2
            fabric.strategy.batch_weight = 3.0
            fabric.backward(model(part).mean())
    assert float(model.bias.grad) == 2.0


@pytest.mark.ranks(1)
def test_each_loop_over_the_parts_of_a_batch_draws_other_random_numbers() -> None:
    fabric, model, _, loader = prepare(size=4)
    drawn = []
    for batch in loader:
        for part in chain(fabric.strategy.parts(batch), fabric.strategy.parts(batch)):
            drawn.append(float(torch.rand(())))
            fabric.backward(model(part).mean())
    assert len({*drawn}) == 2 * VIRTUAL
