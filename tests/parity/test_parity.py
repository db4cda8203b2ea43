"""Every row of the table under every column. One launch of ranks trains all rows of a column, one after another."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.parity.columns import COLUMNS, Row
from tests.parity.rows import ROWS, train_alone, train_row
from tests.strategies.toolkit import run_cases, run_on_ranks, values_of
from tests.support.devices import tolerance, virtual_devices_lack

# Parts of warnings that rows without `warns` do not have.
WARNINGS = ("communicates between ranks", "the value of rank 0 is kept", "the loader has drawn")


def columns_of(row: Row) -> list[str]:
    return list(row.columns or (column for column, strategy in COLUMNS.items() if strategy.is_default))


def is_slow(column: str, number: int, row: Row) -> bool:
    """Return False for one of the row's strategies on ranks under the Trainer and one under Fabric, and for others."""
    is_fabric = COLUMNS[column].is_fabric
    alike = [name for name in columns_of(row) if COLUMNS[name].ranks and COLUMNS[name].is_fabric == is_fabric]
    return column in alike and column != alike[number % len(alike)]


def has_control(column: str, name: str) -> bool:
    """Return True for one column of a row whose weights matter: that wrong ones show is due to its data and model."""
    number, row = list(ROWS).index(name), ROWS[name]
    return row.wrong is not None and column == next(one for one in columns_of(row) if not is_slow(one, number, row))


def marks_of(column: str, number: int, row: Row) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.slow] if is_slow(column, number, row) else []
    if COLUMNS[column].is_fabric:
        marks.append(pytest.mark.cpu_only("sets up Fabric on CPUs"))
    return [*marks, virtual_devices_lack(row.lacking)] if row.lacking else marks


CELLS = [
    pytest.param(column, name, marks=marks_of(column, number, row), id=f"{column}-{name}")
    for column in COLUMNS
    for number, (name, row) in enumerate(ROWS.items())
    if column in columns_of(row)
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Any:
    """Return a function of a column that trains the rows that have been selected, and their negative controls."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    selected = [(call.params["column"], call.params["name"]) for call in calls if call is not None]
    found: dict[str, dict[str, list[Any]]] = {}

    def results_of(column: str) -> dict[str, list[Any]]:
        if column not in found:
            names = [name for other, name in selected if other == column]
            cases = {name: partial(train_row, column, name, False) for name in names}
            cases |= {
                f"{name}, wrong": partial(train_row, column, name, True) for name in names if has_control(column, name)
            }
            if COLUMNS[column].ranks:
                found[column] = run_on_ranks(COLUMNS[column].ranks, cases, timeout=200)
            else:
                found[column] = {name: [run] for name, run in run_cases(cases, "").items()}
        return found[column]

    return results_of


@pytest.mark.parametrize(("column", "name"), CELLS)
def test_a_row_trains_as_one_process_or_is_refused(results, column, name):
    row, found = ROWS[name], results(column)
    if row.refused:
        for rank, error in enumerate(found[name]):
            assert row.refused.format(rank) in str(error), error
        return
    runs = values_of(found, name)
    if row.warns is not None:
        warned = [one for run in runs for one in run.warned if any(part in one for part in WARNINGS)]
        assert [row.warns[0] in one for one in warned] == [True] * row.warns[1], warned
    if not row.is_exact:
        assert len({run.digests[-1] for run in runs}) == 1
        return
    first = 0 if row.windows == 1 else -1  # within a window, ranks have integers of their own
    assert all(run.digests[first:] == runs[0].digests[first:] != [] for run in runs)
    for run in runs:
        assert all(map(torch.equal, run.parameters, runs[0].parameters))
    alone, run = train_alone(column, name), runs[0]
    assert all(one.found == alone.found for one in runs)
    if row.validates and not COLUMNS[column].is_fabric:
        for one in runs:
            assert one.values[first:] == [pytest.approx(values, rel=1e-9) for values in alone.values[first:]]
    assert len(run.parameters) == len(alone.parameters) > 0
    # Of tensors, since Python's `max` may skip a nan.
    assert difference(torch.cat(run.parameters), torch.cat(alone.parameters)) < tolerance(row.tolerance)
    if has_control(column, name):
        wrong = values_of(found, f"{name}, wrong")[0]
        assert difference(wrong.parameters[-1], alone.parameters[len(wrong.parameters) - 1]) > 1e-6, "control"


def difference(own: Any, other: Any) -> float:
    return float((own - other).abs().max())
