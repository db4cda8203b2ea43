"""Which buffers a module has."""

import hashlib

import torch
from torch import Tensor, nn

from lightning_ddp_ext.parallel.consistency.fingerprints import describe
from lightning_ddp_ext.parallel.consistency.sharing import find_ignored

_Spec = tuple[torch.Size, torch.dtype, torch.device]


class BufferTable:
    """The buffers of a module in a fixed order, for as long as none comes, goes or gets another shape.

    Buffers that belong to a rank alone are left out; in the place of those that are None or not dense, there is None.

    Args:
        module: The module.

    Attributes:
        places: Owners and names of the buffers.
        tensors: The buffers.
        specs: Shape, type and device of each.
        structure: A number of 48 bits for names, types and shapes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[nn.Module] = []
        self._tree: list[object] = [None]
        self.places: list[tuple[nn.Module, str]] = []
        self.tensors: list[Tensor | None] = []
        self.specs: list[_Spec | None] = []
        self.structure = 0
        self.look()

    def look(self) -> None:
        """Look at the module again. It costs little as long as the structure is the same."""
        # By identity: modules may compare otherwise, as metrics do.
        tree: list[object] = [id(child) for part in self._parts for child in part._modules.values()]
        tree += [name for part in self._parts for name in part._buffers]
        walked = tree != self._tree
        if walked:
            self._walk()
        self.tensors = [_dense(owner._buffers.get(name)) for owner, name in self.places]
        specs = [None if one is None else (one.shape, one.dtype, one.device) for one in self.tensors]
        if walked or specs != self.specs:
            self.specs = specs
            text = repr(list(self.describe().items()))
            self.structure = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")

    def describe(self) -> dict[str, object]:
        """Describe the buffers, for `compare_setups`."""
        return {
            f"buffer `{name}`": "None" if tensor is None else describe(tensor)
            for name, tensor in zip(self._names, self.tensors, strict=True)
        }

    def _walk(self) -> None:
        ignored = find_ignored(self._module)
        self._parts = list(self._module.modules())
        self._tree = [id(child) for part in self._parts for child in part._modules.values()]
        self._tree += [name for part in self._parts for name in part._buffers]
        found = [
            (f"{prefix}.{name}".strip("."), part, name)
            for prefix, part in self._module.named_modules()
            for name in part._buffers
        ]
        self._names = [full for full, _, _ in found if full not in ignored]
        self.places = [(part, name) for full, part, name in found if full not in ignored]


def _dense(buffer: Tensor | None) -> Tensor | None:
    return buffer if buffer is not None and buffer.layout is torch.strided else None
