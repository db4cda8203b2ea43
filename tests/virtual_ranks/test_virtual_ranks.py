"""Runs of 8 virtual ranks have the same bits on 1, 2, 3, 4 and 8 ranks, and if their number changes on the way."""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDDPStrategy
from lightning_ddp_ext.consistency import hash_training_state
from lightning_ddp_ext.resume.rng_state import capture_rng_state
from tests.strategies.toolkit import CaseError, run_on_ranks, trainer, values_of
from tests.virtual_ranks.models import MODELS, Images

pytestmark = pytest.mark.timeout(900)

VIRTUAL, BATCH = 8, 16
QUICK = (1, 2, 3)
CHANGES = {"1, 3, 2, 4": (1, 3, 2, 4), "3, 1, 2, 3": (3, 1, 2, 3)}  # numbers of ranks of one run
STOPS = (1, 3, 4)  # optimizer steps after which it changes


class OtherShares(Callback):
    """Changes the shares before every second batch, as measured times do, and saves when the run is interrupted."""

    def __init__(self, path: str = "", stop: int = -1) -> None:
        self.path, self.stop = path, stop

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        table, ranks = trainer.strategy._table, trainer.world_size
        if table.begun % 2 == 0:
            speeds = [1.0 + (3 * rank + table.begun) % 4 for rank in range(ranks)]
            shares = [speed / sum(speeds) for speed in speeds]
            table.change(table.begun + table.lead + 1, shares, [None] * ranks)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.stop and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(self.path)


def make_ddp(**_: Any) -> DDPStrategy:
    return DDPStrategy()


CONTROLS: dict[str, Callable[..., Any]] = {
    "balanced_ddp": partial(BalancedDDPStrategy, balance="even"),
    "ddp": make_ddp,
}


def train(
    name: str, folder: str, phase: int | None = None, changes: bool = False, make: Callable[..., Any] | None = None
) -> tuple[str, str]:
    """Train for two epochs, or in one phase of a run; return hashes of the training state and of the RNG state."""
    model = MODELS[name]
    slug = name.replace(" ", "_")
    stop = STOPS[phase] if phase is not None and phase < len(STOPS) else -1
    callbacks = [one() for one in model.callbacks]
    if changes or phase is not None:
        callbacks.append(OtherShares(f"{folder}/{slug}{phase}.ckpt", stop))
    seed_everything(7 if not phase else 70 + phase, verbose=False)  # the checkpoint has the seed of the run
    strategy = (make or partial(BalancedDDPStrategy, virtual_ranks=VIRTUAL))(**model.strategy)
    options = {"precision": "32-true", "max_epochs": 2, "max_steps": stop, **model.trainer}
    options["use_distributed_sampler"] = make is make_ddp
    made = trainer(*callbacks, strategy=strategy, **options)
    module: LightningModule = model.make()
    batch_size = BATCH // made.world_size if make is make_ddp else BATCH
    loader = DataLoader(Images(model.samples), batch_size=batch_size, shuffle=True)
    made.fit(module, loader, ckpt_path=f"{folder}/{slug}{phase - 1}.ckpt" if phase else None)
    rng = repr(sorted(capture_rng_state().items(), key=lambda pair: pair[0]))
    return hash_training_state(module, made.optimizers), hashlib.sha256(rng.encode()).hexdigest()


CASES = {name: partial(train, name) for name in MODELS}


@pytest.fixture(scope="module")
def on_ranks() -> Callable[[int], Any]:
    """Return the results of all models on a number of ranks, which train once."""
    known: dict[int, Any] = {}

    def results(ranks: int) -> Any:
        if ranks not in known:
            known[ranks] = run_on_ranks(ranks, CASES, timeout=500)
        return known[ranks]

    return results


def ranks_and_models(numbers: Sequence[int]) -> list[Any]:
    return [
        pytest.param(ranks, name, marks=[] if ranks in QUICK else pytest.mark.slow)
        for ranks in numbers
        for name in MODELS
    ]


@pytest.mark.parametrize(("ranks", "name"), ranks_and_models((2, 3, 4, 8)))
def test_any_number_of_ranks_computes_the_same_bits(on_ranks: Callable[[int], Any], ranks: int, name: str) -> None:
    (expected,) = values_of(on_ranks(1), name)
    assert values_of(on_ranks(ranks), name) == [expected] * ranks


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return the results of all models in a run whose number of ranks changes."""
    known: dict[str, Any] = {}

    def results(change: str) -> Any:
        if change not in known:
            folder: Path = tmp_path_factory.mktemp("changing")
            found = {}
            for phase, ranks in enumerate(CHANGES[change]):
                found = run_on_ranks(
                    ranks, {name: partial(train, name, phase=phase) for name in MODELS}, folder, timeout=500
                )
                errors = [str(one) for values in found.values() for one in values if isinstance(one, CaseError)]
                assert not errors, "\n".join(errors)
            known[change] = found
        return known[change]

    return results


@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param(change, name, marks=[] if change == "3, 1, 2, 3" else pytest.mark.slow)
        for change in CHANGES
        for name in MODELS
    ],
)
def test_ranks_and_shares_may_change_within_an_epoch(
    on_ranks: Callable[[int], Any], changing: Callable[[str], Any], change: str, name: str
) -> None:
    (expected,) = values_of(on_ranks(1), name)
    assert values_of(changing(change), name) == [expected] * CHANGES[change][-1]


@pytest.fixture(scope="module")
def controls() -> dict[str, Any]:
    """Return the results of all models without virtual ranks, on 1 and 2 ranks."""
    return {
        control: [
            run_on_ranks(ranks, {name: partial(train, name, make=make) for name in MODELS}, timeout=500)
            for ranks in (1, 2)
        ]
        for control, make in CONTROLS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_without_virtual_ranks_the_bits_differ(controls: dict[str, Any], control: str) -> None:
    equal = []
    for name in MODELS:
        alone, of_two = (values_of(found, name) for found in controls[control])
        equal += [name for state, _ in of_two if state == alone[0][0]]
    assert equal == []
