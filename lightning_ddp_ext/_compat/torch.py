"""Private names of torch, each with its reason. Checked on torch 2.13.0; `tests/compat` fails when one moves."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

# Instance attributes of `nn.Module` that hold the module tree rather than the user's attributes. A replica has its own.
STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})

# Instance attributes of `nn.Module` that hold the hooks which `register_*_hook` has added.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# The base of batch normalisation of every dimension; torch exports only the classes below it.
BatchNorm = _BatchNorm

# Refers to a storage without keeping its memory, and never equals that of a later storage; exported, not documented.
WeakStorage = StorageWeakRef

# The base of every layer with running statistics, those of instances among them.
Normalisation = _NormBase

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def add_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add many tensors in place in few kernel launches; `torch.optim` relies on the same function."""
    torch._foreach_add_(list(targets), list(sources))


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors in place in few kernel launches; `torch.optim` relies on the same function."""
    torch._foreach_copy_(list(targets), list(sources))


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Tell whether `register_hook` or `register_post_accumulate_grad_hook` was used; torch has no public question."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def views_of(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """View consecutive parts of a flat tensor in the shapes of others, all in one call from Python."""
    views: Sequence[Tensor] = torch._utils._unflatten_dense_tensors(flat, tensors)  # type: ignore[no-untyped-call]
    return list(views)


def version_of(tensor: Tensor) -> int:
    """Return a number that every change in place increases; tensors made in inference mode have none."""
    return -1 if tensor.is_inference() else tensor._version


def never_compiled(function: _Function) -> _Function:
    """Run a function as it is when compiled code calls it; `torch.compiler.disable` says so too, without types."""
    disabled: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` wraps, or the module itself; torch has no public way back."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def called_attribute(module: nn.Module) -> str:
    """Name the instance attribute that a call of a module runs: `module.compile()` puts another before `forward`."""
    return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"


def saved_tensor_hooks() -> _Hooks:
    """Return the innermost hooks for tensors saved for the backward pass, to call them from hooks that only look on.

    Autograd runs the innermost hooks alone. Torch's own compiler asks the same question for the same reason.

    Raises:
        RuntimeError: If there are none.
    """
    hooks: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        raise RuntimeError("no hooks for saved tensors are active; call this inside of `saved_tensors_hooks`.")
    return hooks


# The methods of a process group that communicate: all of `torch.distributed` goes through them, whatever the back-end.
COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "_start_coalescing", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "merge_remote_group",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send", "split_group",
)  # fmt: skip

_METHODS = {name: vars(dist.ProcessGroup)[name] for name in COLLECTIVES}


@contextmanager
def replaced_collectives(
    find: Callable[[dist.ProcessGroup, str], Callable[..., Any] | None],
    resolve: Callable[[dist.ProcessGroup], dist.ProcessGroup],
    new_group: Callable[[], None],
) -> Iterator[None]:
    """Replace what process groups do, in every thread, at no cost outside of the block.

    A dispatch mode would slow every operation down and miss the threads of a backward pass on GPUs; a back-end of our
    own would stand between the user and NCCL all the time. Collectives of compiled code are not seen.

    Args:
        find: Maps a process group and the name of a method to what stands in for it, called as
            `stand_in(original, group, *args, **kwargs)`, or to None.
        resolve: Maps the group of a functional collective to the one that is used.
        new_group: Called where a process group is about to be made.
    """
    make_group = c10d._new_group_with_tag
    resolve_group = functional_collectives._resolve_group
    read_object: Callable[..., Any] = c10d._tensor_to_object

    def make(*args: Any, **kwargs: Any) -> Any:
        new_group()
        return make_group(*args, **kwargs)

    def find_group(group: Any, tag: str = "") -> Any:
        resolved = resolve_group(group, tag)
        return resolve(resolved) if isinstance(resolved, dist.ProcessGroup) else resolved

    def read(tensor: Tensor, size: int, group: Any) -> Any:
        # Who has sent nothing has sent None; torch would unpickle what is empty.
        return read_object(tensor, size, group) if size else None

    try:
        for name in COLLECTIVES:
            setattr(dist.ProcessGroup, name, _replaced(name, getattr(dist.ProcessGroup, name), find))
        c10d._new_group_with_tag = make
        functional_collectives._resolve_group = find_group
        c10d._tensor_to_object = read
        yield
    finally:
        for name, method in _METHODS.items():
            setattr(dist.ProcessGroup, name, method)
        c10d._new_group_with_tag = make_group
        functional_collectives._resolve_group = resolve_group
        c10d._tensor_to_object = read_object


def _replaced(
    name: str,
    original: Callable[..., Any],
    find: Callable[[dist.ProcessGroup, str], Callable[..., Any] | None],
) -> Callable[..., Any]:
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        stand_in = find(group, name)
        return original(group, *args, **kwargs) if stand_in is None else stand_in(original, group, *args, **kwargs)

    return method


def cloned_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the store of a process group over a connection of its own; torch's stubs know of no `clone`."""
    store: Any = group.get_group_store()
    cloned: dist.Store = store.clone()
    return cloned
