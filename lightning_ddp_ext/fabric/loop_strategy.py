"""The base of the strategies for `lightning.fabric.Fabric`: gradients, batches and checkpoints of a user's loop."""

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import allows_other_backward_passes, postpone_synchronization
from lightning_ddp_ext._compat.torch import is_lost_connection
from lightning_ddp_ext._compat.torchmetrics import watch_synchronization
from lightning_ddp_ext._devices import widened
from lightning_ddp_ext._lightning import FabricDDPStrategy, rank_zero_warn
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext._validation import argument_names, refuse_unknown
from lightning_ddp_ext.batches.weights import common_unit
from lightning_ddp_ext.clusters.process_group_options import ConnectedMixin, StartMethod
from lightning_ddp_ext.distributed.exchange import own_group
from lightning_ddp_ext.errors import DDPExtError, OtherRankError, UnsupportedFeatureError, WarnOnce
from lightning_ddp_ext.fabric.accumulation import LoopWindow
from lightning_ddp_ext.fabric.loaders import RNG, FabricLoader, LoopBatch
from lightning_ddp_ext.loaders.samplers import disable_sampler_padding
from lightning_ddp_ext.loaders.step_loader import FetchedBatch, Participation, StepSource
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from lightning_ddp_ext.resume.loading import check_checkpoint, unreadable
from lightning_ddp_ext.resume.rng_state import capture_rng_state, gather_states, load_state, restore_rng_state
from lightning_ddp_ext.steps.balancer import ShareBalancer
from lightning_ddp_ext.steps.driver import GradientDriver
from lightning_ddp_ext.steps.metric_states import synchronize_states
from lightning_ddp_ext.steps.optimizer_guard import OptimizerGuard
from lightning_ddp_ext.strategies.gathering import GatherMixin
from lightning_ddp_ext.strategies.gradient_options import GradientOptionsMixin

T = TypeVar("T")
_STATE = "lightning_ddp_ext"  # key in checkpoints


class LoopStrategy(GatherMixin, GradientOptionsMixin, ConnectedMixin, FabricDDPStrategy):
    """The base of the strategies for Fabric: exact gradients after any backward pass, weighted by samples.

    `fabric.setup` does not wrap modules in `DistributedDataParallel`. `fabric.backward` synchronises the gradients of
    all modules that were set up, unless it runs in `fabric.no_backward_sync`. Micro-batches of such a window are
    weighted too: divide the losses by their number, as usual.

    The weight of a batch is found when a loader of `fabric.setup_dataloaders` yields it; without such a loader, set
    `fabric.strategy.batch_weight`.

    `fabric.save` adds the RNG states of all ranks, the positions in loaders and the state of the reducer to the
    checkpoint. After `fabric.load`, the next iteration of a loader continues its epoch, bit for bit on as many ranks.

    Args:
        args: Arguments of `lightning.fabric.strategies.DDPStrategy`: accelerator, devices of this node, cluster
            environment, checkpoint plugin and precision.
        start_method: How this process starts the others of its node.
        options: The arguments above by name, and of `lightning_ddp_ext.DDPCheckpointStrategy`: `process_group_backend`,
            `timeout`, `init_method`, `network_interface`, `bucket_cap_mb`, `weight_by`, `batch_dim` and
            `activation_checkpointing`. A callable `weight_by` gets the batch before it moves to the device.

    Raises:
        TypeError: If an argument is unknown or of the wrong type.
        ValueError: If an argument is out of range.
        BackendError: If this torch has no such backend.
        NetworkInterfaceError: If this node has no such interface.
    """

    remedy = "make this call on every rank"  # if another rank is gone
    agrees = True  # loops end together on ranks with different numbers of batches
    channels = 3  # process groups, each with a connection between any two ranks, and connections to the store
    shares_batches = False  # True if ranks share each batch, so that any number of ranks can resume
    balancer: ShareBalancer | None = None
    reducer_type: Callable[..., GradientReducer] = GradientReducer

    def __init__(self, *args: Any, start_method: StartMethod | None = None, **options: Any) -> None:
        # Not the arguments of a class derived from this one, which should not arrive here. Lightning ignores others.
        refuse_unknown(options.keys() - argument_names(LoopStrategy), type(self))
        super().__init__(*args, start_method=start_method, **options)
        postpone_synchronization(self, self.accumulating)
        # The batches of the loops that have not ended; the first is of code outside of loops, the last the current one.
        self._batches = [LoopBatch(self._weight_rule.of_any_batch)]
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self._loaders: list[FabricLoader] = []
        self._reducer: GradientReducer | None = None
        self._gradient: GradientDriver | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._resumed_reducer: Mapping[str, Any] | None = None
        self._accumulating: tuple[object, ...] = ()  # the modules that `no_backward_sync` names at the moment
        self._window = LoopWindow(self._weight_rule.is_sum)
        self._steps_group: dist.ProcessGroup | None = None
        self._warn = WarnOnce()

    # ------------------------------------------------------------ set-up

    @override
    def setup_environment(self) -> None:
        environment = self.cluster_environment
        assert environment is not None and self.accelerator is not None  # noqa: PT018  the Fabric gives both
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        self.accelerator.setup_device(self.root_device)
        self._connection.open(self)
        super().setup_environment()  # it keeps the process group that it finds
        watch_synchronization(ExitStack(), synchronize_states)  # as long as the process lives
        # Before any other collective, since ranks with other settings would send messages of other sizes.
        self.compare_ranks()
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''} ({self.root_device.type})"
        rank_zero_info(f"{type(self).__name__} on {ranks}: the loss is taken for {self._weight_rule.meaning}.")

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        if self._checkpointing is not None:
            self._checkpointing.apply(module)
        self.modules.append(module)
        self._make_reducer()
        return module

    def _make_reducer(self) -> None:
        """Make the reducer of all modules, whose messages have one order on all ranks."""
        if self._gradient is not None:
            self._gradient.close()
        together = self.modules[0] if len(self.modules) == 1 else nn.ModuleList(self.modules)
        self._reducer = self.reducer_type(together, bucket_cap_mb=self.bucket_cap_mb, timeout=self._connection.timeout)
        self.cpu_group = self._reducer.process_group
        guard = OptimizerGuard(
            self.global_rank,
            self._reducer,
            together.named_parameters,
            known=lambda: self.optimizers,
            weigh_loss=lambda: (self._loss_weight(), self._weight_rule.is_sum),
            synchronize_by="Call `fabric.backward(loss)` instead of `loss.backward()`, and leave the last one before a"
            " step out of `fabric.no_backward_sync`.",
            create_in="of a module before `fabric.setup`",
            describe_position="batch {} of its loader, counted over all epochs".format,
        )
        self._gradient = GradientDriver(self._reducer, self._window, guard, self.balancer)
        self._window.connect(self._reducer.control, self.global_rank)
        if self._resumed_reducer is not None:
            self._reducer.load_state_dict(self._resumed_reducer)

    def _loss_weight(self) -> float:
        """Return the weight of a closure's loss: of its backward passes, or of the batch if it has none."""
        batch = self._batches[-1]
        return (batch.weight or 0.0) if batch.is_new or batch.is_reweighted else self._window.last.total

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        disable_sampler_padding(dataloader)
        loader = FabricLoader(dataloader, self.make_source(), self.root_device, self)
        self._loaders.append(loader)
        if self._resumed is not None:
            self._resume_loaders(len(self._loaders) - 1)
        return loader

    @abstractmethod
    def make_source(self) -> StepSource:
        """Return the source that makes the steps on a loader."""

    @property
    def steps_group(self) -> dist.ProcessGroup:
        """The group in which ranks agree on their steps; its first use communicates."""
        if self._steps_group is None:
            # Not the group of the gradients: loaders may be set up before any module is.
            self._steps_group = own_group(self._connection.timeout)
        return self._steps_group

    # ------------------------------------------------------------ batches

    @contextmanager
    def iterating(self) -> Generator[LoopBatch, None, None]:
        """Iterate over a loader in the block, inside of a loop over another one or in turn with it."""
        current, outer = LoopBatch(), self._batches[-1]
        number = outer.number
        try:
            yield current
        finally:
            self._forget(current)
            outer.has_evaluated |= outer is self._batches[-1] and outer.number == number

    def _forget(self, current: LoopBatch) -> None:
        self._batches = [other for other in self._batches if other is not current]

    def begin_batch(self, current: LoopBatch, batch: Any, fetched: FetchedBatch) -> None:
        """Begin with the next batch of a loop."""
        self.end_batch(current)
        self._forget(current)
        self._batches.append(current)
        current.participation, current.shares = fetched.participation, fetched.shares
        current.has_next_batch = fetched.has_next_batch
        weight, problem = None, None
        try:
            weight = 1.0 if self._window.is_of_parts else self._weigh(batch, fetched.samples)
        except Exception as error:  # raised by `backward`: a batch of an evaluation needs no weight
            problem = error
        current.runs_ahead |= current.is_new
        current.has_skipped |= current.is_new and current.weight != weight
        current.weight, current.problem, current.loops = weight, problem, 0
        current.is_new, current.has_given_weight, current.has_evaluated = True, False, False

    def end_batch(self, current: LoopBatch) -> None:
        """Settle integer buffers if the last batch of a loop had a backward pass, after all code of its step."""
        if self._reducer is not None and current in self._batches and not current.is_new:
            self._reducer.buffers.settle()

    def _weigh(self, batch: Any, samples: float | None) -> float:
        if self.is_shadow:
            return 0.0
        if not self._weight_rule.is_by_samples:
            return self._weight_rule.weigh(batch, 1.0)
        self._samples.begin(samples, batch)
        return self._weight_rule.weigh(batch, self._samples.require(batch, self.global_rank))

    @property
    def batch_weight(self) -> float | None:
        """Weight of the current batch on this rank; None if it needs a batch before the first, or cannot be weighed."""
        return self._batches[-1].weight

    @batch_weight.setter
    def batch_weight(self, weight: float | None) -> None:
        batch = self._batches[-1]
        if weight and self.is_shadow and not batch.runs_ahead:
            raise ValueError(
                f"rank {self.global_rank}: `batch_weight` was set to {weight:g} for a batch that stands in for missing"
                " data. Leave the weight as it is, or set 0 if `fabric.strategy.is_shadow`."
            )
        batch.weight, batch.problem, batch.has_given_weight, batch.is_reweighted = weight, None, True, True

    @property
    def _participation(self) -> Participation | None:
        return self._batches[-1].participation

    def _new_batches(self) -> list[LoopBatch]:
        """Return the batches that loaders have given since the last backward pass, and that it may use."""
        return [one for one in self._batches if one.is_new]

    @property
    def is_shadow(self) -> bool:
        """Whether this rank has run out of data, and its batch stands in for one."""
        return self._participation is not None and self._participation.is_shadow

    # ------------------------------------------------------------ gradients

    @override
    @allows_other_backward_passes  # `OptimizerGuard` notices `loss.backward`
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        gradient = self._gradient
        if gradient is None:
            raise RuntimeError("`fabric.backward` needs a module. Call `model = fabric.setup(model)` first.")
        batch, new = self._batches[-1], self._new_batches()
        if problem := next((one.problem for one in (batch, *new) if one.problem is not None), None):
            raise problem
        if batch.weight is None:
            raise RuntimeError(
                "`fabric.backward` needs the weight of the batch: no loop over a loader of `fabric.setup_dataloaders`"
                " is at a batch. Call it inside of such a loop, or set `fabric.strategy.batch_weight` before, such as"
                " `len(batch)`."
            )
        if any(one.has_skipped and not one.has_given_weight for one in new):
            self._warn(
                f"rank {self.global_rank}: a loader has given several batches of different weights since the last"
                f" `fabric.backward`, which uses the weight of the last one, {new[-1].weight:g}. Ignore this if you"
                " left batches out on purpose. If your loop takes batches ahead of their use, read"
                " `fabric.strategy.batch_weight` after taking each one, and set it to this value before the"
                " `fabric.backward` of the batch."
            )
        active = range(self.world_size) if self._participation is None else self._participation.active
        if gradient.reducer.normalizes_over_ranks:
            self._window.unit = common_unit(gradient.reducer.control.weights)
        factor = self._window.begin_pass(batch, new, active, self._accumulating)
        for one in new:
            one.is_new = one.has_skipped = False
        batch.is_reweighted = False
        of_batch = f" of batch {batch.number} of its loader, counted over all epochs" if batch.number else ""
        gradient.reducer.buffers.settles_itself = not batch.number  # no loop over a loader says when a step ends
        of_window, position = self._window.of_pass(), batch.number if self.agrees else 0
        synchronizing = gradient.synchronizing(of_window, position, batch.has_next_batch, ends_step=True)
        with self._naming_call("backward", of_batch), synchronizing:
            super().backward(tensor if factor in (0, 1) else tensor * factor, module, *args, **kwargs)
        self._window.end_pass(gradient.reducer, self.modules)

    @contextmanager
    def _naming_call(self, call: str, of_batch: str = "") -> Generator[None, None, None]:
        """Name the call and a remedy if its communication ends because another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, DDPExtError) or not is_lost_connection(error):
                raise
            raise OtherRankError(
                f"rank {self.global_rank}: another rank did not take part in the `fabric.{call}`{of_batch}. The other"
                f" rank has failed, or has made fewer calls. Look for its error; if there is none, {self.remedy}."
            ) from error

    @contextmanager
    def accumulating(self, module: object, is_postponed: bool) -> Generator[None, None, None]:
        """Postpone the synchronisation of gradients in a block of `no_backward_sync`, if that is enabled."""
        outer, self._accumulating = self._accumulating, (*self._accumulating, module)
        try:
            with self._window.postpone(is_postponed):
                yield
        finally:
            self._accumulating = outer

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return self._reduce(tensor, group, reduce_op)
        # In place, so that the loss keeps its graph; with gloo, a mean would divide the gradient too.
        self._reduce(tensor.detach(), group, reduce_op)
        return tensor

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce a value without a graph; in place, unless the result is of another type."""
        if isinstance(tensor, Tensor) and not self._is_even(group):
            reduced = _reduce_rows(self.all_gather(tensor, group), reduce_op)
            return tensor.copy_(reduced) if reduced.dtype == tensor.dtype else reduced
        with self._naming_call("all_reduce"):
            return super().all_reduce(widened(tensor, reduce_op), group, reduce_op)

    @override
    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:  # type: ignore[override]
        with self._naming_call("all_gather"):
            return super().all_gather(
                tensor, group, sync_grads, is_left_out=self.is_shadow and not self._is_even(group)
            )

    def _is_even(self, group: Any) -> bool:
        """Whether a value belongs to all ranks, as the result of an evaluation within a step does."""
        batch = self._batches[-1]
        is_of_step = batch.participation is not None and batch.participation.is_uneven and not batch.has_evaluated
        return not is_of_step or group not in (None, dist.group.WORLD)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        with self._naming_call("broadcast"):
            return super().broadcast(obj, src)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._naming_call("barrier"):
            super().barrier(*args, **kwargs)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.optimizers.append(optimizer)
        return super().setup_optimizer(optimizer)

    # ------------------------------------------------------------ checkpoints

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._window.length:
            rank_zero_warn(
                "The checkpoint lacks the gradients that are not synchronised yet, so that a run that continues from it"
                " differs. Save after an optimizer step."
            )
        reducer = None if self._reducer is None else self._reducer.state_dict()
        of_rank = {
            "rng": capture_rng_state(self.root_device),
            "loaders": [loader.state() for loader in self._loaders],
            "reducer": None if reducer is None else reducer.pop("of_rank"),
            **self.own_state(),
        }
        with self._naming_call("save"):
            state = {**state, _STATE: {"reducer": reducer, "of_ranks": gather_states(of_rank)}}
            super().save_checkpoint(path, state, *args, **kwargs)

    def own_state(self) -> dict[str, Any]:
        """Return further state of this rank for a checkpoint."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore the `own_state` of as many ranks."""

    @override
    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        check_checkpoint(path, self.checkpoint_io, allows_code=True, argument="path")
        try:
            remainder = super().load_checkpoint(path, state, *args, **kwargs)
        except KeyError as error:
            raise unreadable(path, error, "path") from error
        saved = remainder.pop(_STATE, None)
        if saved is not None:
            self._resume(saved)
        return remainder

    def _resume(self, saved: Mapping[str, Any]) -> None:
        of_ranks = saved["of_ranks"]
        if len(of_ranks) != self.world_size:
            loaders = load_state(of_ranks[0])["loaders"]
            if any(state["used"] for state in loaders) and not self.shares_batches:
                raise UnsupportedFeatureError(
                    f"the checkpoint was saved by {len(of_ranks)} ranks in the middle of an epoch, and"
                    f" {self.world_size} load it. Load it on as many, or one that was saved between epochs."
                )
            rank_zero_warn(
                f"The checkpoint was saved by {len(of_ranks)} ranks, and {self.world_size} load it. Random numbers will"
                " be others than without interruption."
            )
            self._resumed = {"loaders": [{name: state[name] for name in state if name != RNG} for state in loaders]}
            self._resume_loaders()
            return
        self._resumed = own = load_state(of_ranks[self.global_rank])
        self.load_own_state(own)
        self._resume_loaders()
        restore_rng_state(own["rng"], self.root_device)
        if saved["reducer"] is not None:
            self._resumed_reducer = {**saved["reducer"], "of_rank": own["reducer"]}
            if self._reducer is not None:  # otherwise `fabric.setup` makes it
                self._make_reducer()  # one that has learned nothing

    def _resume_loaders(self, first: int = 0) -> None:
        assert self._resumed is not None
        for loader, state in zip(self._loaders[first:], self._resumed["loaders"][first:], strict=False):
            loader.load_state(state)


_REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": torch.sum, "product": torch.prod, "max": torch.amax, "min": torch.amin
}  # fmt: skip


def _reduce_rows(rows: Tensor, reduce_op: Any) -> Tensor:
    """Reduce the values of the active ranks."""
    name = reduce_op.lower() if isinstance(reduce_op, str) else str(reduce_op).rpartition(".")[2].lower()
    if name in ("mean", "avg"):
        return widened(rows, "mean").mean(dim=0)  # type: ignore[no-any-return]
    if name not in _REDUCTIONS:
        raise UnsupportedFeatureError(
            f"`reduce_op={reduce_op!r}` is not known to work among some of the ranks. Use one of"
            f" {', '.join(_REDUCTIONS)}."
        )
    return _REDUCTIONS[name](rows, 0)
