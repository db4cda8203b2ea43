"""Which rows of the table of parity Lightning's `ddp` trains as one process does: the error of the parameters.

Run it with `python benchmarks/parity.py`; it takes less than a minute. The strategies of this package train all rows
with an error below 1e-11, see `tests/parity`.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `tests`

from tests.parity.columns import COLUMNS, Column
from tests.parity.rows import train_alone, train_row
from tests.strategies.toolkit import CaseError, run_on_ranks

ROWS = ("momentum", "accumulated over 3, clipped", "steps by the loss", "partly used", "language")
COLUMNS["ddp"] = Column(lambda weight_by, **options: DDPStrategy(**options), is_even=True)


def train(name: str, folder: str) -> Any:
    """Train a row on this rank, which has not run the lines above if it was forked."""
    return train_row("ddp", name)


def main() -> None:
    """Train all rows and print a line for each."""
    from benchmarks import parity  # by the name that ranks import

    found = run_on_ranks(2, {name: partial(parity.train, name) for name in ROWS})
    for name in ROWS:
        run = found[name][0]
        if isinstance(run, CaseError):
            print(f"{name}: {run.strip().splitlines()[-1][:100]}")
            continue
        pairs = zip(run.parameters, train_alone("ddp", name).parameters, strict=True)
        print(f"{name}: error {max(float((own - other).abs().max()) for own, other in pairs):.1e}")


if __name__ == "__main__":
    main()
