"""Processes that host contenders, and what they are given to do."""

import sys

import pytest
from measuring.command import measure, parse, start_parser
from measuring.contender import Contender, closing_all
from measuring.models import TOY
from measuring.redirecting import ACTIVE, BACKEND, DIRECT, MODE, RANKS, REPLACED, SMALL


def test_a_contender_that_fails_is_an_error_with_its_last_lines():
    contender = Contender("measuring.missing", "argument")
    with closing_all([contender]), pytest.raises(RuntimeError, match=r"(?s)measuring\.missing argument.*No module"):
        contender.run(steps=1)


@pytest.mark.slow
def test_peers_that_fail_leave_the_others(monkeypatch, tmp_path):
    """The quickest way to fail that there is: a peer whose processes do not even find its case."""
    monkeypatch.setattr(sys, "argv", ["command", "--quick", "--output", str(tmp_path)])
    options = parse(start_parser("", ["MLP"], "test"), "MLP")
    orders = {name: {"case": case, "strategy": "auto"} for name, case in (("good", TOY), ("bad", "missing"))}
    measurement, failures = measure("toys", "measuring.fitting", orders, options, may_fail=["bad"])
    assert failures == {"bad": "KeyError: 'missing'"}
    assert [set(round_) for round_ in measurement.rounds] == [{"good"}] * 6
    with pytest.raises(RuntimeError, match="KeyError: 'missing'"):
        measure("toys", "measuring.fitting", orders, options)


@pytest.mark.slow
def test_every_way_of_redirecting_reaches_the_ranks_that_have_data():
    """The contender fails if the sum over these ranks is not that of these ranks."""
    contender = Contender("measuring.redirecting", ranks=RANKS)
    ways = [(DIRECT, False), (BACKEND, False), (REPLACED, True), (MODE, True), (BACKEND, True)]
    with closing_all([contender]):
        for way, in_uneven_phase in ways:
            assert (
                contender.run(ranks=len(ACTIVE), work=SMALL, way=way, in_uneven_phase=in_uneven_phase, steps=10).steps
                == 10
            )
        with pytest.raises(RuntimeError, match="KeyError: 'missing'"):
            contender.run(ranks=len(ACTIVE), work=SMALL, way="missing", in_uneven_phase=True, steps=10)
