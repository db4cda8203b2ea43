"""The reducer on real processes, against one process with the batches of all ranks."""

import pytest
from measuring.scenarios import MODES, SCENARIOS

from tests.reducer import reducer_ranks as ranks
from tests.support.processes import run_processes


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_scenario_gives_the_gradient_of_one_process_and_identical_ranks(world_size, capsys):
    verdicts = run_processes(ranks.play_matrix, world_size, timeout=120)
    cells = {(name, mode) for name, mode, _ in verdicts[0]}
    failed = {cell: verdict for by_cell in verdicts for cell, verdict in by_cell.items() if not verdict.passed}
    with capsys.disabled():
        print(
            f"\n{len(cells - {cell[:2] for cell in failed})} of {len(cells)} scenario cells on {world_size} ranks ",
            end="",
        )
    assert not failed
    assert len(cells) == len(SCENARIOS) * len(MODES) == 36


def test_equal_weights_fail_every_scenario():
    """The negative control: the batches of the scenarios differ in size."""
    verdicts = run_processes(ranks.play_matrix_with_equal_weights, 2, timeout=120)
    assert not any(verdict.passed for verdict in verdicts[0].values())


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_graphs(seed):
    _fuzz(seed, steps=40)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 34))
def test_more_random_graphs(seed):
    _fuzz(seed, steps=100)


def _fuzz(seed, steps):
    results = run_processes(ranks.fuzz, 2 + seed % 2, seed, steps, timeout=120)
    for error, difference, synchronizations in results:
        assert error < 1e-9
        assert difference == 0.0
        assert synchronizations > steps
