"""The first training step on a batch and on its parts, in a run of one process."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_ddp_ext._lightning import Callback, LightningModule, Trainer
from lightning_ddp_ext.batches.label_counts import TokenCount
from lightning_ddp_ext.errors import ImpossibleError
from lightning_ddp_ext.verification.differences import Culprit
from lightning_ddp_ext.verification.replay import BatchReplay
from lightning_ddp_ext.verification.report import Check, join_names, show_line
from lightning_ddp_ext.verification.runs import Stopped, quiet_trainer
from lightning_ddp_ext.verification.samples import Samples
from lightning_ddp_ext.verification.step_check import StepFinding, check_step


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What one process has found: on the parts of a batch, and the operations of the step on each part alone."""

    finding: StepFinding
    tokens: list[float] | None  # of the parts

    @property
    def weight_by(self) -> str | None:
        """The `weight_by` of a strategy that has the gradient of one process; None if there is none."""
        is_tokens = self.finding.divided_at is not None and _agree(self.tokens, self.finding.weights)
        return "tokens" if is_tokens else self.finding.weight_by


class _FirstStepCallback(Callback):
    """Checks the first training step, and ends the run."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.found: FirstStep | None = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        replay = BatchReplay(trainer, pl_module, batch, batch_idx)
        assert replay.batch is not None
        sizes = self._samples.sizes()
        whole, parts = self._samples.cut(sizes)
        with replay.training_unaffected():
            finding = check_step(replay, whole, parts, sizes)
        self.found = FirstStep(finding, _count_tokens(parts))
        raise Stopped


def _count_tokens(parts: Sequence[Any]) -> list[float] | None:
    try:
        return [TokenCount()(part) for part in parts]
    except (TypeError, ValueError):
        return None


def check_first_step(module: LightningModule, samples: Samples, precision: Any) -> FirstStep:
    """Check the first step of a run of one process."""
    callback = _FirstStepCallback(samples)
    trainer = quiet_trainer(callbacks=[callback], precision=precision, devices=1)
    with suppress(Stopped):
        trainer.fit(module, samples.loader(samples.sizes(), None, 1))
    if callback.found is None:
        raise ImpossibleError("training ended before its first step")
    return callback.found


def _agree(counts: Sequence[float] | None, weights: Sequence[float] | None) -> bool:
    total = sum(counts or ())
    return bool(counts and total and weights) and all(
        abs(count / total - weight) < 1e-6 for count, weight in zip(counts or (), weights or (), strict=True)
    )  # fmt: skip


def check_gradient(found: FirstStep) -> Iterator[Check]:
    """Say what the parts of a batch say about its gradient."""
    finding, name, is_tokens = found.finding, "gradient of a batch", found.weight_by == "tokens"
    if finding.weight_by == "samples":
        yield Check(name, "ok", f"the mean of its parts by samples, up to {finding.difference:.0e}")
    elif finding.weight_by is not None:
        text, remedy = (
            "the sum of its parts: the loss is a sum, of which `ddp` takes the mean",
            'set `weight_by="sum"`',
        )
        yield Check(name, "finding", text, show_line(finding.divided_at), remedy)
    elif finding.divided_at is not None:
        remedy = 'set `weight_by="tokens"`' if is_tokens else "set `weight_by` to a function that returns this number"
        yield Check(
            name, "finding", "a mean over something other than samples: this line has what it divides by",
            show_line(finding.divided_at), remedy,
        )  # fmt: skip
    elif finding.draws:
        yield Check(name, "note", f"not compared with its parts: {finding.draws}", compared=False)
    else:
        hidden = f"most in `{finding.parameter}`, in code that hides operations, or hardly above rounding"
        culprit = finding.culprit or Culprit(None, hidden)
        text = f"does not follow from its parts: {culprit.meaning}"
        yield Check(name, "finding", text, show_line(culprit.line), culprit.remedy)
    if finding.batch_norms:
        shown = join_names([f"`{one}`" for one in finding.batch_norms])
        yield Check(
            "batch normalisation", "note", f"each device normalises its own samples: {shown}",
            remedy="`sync_batchnorm=True` normalises those of all devices",
        )  # fmt: skip
