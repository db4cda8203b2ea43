"""Wrong arguments of constructors are errors that name the argument."""

import contextlib
import inspect
import io
import warnings

import pytest
from lightning.pytorch import Trainer

from lightning_ddp_ext import (
    BalancedDataParallelStrategy,
    DDPCheckpointStrategy,
    DDPExtError,
    DDPJoinStrategy,
    ExplicitDDPStrategy,
    ManualEnvironment,
)
from lightning_ddp_ext.callbacks import BalanceReport, GradientCheck, JoinReport, ReplicaConsistency
from lightning_ddp_ext.demo.byte_text import ByteTransformer, StdlibStream, StdlibText
from lightning_ddp_ext.demo.digits import DigitsCNN, DigitsData, SlowedDigitsCNN
from lightning_ddp_ext.strategies.builtin import ddp_strategy, fsdp_strategy
from tests.cli.mutations import MUTATIONS, SEED, SHARE, check_readable, draw_arguments

# Constructors with right arguments.
CONSTRUCTORS = {
    BalancedDataParallelStrategy: {},
    DDPCheckpointStrategy: {},
    DDPJoinStrategy: {},
    ddp_strategy: {},
    fsdp_strategy: {},
    BalanceReport: {},
    GradientCheck: {},
    JoinReport: {},
    ReplicaConsistency: {},
    ManualEnvironment: {"num_nodes": 2, "node_rank": 1, "main_address": "node1"},
    DigitsCNN: {},
    DigitsData: {},
    SlowedDigitsCNN: {"milliseconds_per_sample": [1.0]},
    ByteTransformer: {"depth": 1},
    StdlibText: {},
    StdlibStream: {},
}
BY_NAME = {kind.__name__: kind for kind in CONSTRUCTORS}
STRATEGIES = (BalancedDataParallelStrategy, DDPCheckpointStrategy, DDPJoinStrategy, ddp_strategy)


_ANYTHING = {"ddp_comm_state", "options", "unknown", "args", "self"}


def arguments_of(kind):
    names = set(inspect.signature(kind).parameters)
    if kind is DDPJoinStrategy:
        names |= set(inspect.signature(ExplicitDDPStrategy).parameters)
    extra = {"sharding_strategy", "state_dict_type"} if kind is fsdp_strategy else set()
    return sorted((names | extra) - _ANYTHING)


def complaint_about_error(argument, error):
    """Return why an error of a constructor is not readable, or None."""
    if not isinstance(error, TypeError | ValueError | DDPExtError):
        return f"{type(error).__name__}: {error}"
    named = (f"`{argument.name}", f"`{argument.value!s}`", f"`{argument.name.replace('_', '.', 1)}`")
    if not any(name in str(error) for name in named):
        return f"the argument is not named: {error}"
    return None


def construct(argument):
    """Construct an object, and a Trainer for a strategy; return the error, or None."""
    kind = BY_NAME[argument.target]
    try:
        made = kind(**{**CONSTRUCTORS[kind], argument.name: argument.value})
        if kind in STRATEGIES:
            Trainer(strategy=made, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    except Exception as error:
        return error
    return None


def fuzz_arguments(number, seed, capsys):
    mutations = draw_arguments({name: arguments_of(kind) for name, kind in BY_NAME.items()}, number, seed)
    problems, refused = [], 0
    for argument in mutations:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = construct(argument)
        refused += error is not None
        problem = None if error is None else complaint_about_error(argument, error)
        if problem is not None:
            problems.append(f"{argument.target}({argument.name}={str(argument.value)[:100]!r})\n    {problem}")
    check_readable("arguments", mutations, problems, refused, capsys)


def test_a_wrong_argument_is_an_error_of_the_constructor_that_names_it(capsys):
    fuzz_arguments(MUTATIONS - int(SHARE * MUTATIONS), SEED, capsys)


@pytest.mark.exhaustive
def test_ten_thousand_more_wrong_arguments_are_named(capsys):
    fuzz_arguments(10_000, SEED + 1, capsys)
