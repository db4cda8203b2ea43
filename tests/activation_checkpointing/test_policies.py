"""Policies that are refused."""

import pickle
from types import SimpleNamespace

import pytest
from torch import nn

from lightning_ddp_ext.activation_checkpointing.policy import ActivationCheckpointing
from lightning_ddp_ext.errors import ActivationCheckpointingError
from tests.activation_checkpointing.models import Transformer


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (None, TypeError, "must name classes of modules, got None. Use a class"),
        (nn.Linear(1, 1), TypeError, "got the module Linear"),
        (int, TypeError, "holds <class 'int'>, not a class of modules"),
        ([nn.Linear, 3], TypeError, "holds 3, not a class of modules"),
        ([], ValueError, "is empty. Use a class"),
        ("Block", ValueError, "names 'Block', which cannot be imported: No module named 'Block'. Write the path"),
        (["no such path"], ValueError, "names 'no such path', which cannot be imported"),
        ("torch.nn", TypeError, "must name classes of modules, got <module 'torch.nn'"),
        (lambda module, recurse: True, TypeError, "cannot be called with one: missing a required argument: 'recurse'"),
        (lambda module: SimpleNamespace(), TypeError, "returned namespace() for a Linear. Return True or False"),
    ],
)
def test_other_policies_are_refused(policy, error, message):
    with pytest.raises(error, match="`activation_checkpointing` ") as raised:
        ActivationCheckpointing(policy).apply(nn.Sequential(nn.Linear(1, 1)))
    assert message in str(raised.value)


@pytest.mark.parametrize("policy", [nn.Linear, [nn.Linear, "torch.nn.Tanh"], "torch.nn.Linear"])
def test_a_policy_reaches_processes_that_are_started_anew(policy):
    there = pickle.loads(pickle.dumps(ActivationCheckpointing(policy)))
    assert there.policy == policy
    there.apply(model := nn.Sequential(nn.Linear(2, 2), nn.Sigmoid()))
    assert there.modules == {"0": "Linear"}
    there.remove(model)


@pytest.mark.parametrize("policy", [nn.Conv2d, Transformer])
def test_a_policy_that_names_no_module_is_refused_with_what_there_is(policy):
    with pytest.raises(ActivationCheckpointingError) as raised:
        ActivationCheckpointing(policy).apply(Transformer())
    assert str(raised.value) == (
        "`activation_checkpointing` names no module below Transformer, which is never recomputed as a whole; there are:"
        " Embedding (1), Block (3), LayerNorm (3), MultiheadAttention (3), NonDynamicallyQuantizableLinear (3),"
        " Sequential (3), Linear (7), GELU (3), Dropout (3). Name one of these classes."
    )
