"""Checks that ranks make the same steps: of positions, optimizers and their settings, and synchronised gradients."""

import inspect
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ddp_ext._compat.torch import are_identical
from lightning_ddp_ext.batches.sample_counts import sums_and_means
from lightning_ddp_ext.consistency import compare_setups, value_to_text
from lightning_ddp_ext.errors import RanksOutOfStepError, UnsynchronizedGradientsError
from lightning_ddp_ext.reducer.control import list_others
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer


@dataclass(eq=False)
class OptimizerGuard:
    """Checks the gradients before each optimizer step of this process, also of optimizers unknown to Lightning.

    A closure, which may contain the backward pass, runs before the check. The optimizer gets the loss of the whole
    batch from it, so that steps that depend on the loss, such as those of L-BFGS, are the same on all ranks. Optimizers
    of other parameters are not checked.
    """

    rank: int
    reducer: GradientReducer
    named_parameters: Callable[[], Iterable[tuple[str, Tensor]]]  # of the moment, for errors
    known: Callable[[], Collection[Optimizer]]  # returns the optimizers that were set up with Lightning
    weigh_loss: Callable[[], tuple[float, bool]]  # returns the weight of the current batch, and if its loss is a sum
    synchronize_by: str  # what to do about gradients that are not synchronised, for the error
    create_in: str  # where to create parameters, for the error
    describe_position: Callable[[int], str]  # puts the position of a synchronisation into words
    steps: int = 0  # that optimizers have begun
    optimizers: int = 0  # a number that depends on how often each optimizer has stepped, in any order
    announced: int | None = None  # second of `numbers` on the ranks that run a manual step, which may change settings

    def __post_init__(self) -> None:
        self._managed: Optimizer | None = None
        self._held: tuple[list[Tensor], int] = [], 0  # parameters of the known optimizers, and a hash of their places
        control = self.reducer.control
        self._position = control.add(self._compare_positions, in_every_message=True)
        self._steps = control.add(in_every_message=True)
        self._optimizers = control.add(self._check, in_every_message=True)
        # A loop of Fabric has no end at which to remove the hook, so it must not keep the module alive. Without the
        # module it does nothing. A garbage collection must not remove it, as torch may iterate over all hooks then.
        method = weakref.WeakMethod(self._before_step)
        hook = register_optimizer_step_pre_hook(lambda *given: own(*given) if (own := method()) is not None else None)
        self.close = hook.remove

    @property
    def position(self) -> int:
        """Position of the last synchronisation."""
        return int(self._position.value)

    def send(self, position: int) -> None:
        """Send the position, steps and settings of optimizers of this rank with the next control message."""
        self._position.value = position
        self._steps.value, self._optimizers.value = self.numbers()

    def _compare_positions(self, positions: Sequence[float]) -> None:
        if len(set(positions)) > 1:
            own = positions[self.rank]
            raise RanksOutOfStepError(
                f"rank {self.rank} synchronises gradients at {self.describe_position(int(own))}, others at"
                f" {list_others(positions, own, self.describe_position)}. Run equally many batches, and in each of them"
                " equally many synchronised backward passes, on every rank."
            )

    def _check(self, optimizers: Sequence[float]) -> None:
        self.compare([*zip(self._steps.of_ranks, optimizers, strict=True)])

    def compare(self, of_ranks: Sequence[Sequence[float]]) -> None:
        """Raise an error on all ranks if their `numbers` differ."""
        if len({tuple(numbers) for numbers in of_ranks}) == 1:
            return
        steps = [numbers[0] for numbers in of_ranks]
        made = f"{steps[self.rank]:.0f} optimizer steps"
        if len(set(steps)) > 1:
            made += f", others {list_others(steps, steps[self.rank])}"
        else:
            for description in self._describe_settings():  # on every rank, as all have the same numbers
                compare_setups(description, self.reducer.process_group)
            made += ", as many as others, but not with the same optimizers"
        raise RanksOutOfStepError(
            f"rank {self.rank} has made {made}. Call `step` on all ranks or on none: decide by a value that is the same"
            " on every rank, such as the norm of synchronised gradients."
        )

    def numbers(self, reads_devices: bool = False) -> tuple[int, int]:
        """Return the steps, and a hash of optimizers, parameters and settings; `reads_devices` if the host may wait."""
        if self.announced is not None:
            return self.steps, self.announced
        held = [*chain.from_iterable(map(_parameters, self.known()))]
        if not are_identical(held, self._held[0]):
            self._held = held, hash(tuple(self.reducer.places.get(id(parameter), -1) for parameter in held))
        settings = [
            [one if _is_plain(one) else value_to_text(one, reads_devices) for one in group.values()]
            for *_, group in self._groups()
        ]
        return self.steps, (self.optimizers + self._held[1] + zlib.crc32(repr(settings).encode())) % 2**32

    def _describe_settings(self) -> Iterator[dict[str, object]]:
        """Yield descriptions of the optimizers for `compare_setups`: their numbers of groups, then all settings."""
        optimizers = [(f"optimizer {number} ({type(one).__name__})", one) for number, one in enumerate(self.known())]
        yield {f"number of parameter groups of {title}": len(one.param_groups) for title, one in optimizers}
        found: dict[str, object] = {}
        for title, parameters, group in self._groups():
            found |= {f"setting `{name}` of {title}": one for name, one in group.items()}
            found |= {f"parameter {self._name(one)} of {title}": "present" for one in parameters}
        yield found

    def _groups(self) -> Iterator[tuple[str, list[Tensor], dict[Any, Any]]]:
        """Yield the title, the parameters and the settings of each group, which include the number of parameters."""
        for number, optimizer in enumerate(self.known()):
            for position, group in enumerate(optimizer.param_groups):
                title = f"parameter group {position} of optimizer {number} ({type(optimizer).__name__})"
                settings = {**group, "params": len(group["params"])}
                yield title, group["params"], {name: settings[name] for name in sorted(settings, key=str)}

    def check(self, optimizer: Optimizer) -> None:
        """Raise `UnsynchronizedGradientsError` if the optimizer would step with gradients of this rank alone."""
        parameters = _parameters(optimizer)
        about = f"rank {self.rank}: `{type(optimizer).__name__}` is about to step with"
        if self.reducer.has_unsynchronized(parameters):
            raise UnsynchronizedGradientsError(
                f"{about} gradients that have not been synchronised with the other ranks. {self.synchronize_by}"
            )
        unmanaged = self.reducer.unmanaged_parameters(parameters)
        if len(unmanaged) == len(parameters) and optimizer not in self.known():
            return
        for parameter in unmanaged:
            if parameter.requires_grad and parameter.grad is not None:
                raise UnsynchronizedGradientsError(
                    f"{about} the gradient of {self._name(parameter)}, which was not part of the module when training"
                    f" was set up, so that no other rank knows of it. Create it as an `nn.Parameter` {self.create_in}."
                )

    def _name(self, parameter: Tensor) -> str:
        name = next((name for name, own in self.named_parameters() if own is parameter), None)
        return f"a parameter of shape {list(parameter.shape)}" if name is None else f"`{name}`"

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        parameters = _parameters(optimizer)
        is_managed = len(self.reducer.unmanaged_parameters(parameters)) < len(parameters)
        if is_managed and not _is_running(optimizer):
            self.steps += 1
            place = self.reducer.places.get(id(parameters[0]), -1)
            self.optimizers = (self.optimizers + hash((place,))) % 2**32
        is_positional = len(args) > 1
        closure = args[1] if is_positional else kwargs.get("closure")
        if closure is None or not is_managed:
            self.check(optimizer)
            return None
        if optimizer is self._managed or (isinstance(closure, partial) and closure.func == self._run_closure):
            return None  # or of the subclass
        checked = partial(self._run_closure, closure, optimizer)
        if is_positional:
            return (args[0], checked, *args[2:]), kwargs
        return args, {**kwargs, "closure": checked}

    @contextmanager
    def managing(self, optimizer: Optimizer) -> Iterator[None]:
        """Let the caller call `end_closure` itself in a step of the optimizer in the block."""
        self._managed = optimizer
        try:
            yield
        finally:
            self._managed = None

    def _run_closure(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        return self.end_closure(closure(), optimizer)

    def end_closure(self, loss: Any, optimizer: Optimizer) -> Any:
        """Check the gradients after a closure; return its loss, of the whole batch if the step may depend on it."""
        self.check(optimizer)
        # Of torch's optimizers, only L-BFGS depends on the loss.
        is_shared = isinstance(optimizer, LBFGS) or not type(optimizer).step.__module__.startswith("torch.optim.")
        return self._of_all_ranks(loss, optimizer) if is_shared and loss is not None else loss

    def _of_all_ranks(self, loss: Any, optimizer: Optimizer) -> Tensor:
        """Return the loss of the whole batch, in the widest type: a rank without data may not know the type."""
        weight, is_sum = self.weigh_loss()
        value = torch.as_tensor(loss, device=_parameters(optimizer)[0].device).detach().reshape(1)
        # The loss of a shadow step has weight 0, and is left out of sums. In an uneven step of the Trainer, collectives
        # are redirected to the ranks that run the step.
        sums, means = sums_and_means(value, None if is_sum and not weight else weight, dist.all_reduce)
        return (sums if is_sum else means)[0]


def _is_plain(value: Any) -> bool:
    return type(value) in (float, int, bool, type(None)) or (type(value) is tuple and all(map(_is_plain, value)))


def _is_running(optimizer: Optimizer) -> bool:
    """Return True if a `step` of the optimizer calls this one, which has hooks too: a subclass may call its base's."""
    frame = inspect.currentframe()
    while frame is not None:  # in every step, so without the generators of `traceback`
        code = frame.f_code
        if code.co_name == "step" and any(frame.f_locals.get(name) is optimizer for name in code.co_varnames[:1]):
            return True
        frame = frame.f_back
    return False


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
