"""Which parameters and buffers ranks share, and which belong to a rank alone."""

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ddp_ext._compat.torch import ignored_by_ddp
from lightning_ddp_ext.errors import UnsupportedFeatureError


def find_ignored(module: nn.Module) -> frozenset[str]:
    """Find the parameters and buffers that ranks do not share, such as queues that hold a rank's own values.

    They are those given to torch's `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`, for the
    module or for one below it.

    Args:
        module: The module.

    Returns:
        Their names, as the module names them.
    """
    return frozenset(
        f"{prefix}.{name.strip('.')}".strip(".")
        for prefix, part in module.named_modules()
        for name in ignored_by_ddp(part)
    )


def shared_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have gradients to be shared, frozen ones too, each once.

    Raises:
        UnsupportedFeatureError: If one is not initialised yet.
    """
    for name, buffer in module.named_buffers():
        _refuse_lazy("buffer", name, buffer)
    return [parameter for parameter in _not_ignored(module) if _has_gradient(parameter)]


def fixed_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that ranks share and that have no gradients, such as whole numbers, each once."""
    return [parameter for parameter in _not_ignored(module) if not _has_gradient(parameter)]


def _not_ignored(module: nn.Module) -> list[nn.Parameter]:
    ignored = find_ignored(module)
    found: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in ignored:
            _refuse_lazy("parameter", name, parameter)
            found[id(parameter)] = parameter
    return list(found.values())


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _refuse_lazy(kind: str, name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise UnsupportedFeatureError(
            f"{kind} `{name}` has no shape yet. Run a batch through the module before its gradients are reduced."
        )
