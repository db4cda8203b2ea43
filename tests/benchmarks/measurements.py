"""Measurements of contenders that always take the same times."""

from contextlib import nullcontext

from measuring.rounds import MOST_BY_OTHERS, Burst, collect_rounds

QUIET, BUSY = MOST_BY_OTHERS / 2, MOST_BY_OTHERS * 2


def burst(seconds, by_others=QUIET):
    return Burst(30, seconds, seconds, seconds, by_others, 0.5, {"start_up": 0.1, "first_step": 0.2})


def collect(times, by_others=lambda round_: QUIET, **options):
    """Rounds of contenders that always take the same times."""
    started = []

    def run(name):
        started.append(name)
        return burst(times[name], by_others((len(started) - 1) // len(times)))

    options = {"wanted": 8, "at_most": 12, "any_load": False, **options}
    contenders = {name: lambda name=name: run(name) for name in times}
    return collect_rounds(lambda: nullcontext(contenders), **options)
