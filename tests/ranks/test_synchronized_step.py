"""The training step of one rank in this process: the reducer records, and the answers of other ranks are prepared."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ddp_ext.errors import UnsynchronizedGradientsError
from lightning_ddp_ext.ranks import synchronized_step
from lightning_ddp_ext.ranks.sample_counts import BatchSamples
from lightning_ddp_ext.ranks.synchronized_step import SynchronizedStep
from lightning_ddp_ext.reducer.control import StepControl


class RecordingReducer:
    """Stands in for a `GradientReducer` and records each synchronisation."""

    process_group = None

    def __init__(self):
        self.control = StepControl()
        self.sent = []  # weight, scale, divisor, position
        self.has_unsynchronized = False

    @contextmanager
    def synchronize(self, weight):
        yield
        self.sent.append((weight, self.control.scale, self.control.divisor, self.control.position))
        self.has_unsynchronized = False

    def unsynchronized(self, parameters):
        return self.has_unsynchronized

    def unmanaged_parameters(self, parameters):
        return []

    def defer_hooks(self):
        pass

    def disregard(self):
        return nullcontext()

    def close(self):
        pass


@pytest.fixture
def make_step():
    steps = []

    def make(weight_by="equal", automatic=True, accumulate=1):
        module = BoringModel()
        module.automatic_optimization = automatic
        epoch_loop = SimpleNamespace(batch_idx=0, total_batch_idx=0)
        trainer = SimpleNamespace(
            world_size=2,
            global_rank=0,
            accumulate_grad_batches=accumulate,
            fit_loop=SimpleNamespace(epoch_loop=epoch_loop, _skip_backward=False),
            optimizers=[],
            precision_plugin=None,
        )
        steps.append(SynchronizedStep(trainer, module, RecordingReducer(), weight_by, BatchSamples(0)))
        return steps[-1], epoch_loop

    yield make
    for step in steps:
        step.close()


def run_batches(step, epoch_loop, batches, accumulate=1):
    """Run a backward pass for each batch, and return the factors on the losses; None for a batch without weight."""
    factors = []
    for index, batch in enumerate(batches):
        epoch_loop.batch_idx = epoch_loop.total_batch_idx = index
        step.begin(batch)
        loss = step.weigh(torch.tensor(1.0))
        factors.append(None if loss is None else float(loss))
        with nullcontext() if (index + 1) % accumulate == 0 else step.block(), step.synchronize():
            pass
    return factors


def test_each_batch_is_sent_with_its_weight_and_position(make_step):
    step, loop = make_step(len)
    assert run_batches(step, loop, [[1] * 3, [1] * 5]) == [1.0, 1.0]
    assert step.reducer.sent == [(3.0, 3.0, None, 0), (5.0, 5.0, None, synchronized_step._PASSES)]


def test_a_window_is_sent_once_with_the_sum_of_its_weights(make_step):
    step, loop = make_step(len, accumulate=2)
    assert run_batches(step, loop, [[1] * 2, [1] * 3], accumulate=2) == [1.0, 1.5]
    assert [sent[:3] for sent in step.reducer.sent] == [(5.0, 2.0 * 2, None)]  # Lightning has divided losses by 2


@pytest.mark.parametrize(("automatic", "sent"), [(True, (1.0, 1.0, 1.0)), (False, (1.0, None, None))])
def test_sums_are_not_divided_by_the_ranks(make_step, automatic, sent):
    step, loop = make_step("sum", automatic)
    factors = run_batches(step, loop, [None])
    assert factors == [1.0 if automatic else 2.0]  # the mean of two ranks over twice their losses is the sum
    assert [one[:3] for one in step.reducer.sent] == [sent]


def test_passes_of_a_manual_step_have_different_positions(make_step):
    step, loop = make_step("equal", automatic=False)
    loop.total_batch_idx = 4
    step.begin(None)
    for _ in range(3):
        step.weigh(torch.tensor(1.0))
        with step.synchronize():
            pass
    assert [sent[3] - 4 * synchronized_step._PASSES for sent in step.reducer.sent] == [0, 1, 2]


@pytest.mark.parametrize("begin", ["skip", "begin_without_data"])
def test_a_skipped_batch_and_a_rank_without_data_have_no_weight(make_step, begin):
    step, _ = make_step()
    if begin == "skip":
        step.begin(None)
        with pytest.warns(UserWarning, match="returned None on rank 0"):
            assert step.skip().requires_grad
    else:
        step.begin_without_data()
    assert step.weigh(torch.tensor(1.0)) is None
    with step.synchronize():
        pass
    assert step.reducer.sent[0][0] == 0.0


@pytest.mark.parametrize(("other_has_counted", "weights"), [(0, [1.0, 1.0]), (1, [3.0, 5.0])])
def test_samples_are_weights_unless_a_rank_cannot_count_them(make_step, monkeypatch, other_has_counted, weights):
    sent = []
    monkeypatch.setattr(
        synchronized_step, "gather_integer", lambda own, group: sent.append(own) or [own, other_has_counted]
    )
    step, loop = make_step("samples")
    run_batches(step, loop, [torch.zeros(3, 2), torch.zeros(5, 2)])
    assert sent == [True]  # once
    assert step.has_equal_weights == (not other_has_counted)
    assert [sent[0] for sent in step.reducer.sent] == weights


def test_a_closure_without_a_backward_pass_still_synchronises(make_step):
    step, _ = make_step()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    step.begin(None)
    assert step.run_closure(lambda: "loss", optimizer) == "loss"
    assert len(step.reducer.sent) == 1


def test_an_optimizer_of_torch_does_not_step_with_unsynchronised_gradients(make_step):
    step, _ = make_step(automatic=False)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(1)
    step.reducer.has_unsynchronized = True
    with pytest.raises(UnsynchronizedGradientsError, match="rank 0: `SGD` is about to step with gradients"):
        optimizer.step()
    assert parameter.item() == 0.0
