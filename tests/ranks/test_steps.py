"""The steps of one rank in this process: the reducer records, and the answers of other ranks are prepared."""

import math
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ddp_ext.batches.weights import WeightRule
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.fabric import DDPCheckpointStrategy
from lightning_ddp_ext.loaders.step_loader import StepParticipation
from lightning_ddp_ext.ranks import steps
from lightning_ddp_ext.ranks.sample_counts import BatchSamples, sums_and_means
from lightning_ddp_ext.ranks.steps import EvenSteps, RankGradient
from lightning_ddp_ext.reducer.control import StepControl
from lightning_ddp_ext.reducer.gradient_reducer import AccumulationWindow

ACTIVE = (0, 1)


class RecordingReducer:
    """Stands in for a `GradientReducer` and records each synchronisation."""

    process_group = None

    def __init__(self):
        self.control = StepControl()
        self.buffers = SimpleNamespace(settle=lambda: None)
        self.sent = []  # weight, scale, divisor, position
        self.discarded = 0  # backward passes
        self.defers_hooks = False  # in the next backward pass

    @contextmanager
    def synchronize(self, weight):
        yield
        self.sent.append((weight, self.control.scale, self.control.divisor, self.control.position))
        self.control.exchanged = SimpleNamespace(weights=[weight])

    def has_unsynchronized(self, parameters):
        return False

    def unmanaged_parameters(self, parameters):
        return []

    def unsynchronized_parameters(self):
        return []

    def defer_hooks(self):
        self.defers_hooks = True

    def discard_gradients(self):
        self.discarded += 1
        return nullcontext()

    def close(self):
        pass


@pytest.fixture
def make_gradient():
    gradients = []

    def make(weight_by="equal", automatic=True, accumulate=1):
        module = BoringModel()
        module.automatic_optimization = automatic
        epoch_loop = SimpleNamespace(batch_idx=0, total_batch_idx=0)
        trainer = SimpleNamespace(
            lightning_module=module,
            global_rank=0,
            accumulate_grad_batches=accumulate,
            fit_loop=SimpleNamespace(epoch_loop=epoch_loop, _skip_backward=False),
            optimizers=[],
            precision_plugin=None,
        )
        gradients.append(RankGradient(trainer, RecordingReducer(), WeightRule(weight_by, print), BatchSamples(0)))
        return gradients[-1], epoch_loop

    yield make
    for gradient in gradients:
        gradient.close()


def run_batches(gradient, epoch_loop, batches, accumulate=1):
    """Run a backward pass for each batch, and return the factors on the losses; 0 for a batch without weight."""
    factors = []
    for index, batch in enumerate(batches):
        epoch_loop.batch_idx = epoch_loop.total_batch_idx = index
        gradient.begin(batch, ACTIVE)
        ends_window = (index + 1) % accumulate == 0
        loss = torch.tensor(1.0, requires_grad=True)
        weighted, discarded = gradient.weigh(loss), gradient.reducer.discarded
        with gradient.window.postpone(not ends_window), gradient.synchronize():
            run_pass(gradient.reducer, weighted)
        factors.append(float(loss.grad) * (gradient.reducer.discarded == discarded))
    return factors


def run_pass(reducer, loss):
    assert reducer.defers_hooks
    reducer.defers_hooks = False
    loss.backward()


def run_loop_of_fabric(weights, accumulate=1, weight_by="equal"):
    """Do the same with the strategy for Fabric on a rank that sets its weights; return the reducer, too."""
    strategy, factors = DDPCheckpointStrategy(weight_by=weight_by), []
    strategy._reducer = reducer = RecordingReducer()
    strategy._batches[0].participation = StepParticipation(ACTIVE, is_shadow=False, is_uneven=False)
    strategy.precision.backward = lambda loss, module: run_pass(reducer, loss)
    for index, strategy.batch_weight in enumerate(weights):
        loss, discarded = torch.tensor(1.0, requires_grad=True), reducer.discarded
        with strategy.accumulating("module", (index + 1) % accumulate != 0):
            strategy.backward(loss, None)
        factors.append(float(loss.grad) * (reducer.discarded == discarded))
    return factors, reducer


def test_each_batch_is_sent_with_its_weight_and_position(make_gradient):
    gradient, loop = make_gradient(float)
    assert run_batches(gradient, loop, [3, 5]) == [1.0, 1.0]
    assert gradient.reducer.sent == [(3.0, 3.0, None, 0), (5.0, 5.0, None, steps._PASSES)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_optimizer_that_calls_its_closure_again_needs_a_window_of_one_batch(make_gradient, accumulate):
    gradient, loop = make_gradient(float, accumulate=accumulate)
    run_batches(gradient, loop, [3, 5, 4, 2][: 2 * accumulate], accumulate)
    gradient.begin(2, ACTIVE)  # the closure runs `training_step` again
    gradient.weigh(torch.tensor(1.0, requires_grad=True))
    with pytest.raises(UnsupportedFeatureError, match=r"rank 0: .*more than once") if accumulate > 1 else nullcontext():
        gradient.synchronize()


def test_a_window_is_sent_once_with_the_sum_of_its_weights(make_gradient):
    gradient, loop = make_gradient(float, accumulate=4)
    of_trainer = run_batches(gradient, loop, [0, 3, 0, 6], accumulate=4)
    of_fabric, reducer = run_loop_of_fabric([0, 3, 0, 6, 0, 0, 0, 0], accumulate=4)
    # Losses are weighted relative to the first one with a weight; a batch of weight 0 changes no other.
    assert of_trainer == of_fabric[:4] == [0.0, 1.0, 0.0, 2.0]
    sent = (9.0, 3.0 * 4, None)  # Lightning, or the loop, has divided losses by 4
    assert [one[:3] for one in gradient.reducer.sent] == [sent]
    assert reducer.sent == [(*sent, 0), (0.0, 0.0, None, 0)]
    # Lightning drops the gradients of an unfinished window.
    assert run_batches(gradient, loop, [5], accumulate=4) == run_batches(gradient, loop, [2], accumulate=1) == [1.0]
    assert gradient.reducer.sent[1][0] == 2.0


def test_a_batch_is_added_once_until_it_is_synchronised(make_gradient):
    gradient, _ = make_gradient(float, accumulate=2)
    gradient.begin(5, ACTIVE)
    for weighs in (2, 1, 0):  # L-BFGS runs its closure several times
        for _ in range(weighs):
            gradient.weigh(torch.tensor(1.0))
        with gradient.synchronize():
            pass
    assert [sent[0] for sent in gradient.reducer.sent] == [5.0, 5.0, 0.0]


@pytest.mark.parametrize(("automatic", "sent"), [(True, (1.0, 1.0, 1.0)), (False, (1.0, None, None))])
def test_sums_are_not_divided_by_the_ranks(make_gradient, automatic, sent):
    gradient, loop = make_gradient("sum", automatic)
    factors = run_batches(gradient, loop, [None])
    assert factors == [1.0 if automatic else 2.0]  # the mean of two ranks over twice their losses is the sum
    assert [one[:3] for one in gradient.reducer.sent] == [sent]


def test_sums_are_not_divided_by_the_ranks_under_fabric():
    factors, reducer = run_loop_of_fabric([1.0, 0.0], weight_by="sum")
    assert factors == [2.0, 0.0]
    assert [one[:3] for one in reducer.sent] == [(1.0, None, None), (0.0, None, None)]


def test_blocks_that_postpone_synchronisation_may_contain_each_other():
    window, seen = AccumulationWindow(), []
    with window.postpone():
        for is_postponed in (True, False):
            with window.postpone(is_postponed):
                seen.append(window.is_postponed)
            seen.append(window.is_postponed)
    assert (seen, window.is_postponed) == ([True] * 4, False)


def test_passes_of_a_manual_step_have_different_positions(make_gradient):
    gradient, loop = make_gradient("equal", automatic=False)
    loop.total_batch_idx = 4
    gradient.begin(None, ACTIVE)
    for _ in range(3):
        gradient.weigh(torch.tensor(1.0))
        with gradient.synchronize():
            pass
    assert [sent[3] - 4 * steps._PASSES for sent in gradient.reducer.sent] == [0, 1, 2]


@pytest.mark.parametrize("is_shadow", [False, True])
def test_a_skipped_batch_and_a_rank_without_data_have_no_weight(make_gradient, is_shadow):
    gradient, _ = make_gradient()
    if is_shadow:
        gradient.begin_without_data(ACTIVE)
    else:
        gradient.begin(None, ACTIVE)
        with pytest.warns(UserWarning, match="returned None on rank 0"):
            assert gradient.skip().requires_grad
        assert (gradient.log_weight, gradient.weight) == (1.0, 0.0)  # logged values keep their weight
    gradient.weigh(torch.tensor(1.0))
    with gradient.synchronize():
        pass
    assert gradient.reducer.discarded == 1
    assert [sent[0] for sent in gradient.reducer.sent] == [0.0]


def test_samples_are_weights_and_a_batch_that_cannot_be_counted_is_an_error_before_its_step(make_gradient):
    gradient, loop = make_gradient("samples")
    run_batches(gradient, loop, [torch.zeros(3, 2), torch.zeros(5, 2)])
    assert [sent[0] for sent in gradient.reducer.sent] == [3.0, 5.0]
    uncountable = {"a": torch.zeros(3), "b": torch.zeros(4)}
    with pytest.raises(ValueError, match=r'rank 0: `weight_by="samples"` needs numbers of samples.*ambiguous.*"equal"'):
        gradient.begin(uncountable, ACTIVE)
    gradient, loop = make_gradient("equal")
    assert run_batches(gradient, loop, [uncountable]) == [1.0]


def test_a_closure_without_a_backward_pass_still_synchronises(make_gradient):
    gradient, _ = make_gradient()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    gradient.begin(None, ACTIVE)
    assert gradient.run_closure(lambda: "loss", optimizer) == "loss"
    assert len(gradient.reducer.sent) == 1

    def run_backward():
        gradient.weigh(torch.tensor(1.0))
        with gradient.synchronize():
            return "loss"

    assert gradient.run_closure(run_backward, optimizer) == "loss"
    assert len(gradient.reducer.sent) == 2


class Subclass(torch.optim.SGD):
    """Calls the step of its base class, which has hooks too once any optimizer of that class exists."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("closure", [None, lambda: None], ids=["plain", "closure"])
def test_a_step_of_a_subclass_counts_once_and_steps_of_other_optimizers_differ(make_gradient, closure):
    def steps_of(*order):
        gradient, _ = make_gradient()
        weight, bias = gradient._module.layer.parameters()
        optimizers = Subclass([weight], lr=0.1), torch.optim.SGD([bias], lr=0.1)
        for index in order:
            optimizers[index].step(closure)
        return gradient.guard.steps, gradient.guard.optimizers

    assert steps_of(0, 1, 0)[0] == 3
    assert steps_of(0, 1, 0) == steps_of(1, 0, 0)
    assert steps_of(0, 1, 0) != steps_of(0, 1, 1)


@pytest.fixture
def even_steps():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False)
    trainer.strategy._lightning_module = LightningModule()
    samples = BatchSamples(0)
    samples.weight = lambda batch: batch  # of a batch that is its weight
    with ExitStack() as cleanup:
        yield EvenSteps(cleanup, trainer, samples, None)


def by_lightning(tensor, group, reduce_op):
    return "by Lightning", reduce_op


def log(even_steps, value, operation="mean"):
    """Log a value, and return the result of its reduction."""
    found = []
    value = torch.tensor(value)
    even_steps._log("loss", None, lambda: found.append(even_steps.reduce(value, None, operation, by_lightning)))
    return found[0]


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1.0, 4.0], [2.0, 1.0], 2.0),
        ([math.nan, 4.0], [0.0, 1.0], 4.0),  # a mean over nothing
        ([1.0, 4.0], [0.0, 0.0], 2.5),
        ([1.0, 4.0], [math.nan, 7.0], 2.5),  # one rank cannot count its samples
    ],
)
def test_logged_means_of_steps_are_weighted(even_steps, monkeypatch, values, weights, expected):
    sent = []

    def run_steps(all_reduce):
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        logs = [partial(log, even_steps, value) for value in values]
        return [even_steps.evaluation_step(weight, one) for weight, one in zip(weights, logs, strict=True)]

    run_steps(lambda part, group: sent.append(part.clone()))
    found = run_steps(lambda part, group: part.copy_(sum(sent)))
    assert [value.item() for value in found] == [expected, expected]
    assert found[0].dtype == torch.float32


def test_a_rank_without_values_is_in_no_mean_and_no_sum():
    values, sent = torch.tensor([1.0, 6.0]), []
    for own, weight in ((values, 0.0), (3 * values, 0.0), (torch.full((2,), math.nan), None)):
        sums_and_means(own, weight, lambda part: sent.append(part) or part)
    sums, means = sums_and_means(values, 0.0, lambda part: sum(sent))
    assert sums.tolist() == [4.0, 24.0]
    assert means.tolist() == [2.0, 12.0]


def test_sums_and_extremes_of_a_step_are_reduced_without_the_barrier_of_lightning(even_steps, monkeypatch):
    sent = []
    monkeypatch.setattr(dist, "all_reduce", lambda part, operation, group: sent.append(operation))
    for operation in ("sum", "max", "min"):
        assert even_steps.evaluation_step(2.0, partial(log, even_steps, 3.0, operation)) == 3.0
    assert sent == [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN]
    # Lightning reduces all other values: not logged, or logged outside of a step.
    reduce = partial(even_steps.reduce, torch.ones(()), None, "mean", by_lightning)
    assert even_steps.evaluation_step(2.0, reduce) == log(even_steps, 1.0) == ("by Lightning", "mean")
