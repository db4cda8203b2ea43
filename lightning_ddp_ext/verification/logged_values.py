"""Logged values of ranks, beside each other and beside one process."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_ddp_ext.verification.report import Check, join_names, show_line
from lightning_ddp_ext.verification.runs import Outcome, Run

_LOGGED = 1e-6  # difference of logged values that is rounding
_SUMS = "use a metric that adds up sums and counts over ranks, such as torchmetrics' `MeanMetric` with `weight`"


def check_logged(outcomes: Sequence[Outcome], run: Run, alone: Outcome | None) -> Iterator[Check]:
    """Compare the logged values of ranks, and the ones that all ranks share with one process, if it trains alike."""
    lines, monitored = outcomes[0].lines, outcomes[0].monitored
    expected = {} if alone is None else alone.logged
    own, changed, partly = [], [], []
    for key in {key: None for one in outcomes for key in one.logged}:
        name, where = f"logged `{key}`", show_line(_line_of(lines, key))
        values = [one.logged[key] for one in outcomes if key in one.logged]
        shown = ", ".join(f"{value:.4g}" for value in values)
        if len({*values}) == 1 and len(values) == len(outcomes):
            reference = expected.get(key, values[0])
            if not math.isclose(values[0], reference, rel_tol=_LOGGED, abs_tol=_LOGGED):
                changed.append(key)
                if key in monitored:
                    text = f"it is monitored, and is {values[0]:.4g} on ranks, but {reference:.4g} in one process"
                    yield Check(name, "finding", text, where, _SUMS)
        elif run.shares:  # the run of `ddp` has shown it
            continue
        elif len(values) < len(outcomes) and key in monitored:
            yield Check(name, "finding", "it is monitored, but only some ranks log it", where, "log it on all ranks")
        elif len(values) < len(outcomes):
            partly.append(key)
        elif key in monitored:
            text = f"it is monitored, and each rank has its own value: {shown}"
            yield Check(name, "finding", text, where, "log it with `sync_dist=True`")
        else:
            own.append(key)
    for keys, text, remedy in (
        (partly, "only some ranks log {}", "log them on all ranks if anything is to monitor them"),
        (own, "each rank has its own {}; the logger writes those of rank 0", "log them with `sync_dist=True`"),
        ([key for key in changed if key not in monitored], "{} differ from one process", _SUMS),
    ):
        if keys:
            text = text.format(join_names([f"`{key}`" for key in keys]))
            yield Check("logged values", "note", text, show_line(_line_of(lines, keys[0])), remedy)


def _line_of(lines: Mapping[str, Any], key: str) -> Any:
    """Return the line that logs a key, which may end with what Lightning appends."""
    return next((line for name, line in lines.items() if key in (name, f"{name}_step", f"{name}_epoch")
                 or key.startswith(f"{name}/dataloader_idx")), None)  # fmt: skip
