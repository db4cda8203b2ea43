"""Whatever people pass to constructors, they get an object or one readable error that names the argument."""

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
from tests.cli.judging import MUTATIONS, SEED, SHARE, report
from tests.cli.mutations import draw_arguments

# By name: the class, arguments that are right, and whether a Trainer takes it as its strategy.
CONSTRUCTORS = {
    "BalancedDataParallelStrategy": (BalancedDataParallelStrategy, {}, True),
    "DDPCheckpointStrategy": (DDPCheckpointStrategy, {}, True),
    "DDPJoinStrategy": (DDPJoinStrategy, {}, True),
    "ddp_strategy": (ddp_strategy, {}, True),
    "fsdp_strategy": (fsdp_strategy, {}, False),
    "BalanceReport": (BalanceReport, {}, False),
    "GradientCheck": (GradientCheck, {}, False),
    "JoinReport": (JoinReport, {}, False),
    "ReplicaConsistency": (ReplicaConsistency, {}, False),
    "ManualEnvironment": (ManualEnvironment, {"num_nodes": 2, "node_rank": 1, "main_address": "node1"}, False),
    "DigitsCNN": (DigitsCNN, {}, False),
    "DigitsData": (DigitsData, {}, False),
    "SlowedDigitsCNN": (SlowedDigitsCNN, {"milliseconds_per_sample": [1.0]}, False),
    "ByteTransformer": (ByteTransformer, {"depth": 1}, False),
    "StdlibText": (StdlibText, {}, False),
    "StdlibStream": (StdlibStream, {}, False),
}


_ANYTHING = {"ddp_comm_state", "options", "unknown", "args", "self"}


def arguments_of(target):
    kind = CONSTRUCTORS[target][0]
    names = set(inspect.signature(kind).parameters)
    if kind is DDPJoinStrategy:
        names |= set(inspect.signature(ExplicitDDPStrategy).parameters)
    extra = {"sharding_strategy", "state_dict_type"} if kind is fsdp_strategy else set()
    return sorted((names | extra) - _ANYTHING)


def complaint_about_error(argument, error):
    """Why an error of a constructor is not readable; None if it is."""
    if not isinstance(error, TypeError | ValueError | DDPExtError):
        return f"{type(error).__name__}: {error}"
    named = (f"`{argument.name}", f"`{argument.value!s}`", f"`{argument.name.replace('_', '.', 1)}`")
    if not any(name in str(error) for name in named):
        return f"the argument is not named: {error}"
    return None


def construct(argument):
    """Construct, and for a strategy the Trainer too; returns an error if there is one."""
    kind, right, is_strategy = CONSTRUCTORS[argument.target]
    try:
        made = kind(**{**right, argument.name: argument.value})
        if is_strategy:
            Trainer(strategy=made, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    except Exception as error:
        return error
    return None


def fuzz_arguments(number, seed, capsys):
    mutations = draw_arguments({target: arguments_of(target) for target in CONSTRUCTORS}, number, seed)
    problems, refused = [], 0
    for argument in mutations:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = construct(argument)
        refused += error is not None
        problem = None if error is None else complaint_about_error(argument, error)
        if problem is not None:
            problems.append(f"{argument.target}({argument.name}={str(argument.value)[:100]!r})\n    {problem}")
    report("arguments", mutations, problems, refused, capsys)
    assert 0 < refused < len(mutations)


def test_a_wrong_argument_is_an_error_of_the_constructor_that_names_it(capsys):
    fuzz_arguments(MUTATIONS - int(SHARE * MUTATIONS), SEED, capsys)


@pytest.mark.exhaustive
def test_ten_thousand_more_wrong_arguments_are_named(capsys):
    fuzz_arguments(10_000, SEED + 1, capsys)


@pytest.mark.parametrize(
    ("error", "is_readable"),
    [
        (TypeError("`split` must be a sequence"), True),
        (ValueError("`split=[0]` must not be zero"), True),
        (TypeError("'<=' not supported between instances of 'int' and 'str'"), False),
        (AttributeError("`split`"), False),
    ],
)
def test_errors_of_constructors_are_told_apart(error, is_readable):
    argument = draw_arguments({"BalancedDataParallelStrategy": ["split"]}, 1, 0)[0]
    assert (complaint_about_error(argument, error) is None) == is_readable
