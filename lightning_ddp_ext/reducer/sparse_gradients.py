"""Sparse gradients of embeddings, added up over ranks by their rows."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext.distributed.exchange import gather_integer


class SparseGradients:
    """Adds up the gradients of sparse embeddings by gathering their rows, which every backend can do."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        weights = {
            part.weight for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        }
        self.members = frozenset(member for member, parameter in enumerate(parameters) if parameter in weights)
        self._parameters = parameters
        self._group = group

    def reduce(self, used: Sequence[float], factor: float) -> None:
        """Set the gradients that any rank has used to the sum of the ranks; the factor is for this rank's gradients."""
        # In the order of parameters, without any that no rank has used: the marks are the same on every rank.
        for member in sorted(self.members):
            if used[member]:
                self._reduce(self._parameters[member], factor)

    def _reduce(self, parameter: nn.Parameter, factor: float) -> None:
        gradient = parameter.grad
        if gradient is None or not factor:
            gradient = torch.sparse_coo_tensor(
                torch.zeros(1, 0, dtype=torch.long, device=parameter.device),
                parameter.detach()[:0],
                parameter.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        dense = gradient.layout == torch.strided
        gradient = gradient.detach() * factor if dense else gradient.detach().coalesce() * factor
        sizes = gather_integer(-1 if dense else gradient.indices().shape[1], self._group)  # a message on the CPU
        if min(sizes) < 0:
            # A dense gradient somewhere, of a layer tied to the embedding: the sum is dense.
            parameter.grad = gradient.to_dense()
            dist.all_reduce(parameter.grad, group=self._group)
            return
        if not max(sizes):
            parameter.grad = gradient
            return
        # Padded to the longest, since a gather needs equal sizes; indices and values are of different types.
        rows = self._gather_rows(gradient.indices().t(), sizes)
        values = self._gather_rows(gradient.values(), sizes)
        parameter.grad = torch.sparse_coo_tensor(rows.t(), values, parameter.shape, check_invariants=False).coalesce()

    def _gather_rows(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: len(part)] = part
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self._group)
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])
