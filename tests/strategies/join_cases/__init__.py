"""Cases that ranks with different amounts of data run one after another, in one launch."""

from tests.strategies.join_cases import (  # noqa: F401, each adds its cases
    batch_samplers,
    changing,
    evaluation,
    loading,
    refusals,
    resuming,
    samplers,
    steps,
    training,
)
from tests.strategies.join_cases.casing import run_cases

__all__ = ["run_cases"]
