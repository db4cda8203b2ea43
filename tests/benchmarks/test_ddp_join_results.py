"""What the benchmark of `ddp_join` says about its measurements."""

import io
import json

import pytest
from measuring import joins
from measuring.joining import ACCELERATE, JOIN
from measuring.models import TINY
from rich.console import Console

from tests.benchmarks.measurements import collect


def pairs_result(pairs, failures=(), **options):
    """Contenders take 0.018 s each, their references 0.02 s."""
    times = {reference: 0.02 for _, reference in pairs.values()} | {one: 0.018 for one, _ in pairs.values()}
    times = {name: time for name, time in times.items() if name not in failures}
    return joins.PairsResult(collect(times, **options), pairs, dict.fromkeys(failures, "UserWarning: no effect"))


def test_tables_of_uneven_data_fit_into_100_columns():
    uneven = {TINY: pairs_result(joins.pair_uneven(), [ACCELERATE]), "MLP": pairs_result(joins.pair_uneven())}
    file = io.StringIO()
    Console(file=file, width=100).print(
        joins.make_even_table({TINY: pairs_result(joins.pair_even())}, any_load=False),
        joins.make_uneven_table(uneven, any_load=False),
        joins.make_uneven_phase_table({TINY: pairs_result(joins.pair_tail())}, any_load=False),
        joins.make_redirection_table(pairs_result(joins.pair_redirections())),
        *joins.explain_failures({**uneven, "conv net": uneven[TINY]}),
    )
    text = file.getvalue()
    assert "…" not in text
    assert text.count("0.90 [0.90, 0.90]") == 2 + 3 + 4 + 4 + 11
    assert text.count("nothing in place") == 3 + 2 + 2
    assert text.count(f"{ACCELERATE}: UserWarning: no effect") == 1


def test_a_contender_that_failed_has_no_ratio():
    result = pairs_result(joins.pair_uneven(), [ACCELERATE])
    assert result.ratio(ACCELERATE) is None
    assert result.ratio(JOIN).median == pytest.approx(0.9)
    written = json.loads(json.dumps(result.to_json()))
    assert written["failures"] == {ACCELERATE: "UserWarning: no effect"}
    assert ACCELERATE not in written["seconds"]
