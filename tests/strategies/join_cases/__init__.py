"""Cases that ranks with different amounts of data run one after another, in one launch."""

from tests.strategies.join_cases import batch_samplers, evaluation, refusals, resuming, samplers, steps, training
from tests.strategies.join_cases.casing import run_cases

__all__ = ["batch_samplers", "evaluation", "refusals", "resuming", "run_cases", "samplers", "steps", "training"]
