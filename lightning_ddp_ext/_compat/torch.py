"""Private names of torch, each with its reason. Checked on torch 2.13.0; `tests/compat` fails when one moves."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

# Instance attributes of `nn.Module` that hold the module tree rather than the user's attributes. A replica has its own.
STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})

# Instance attributes of `nn.Module` that hold the hooks which `register_*_hook` has added.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# The base of batch normalisation of every dimension; torch exports only the classes below it.
BatchNorm = _BatchNorm

# The base of every layer with running statistics, those of instances among them.
Normalisation = _NormBase


def add_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add many tensors in place in few kernel launches; `torch.optim` relies on the same function."""
    torch._foreach_add_(list(targets), list(sources))


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors in place in few kernel launches; `torch.optim` relies on the same function."""
    torch._foreach_copy_(list(targets), list(sources))


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Tell whether `register_hook` or `register_post_accumulate_grad_hook` was used; torch has no public question."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def version_of(tensor: Tensor) -> int:
    """Return a number that every change in place increases; tensors made in inference mode have none."""
    return -1 if tensor.is_inference() else tensor._version
