"""Checks of the reducer that ranks run one after another in one launch; each returns a number or raises."""

import traceback

import torch
import torch.distributed as dist

from tests.reducer.reducer_checks import buffer_structure, buffers, graphs, hooks, synchronisation, tensors, weights
from tests.reducer.reducer_checks.checking import CHECKS

__all__ = [
    "CHECKS",
    "buffer_structure",
    "buffers",
    "graphs",
    "hooks",
    "run_checks",
    "synchronisation",
    "tensors",
    "weights",
]


def run_checks() -> dict[str, object]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, object] = {}
    for name, function in CHECKS.items():
        try:
            torch.manual_seed(0)
            results[name] = function()
        except Exception:
            results[name] = traceback.format_exc()
    return results
