"""`verify` names the line at which several devices train something else than one, and no line of healthy modules."""

import gc
import inspect
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import time
from functools import partial

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPJoinStrategy
from lightning_ddp_ext.cli import verify as cli
from lightning_ddp_ext.verification import (
    Check,
    ImpossibleError,
    Report,
    operations,
    processes,
    relations,
    samples,
    verify,
)
from tests.verification import modules
from tests.verification.modules import Module, but_slow, line_of, make_data

GRADIENT = "gradient of a batch"


def found(module, data=None, **options):
    report = verify(module, make_data() if data is None else data, **options)
    return report, {check.name: check for check in report.findings}


@pytest.mark.parametrize(
    "defect", but_slow(modules.COUPLED, modules.centred, modules.hardest, modules.with_a_masked_class)
)
def test_the_line_at_which_samples_influence_each_other_is_named(defect):
    report, findings = found(Module(defect))
    assert line_of(defect) in findings[GRADIENT].where
    assert report.use == ""
    with pytest.raises(AssertionError, match=line_of(defect)):
        report.raise_for_findings()


def test_the_line_of_a_backward_pass_is_named():
    _, findings = found(Module(modules.normalised_gradient))
    assert line_of(modules.Normalised) in findings[GRADIENT].where


def test_without_the_comparison_of_operations_no_line_is_named(monkeypatch):
    monkeypatch.setattr(relations.Differences, "_relate", lambda *_: None)
    for defect in (modules.centred, modules.hardest):
        _, findings = found(Module(defect))
        assert findings[GRADIENT].where == ""


@pytest.mark.parametrize("defect", but_slow(modules.WEIGHTED, modules.masked))
def test_the_line_that_has_the_divisor_of_a_mean_is_named(defect):
    report, findings = found(Module(defect))
    assert line_of(defect) in findings[GRADIENT].where
    assert "`weight_by`" in findings[GRADIENT].remedy
    assert report.use == ""


def test_a_sum_and_its_line_are_named_with_the_strategy_to_use():
    report, findings = found(Module(modules.added_up))
    assert line_of(modules.added_up) in findings[GRADIENT].where
    assert report.use == 'strategy=BalancedDDPStrategy(weight_by="sum")'


@pytest.mark.parametrize("compute", but_slow(modules.HEALTHY, modules.noisy, modules.shuffled_and_sorted))
def test_nothing_is_found_in_healthy_steps(compute):
    report, findings = found(Module(compute))
    assert findings == {}
    assert (report.plain, report.use, report.unproved) == ('strategy="ddp"', 'strategy="balanced_ddp"', [])
    report.raise_for_findings()


@pytest.mark.slow
def test_a_step_that_draws_random_numbers_of_each_sample_is_compared_on_ranks(monkeypatch):
    assert found(modules.Sampling())[0].unproved == []
    _, findings = found(modules.Sampling(modules.centred))
    assert line_of(modules.centred) in findings[GRADIENT].where
    monkeypatch.setattr(operations.Draws, "_rows", lambda *_: None)
    report, findings = found(modules.Sampling())
    assert findings == {}
    assert {GRADIENT, "`ddp` on 2 ranks"} <= {*report.unproved}


@pytest.mark.parametrize(
    ("noise", "reason"),
    [
        (modules.padded_noise, None),
        (modules.noise_of_tokens, "does not follow the samples"),
        (modules.noise_of_numpy, "of Python or numpy"),
        (modules.noise_of_python, "of Python or numpy"),
    ],
)
@pytest.mark.slow
def test_random_numbers_that_cannot_be_repeated_are_a_note(noise, reason):
    data = DataLoader(modules.Ragged(), 12, collate_fn=modules.pad)
    report, findings = found(modules.WithNoise(noise), data)
    assert findings == {}
    assert report.unproved == ([] if reason is None else [GRADIENT, "`ddp` on 2 ranks"])
    assert reason is None or all(reason in check.text for check in report.checks)


@pytest.mark.parametrize("collate", [modules.collate_masked, modules.collate_mixup])
def test_a_collate_function_that_draws_random_numbers_is_no_finding(collate):
    data = DataLoader(make_data().dataset, 12, collate_fn=collate)
    report, findings = found(Module(), data)
    assert (findings, report.unproved, report.use) == ({}, [], 'strategy="balanced_ddp"')
    _, findings = found(Module(modules.centred), data)
    assert line_of(modules.centred) in findings[GRADIENT].where


@pytest.mark.parametrize(
    ("module", "defect"), [(modules.Mixup(), modules.Mixup), (Module(modules.mixed), modules.mixed)]
)
def test_samples_that_are_mixed_at_random_are_a_note_whoever_draws(module, defect):
    report, findings = found(module)
    assert (findings, report.unproved, report.use) == ({}, [GRADIENT, "`ddp` on 2 ranks"], "")
    assert line_of(defect) in report.checks[0].text
    assert report.checks[0].remedy.startswith("draw it in the collate function")


def test_the_line_that_uses_a_random_number_of_python_is_named_in_the_note():
    report, findings = found(modules.Scaling())
    assert findings == {}
    (note,) = {check.text for check in report.checks if not check.compared}
    assert line_of(modules.Scaling) in note


class WithRandomNumbersOfARank(Module):
    def on_fit_start(self):
        self.numbers = np.random.default_rng(self.global_rank)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.numbers.uniform(1, 2)


def test_a_generator_that_is_seeded_per_rank_is_no_finding():
    assert found(WithRandomNumbersOfARank())[1] == {}


def count_labels(batch):
    return float((batch[1] > 0).sum())


@pytest.mark.parametrize(
    ("options", "use"),
    [
        ({"weight_by": count_labels}, "BalancedDDPStrategy(weight_by=tests.verification.test_verify.count_labels)"),
        ({"strategy": DDPJoinStrategy(weight_by=count_labels)}, "DDPJoinStrategy(weight_by="),
    ],
)
def test_a_given_strategy_that_cures_a_finding_is_proved(options, use):
    report, findings = found(Module(modules.masked), **options)
    assert findings == {}
    check = report.checks[0]
    assert (check.name, check.verdict) == (GRADIENT, "ok")
    assert check.text.startswith(f"`strategy={use}")
    assert "trains as one process; plain `ddp` does not: a mean over something other" in check.text
    assert f"strategy={use}" in report.use
    assert (report.plain, report.unproved) == ("", [])


@pytest.mark.parametrize(
    ("module", "weight_by", "remedy", "use"),
    [
        (Module(), lambda batch: float(batch[1].sum()), "leave `weight_by` out", 'strategy="balanced_ddp"'),
        (Module(modules.masked), "samples", "set `weight_by` to a function that returns this number", ""),
        (
            Module(modules.added_up),
            "samples",
            'set `weight_by="sum"`',
            'strategy=BalancedDDPStrategy(weight_by="sum")',
        ),
    ],
)
def test_a_given_weight_that_does_not_fit_is_named_with_the_one_that_fits(module, weight_by, remedy, use):
    report, findings = found(module, weight_by=weight_by)
    assert findings["`weight_by`"].text.startswith("`weight_by=")
    assert findings["`weight_by`"].remedy.startswith(remedy)
    assert report.use == use


def test_a_strategy_with_another_weight_than_the_loss_has_is_a_finding():
    report, findings = found(Module(), strategy=DDPJoinStrategy(weight_by="sum"))
    assert "`weight_by=sum` does not fit" in findings["`weight_by`"].text
    assert ([*findings], report.use) == (["`weight_by`"], "")
    assert found(Module(modules.added_up), strategy="ddp_join")[0].use.endswith('(weight_by="sum")')


def test_a_given_weight_that_fails_is_refused():
    with pytest.raises(ImpossibleError, match=r"the given `weight_by` fails: .*'labels'.*Leave it out"):
        verify(Module(), make_data(), weight_by="tokens")


def test_a_given_strategy_that_does_not_cure_a_finding_is_a_finding():
    report, findings = found(Module(modules.masked), strategy="ddp_join")
    assert {GRADIENT, "`ddp_join` on 3 ranks"} <= {*findings}
    assert report.use == ""


def test_a_strategy_of_another_package_is_refused():
    with pytest.raises(ImpossibleError, match=r"'balanced_ddp', 'ddp_checkpoint', 'ddp_join'.*got 'fsdp'"):
        verify(Module(), make_data(), strategy="fsdp")
    with pytest.raises(ImpossibleError, match="`weight_by` must be one of"):
        verify(Module(), make_data(), weight_by="labels")


def test_batch_normalisation_is_a_note_and_hides_nothing():
    report, findings = found(modules.WithNorm())
    assert findings == {}
    assert [check.text for check in report.checks if check.name == "batch normalisation"] == [
        "each device normalises its own samples: `normalisation`"
    ]
    _, findings = found(modules.WithNorm(modules.hardest))
    assert line_of(modules.hardest) in findings[GRADIENT].where


def test_each_backward_pass_of_a_manual_step_is_checked():
    assert found(modules.Manual())[1] == {}
    _, findings = found(modules.Manual(modules.centred))
    assert line_of(modules.centred) in findings[GRADIENT].where


@pytest.mark.slow
def test_a_number_of_optimizer_steps_that_depends_on_the_data_is_found():
    report, findings = found(modules.StepsOfPairs())
    assert findings[GRADIENT].text.endswith("the number of optimizer steps depends on the samples")
    assert findings[GRADIENT].remedy == "take equally many steps for all batches"
    assert report.use == ""


@pytest.mark.parametrize("module", but_slow(modules.OF_RANKS, modules.OnOneRank, modules.RememberingInAHook))
def test_the_line_at_which_ranks_differ_is_named(module):
    _, findings = found(module(), limit=20)
    assert any(line_of(module) in check.where for check in findings.values()), findings


@pytest.mark.slow
def test_the_line_of_a_function_at_which_ranks_differ_and_its_call_are_named():
    _, findings = found(modules.DecidingInAFunction())
    first, second = findings["step of a rank"].where.splitlines()
    assert line_of(modules.maybe_doubled) in first
    assert second.endswith("logits = maybe_doubled(logits)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"), [(modules.RememberingANumber, "average"), (modules.RememberingAList, "means")]
)
def test_only_the_state_that_changes_the_next_step_is_named(module, name):
    _, findings = found(module())
    assert findings["`ddp` on 2 ranks"].text.endswith(f": each rank keeps its own `{name}`")
    assert findings["`ddp` on 2 ranks"].remedy.startswith("make it a buffer")
    assert found(modules.WithCache())[1] == {}


def test_a_queue_of_each_rank_has_its_own_remedy():
    _, findings = found(modules.WithQueue())
    assert "buffer `queue`" in findings["`ddp` on 2 ranks"].text
    assert "take the samples of all ranks (`all_gather`)" in findings["`ddp` on 2 ranks"].remedy


def test_a_sampler_that_gives_every_rank_the_same_samples_is_named():
    data = make_data()
    repeating = DataLoader(data.dataset, batch_sampler=modules.Repeating())
    _, findings = found(Module(), repeating)
    assert line_of(modules.Repeating) in findings["samples of ranks"].where


@pytest.mark.parametrize("persistent", [False, True])
def test_samplers_of_loaders_with_workers_are_compared(persistent):
    data = make_data().dataset
    options = {"num_workers": 2, "persistent_workers": persistent, "multiprocessing_context": "fork"}
    _, findings = found(Module(), DataLoader(data, batch_sampler=modules.Repeating(), **options))
    assert line_of(modules.Repeating) in findings["samples of ranks"].where
    report, findings = found(Module(), DataLoader(data, 8, **options))
    assert (findings, report.unproved) == ({}, [])


def leave_child(path):
    path.write_text(str(subprocess.Popen(["sleep", "60"]).pid))


def test_children_of_forks_end_with_them(tmp_path):
    processes.run_forked([partial(leave_child, tmp_path / "pid")], time.monotonic() + 60)
    child = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("module", "strategy"),
    [
        (modules.Gathering, "ddp"),
        pytest.param(modules.WithUnused, "ddp_find_unused_parameters_true", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_gathers_the_samples_of_all_ranks_is_right(module, strategy):
    report, findings = found(module())
    assert findings == {}
    assert report.use == f'strategy="{strategy}"'
    assert [check.name for check in report.checks] == [GRADIENT, f"`{strategy}` on 2 ranks"]
    assert ("plain `ddp` ends with an error" in report.checks[1].text) == (strategy != "ddp")


@pytest.mark.slow
def test_numbers_that_ranks_gather_for_a_log_hide_nothing():
    report, findings = found(modules.GatheringALog())
    assert findings == {}
    assert {"`ddp` on 2 ranks", "`balanced_ddp` on 2 ranks"} <= {check.name for check in report.checks}
    assert report.use == 'strategy="balanced_ddp"'


def test_finished_batches_are_cut():
    batches = [*make_data(batch_size=12)]
    report, findings = found(Module(), DataLoader(batches, batch_size=None))
    assert findings == {}
    assert report.use == 'strategy="ddp_join"'


def fail_late():
    error = ValueError("no such box")
    processes.note_time(error)
    time.sleep(0.3)
    raise error


def lose_connection():
    time.sleep(0.1)
    raise RuntimeError("connection closed by peer")


def fail_earlier():
    error = KeyError("first")
    vars(error)[processes._RAISED] = time.monotonic() - 5
    time.sleep(0.6)
    raise error


def abort():
    """End as gloo ends the process of a rank whose peer has ended."""
    os.write(2, b"terminate called after throwing an instance of 'gloo::IoException': Connection closed by peer")
    os.abort()


def leave():
    time.sleep(0.3)
    os._exit(3)


def kill_itself():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("functions", "error", "line"),
    [
        ([fail_late, lose_connection], "rank 0 fails first: ValueError: no such box", fail_late),
        ([lose_connection, fail_late], "rank 1 fails first: ValueError: no such box", fail_late),
        ([fail_late, fail_earlier], "rank 1 fails first: KeyError: 'first'", fail_earlier),
        ([abort, fail_late], "rank 1 fails first: ValueError: no such box", fail_late),
        ([abort, leave], "rank 1 fails first: its process ended with exit code 3", None),
        ([lose_connection, kill_itself], "rank 1 fails first: its process ended with SIGKILL", None),
        ([lose_connection, int], "rank 0 loses its connection to other ranks in a collective call", lose_connection),
    ],
)
def test_the_rank_that_failed_first_and_its_error_are_named(functions, error, line):
    with pytest.raises(processes.FailedError) as caught:
        processes.run_forked(functions, time.monotonic() + 30)
    assert str(caught.value) == error
    lines, start = inspect.getsourcelines(line) if line else ([], 0)
    raised = [start + place for place, text in enumerate(lines) if "raise" in text]
    assert [caught.value.line and caught.value.line.number] == (raised or [None])


def test_a_rank_that_fails_is_a_finding_with_its_own_error_line_and_remedy():
    _, findings = found(modules.FailingOnOneRank())
    finding = findings["`ddp` on 2 ranks"]
    assert "rank 1 fails first: " in finding.text
    assert finding.text.endswith("ValueError: no such box")
    assert line_of(modules.FailingOnOneRank) in finding.where
    assert finding.remedy.startswith("one process does not end so")


def gather_unequal():
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1000 + rank))


@pytest.mark.slow
def test_tensors_of_different_sizes_are_an_error_with_a_remedy():
    with pytest.raises(processes.FailedError, match="another size") as caught:
        processes.run_forked([gather_unequal] * 2, time.monotonic() + 60, are_ranks=True)
    assert str(caught.value.line).endswith("  dist.all_reduce(torch.ones(1000 + rank))")
    assert "tensors of the same shape" in caught.value.remedy


def connect():
    port = int(os.environ["MASTER_PORT"])
    open_ = [one.laddr for one in psutil.net_connections("tcp") if one.status == "LISTEN"]
    with socket.create_connection(("127.0.0.1", port)):
        return [os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], [one.ip for one in open_ if one.port == port]]


def test_the_port_of_ranks_is_open_before_they_start_on_this_machine_only():
    found = processes.run_forked([connect] * 2, time.monotonic() + 20, are_ranks=True)
    assert found == [["0", "2", ["127.0.0.1"]], ["1", "2", ["127.0.0.1"]]]


def ask_the_store():
    dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False).set("key", "")


def test_the_store_of_ranks_answers_only_after_all_forks(monkeypatch):
    """A fork in the moment in which the thread of a store asks a name server would wait forever."""
    started, serve = [], processes.serve_socket

    def serve_noting(*arguments):
        started.append(len(multiprocessing.active_children()))
        return serve(*arguments)

    monkeypatch.setattr(processes, "serve_socket", serve_noting)
    processes.run_forked([ask_the_store] * 3, time.monotonic() + 60, are_ranks=True)
    assert started == [3]


def wait_for(other):
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    if rank == 0:
        dist.all_reduce(torch.ones(1))  # waits
    other()


def compute():
    while True:
        pass


@pytest.mark.parametrize(("other", "is_deadlock"), [(compute, False), (partial(time.sleep, 60), True)])
def test_a_rank_that_waits_for_one_that_computes_is_no_deadlock(other, is_deadlock):
    with pytest.raises(processes.TooLateError) as caught:
        processes.run_forked([partial(wait_for, other)] * 2, time.monotonic() + 6, are_ranks=True)
    assert caught.value.is_deadlock == is_deadlock
    assert str(caught.value.line).endswith("  # waits")


def call_deeply(depth):
    return depth and call_deeply(depth - 1) + sum(number for number in range(3))


def compute_while_stacks_are_written(number):
    for _ in range(number):
        processes.write_stacks_in(0.001)
        end = time.monotonic() + 0.003
        while time.monotonic() < end:
            for depth in (3, 17, 60, 5):
                call_deeply(depth)
    return "computed"


def test_a_process_that_computes_survives_that_its_stacks_are_written():
    function = partial(compute_while_stacks_are_written, 1000)
    assert processes.run_forked([function], time.monotonic() + 60) == ["computed"]


def collect_garbage():
    gc.collect()
    return "collected"


def test_a_fork_does_not_collect_garbage_of_its_parent():
    """The destructor of a store waits for a thread that a fork does not have, which ends the process."""
    gc.collect()
    gc.disable()
    try:
        cycle = [dist.TCPStore("127.0.0.1", 0, 1, is_master=True)]
        cycle.append(cycle)
        del cycle
        assert processes.run_forked([collect_garbage], time.monotonic() + 60) == ["collected"]
    finally:
        gc.enable()


class Slow(Module):
    def training_step(self, batch, batch_idx):
        while dist.is_initialized() and self.global_rank == 1:
            pass
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_ranks_that_compute_for_too_long_are_too_slow():
    report, findings = found(Slow(), limit=30)
    assert findings == {}
    assert report.checks[-1].text == "not compared: too slow for `--limit 30`"


def sleep_until_killed():
    time.sleep(60)


def test_lines_of_the_program_that_calls_verify_are_not_shown():
    with pytest.raises(processes.TooLateError) as caught:
        processes.run_forked([sleep_until_killed], time.monotonic() + 2)
    assert str(caught.value.line).endswith("  time.sleep(60)")
    with pytest.raises(processes.TooLateError) as caught:
        processes.run_forked([partial(time.sleep, 60)], time.monotonic() + 2)
    assert caught.value.line is None


def test_the_calling_line_stands_beside_a_line_of_installed_code(monkeypatch):
    monkeypatch.setattr(operations, "_INSTALLED", modules.__file__)
    _, findings = found(CallingModule())
    first, second = findings[GRADIENT].where.splitlines()
    assert line_of(modules.centred) in first
    assert second.endswith("modules.centred(self(batch[0]), batch[1])")
    monkeypatch.undo()
    _, findings = found(CallingModule())
    assert len(findings[GRADIENT].where.splitlines()) == 1


class CallingModule(Module):
    def training_step(self, batch, batch_idx):
        return modules.centred(self(batch[0]), batch[1])


@pytest.mark.slow
def test_a_value_that_only_rank_zero_logs_is_a_note_unless_it_is_monitored():
    report, findings = found(modules.LoggingOnRankZero())
    assert findings == {}
    assert "only some ranks log `of_rank_zero`" in [check.text for check in report.checks]
    _, findings = found(modules.MonitoringRankZero())
    assert findings["logged `of_rank_zero`"].text == "it is monitored, and only some ranks log it"


def test_findings_are_blocks_of_lines():
    check = Check("step", "finding", "it differs", "model:3  loss", "do this")
    with pytest.raises(AssertionError, match=r"\n\nstep: it differs\n  model:3  loss\n  Remedy: do this\.$"):
        Report([check], "", "", 0.0).raise_for_findings()


def test_the_last_lines_say_what_the_exit_code_means_and_what_was_not_proved(capsys):
    finding = Check("step", "finding", "it differs")
    unproved = Check("ranks", "note", "why", compared=False)
    cli._print(Report([finding, unproved], 'strategy="a"', "", 1.0))
    text, use, last = capsys.readouterr().out.rsplit("\n", 3)[:3]
    assert "so that the exit code is 1" in text
    assert use == 'Use Trainer(strategy="a").'
    assert last == "Not compared, for the reasons in the table: ranks."
    cli._print(Report([Check("step", "ok", "")], 'strategy="a"', 'strategy="a"', 1.0))
    assert capsys.readouterr().out.endswith('1.0 s after the imports\nUse Trainer(strategy="a").\n')
    cli._print(Report([unproved], "", "", 1.0))
    assert capsys.readouterr().out.endswith("No strategy is proved, so that the exit code is 2.\n")


def state_of(module):
    numbers = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return numbers, dict(os.environ), [one.tolist() for one in module.state_dict().values()], torch.get_num_threads()


def test_samples_of_a_shuffled_loader_are_the_same_each_time(monkeypatch):
    drawn = []
    monkeypatch.setattr(samples, "Samples", lambda loader, module: drawn.append(next(iter(loader))[1].tolist()))
    dataset, module = make_data().dataset, Module()
    for generator in (None, torch.Generator().manual_seed(5)):
        loader = DataLoader(dataset, 12, shuffle=True, generator=generator)
        before = torch.get_rng_state().tolist(), [] if generator is None else generator.get_state().tolist()
        for _ in range(2):
            samples.draw_samples(module, loader)
        assert before == (torch.get_rng_state().tolist(), [] if generator is None else generator.get_state().tolist())
        assert drawn.pop() == drawn.pop() != dataset.tensors[1][:12].tolist()
        assert next(iter(loader))[1].tolist() != next(iter(loader))[1].tolist()  # without a seed


def test_neither_this_process_nor_the_module_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = modules.Monitored()
    before = state_of(module)
    found(module)
    assert state_of(module) == before
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("module", "data", "reason"),
    [
        (modules.Failing(), None, "ValueError: no such file"),
        (Module(), make_data(repeats=1, batch_size=12).dataset[0], "several training loaders"),
        (Module(), DataLoader([torch.zeros(3, 5)], batch_size=None), "the first batch has 3 samples"),
        (Module(), DataLoader([object()], batch_size=None), "the batch cannot be cut"),
        (Module(), DataLoader([]), "the first batch has 0 samples"),
    ],
)
def test_what_cannot_be_verified_is_refused_with_the_reason(module, data, reason):
    with pytest.raises(ImpossibleError, match=reason):
        verify(module, make_data() if data is None else data)


def test_lightning_sets_no_threads_in_a_fork(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert processes.run_forked([lambda: os.environ["OMP_NUM_THREADS"]], time.monotonic() + 60) == ["1"]


class OfSinglePrecision(Module):
    def training_step(self, batch, batch_idx):
        if self.dtype == torch.float64:
            raise TypeError("no doubles")
        return super().training_step(batch, batch_idx)


class Broken(OfSinglePrecision):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        raise ValueError("no singles")


def test_the_error_in_double_precision_is_shown():
    report, findings = found(OfSinglePrecision())
    assert findings == {}
    assert [one.text for one in report.checks if one.name == "precision"] == [
        "single, because in double precision, `training_step` failed on a copy of the module: TypeError: no doubles"
    ]
    with pytest.raises(ImpossibleError, match=r"no doubles.*; and in single precision: .*no singles"):
        verify(Broken(), make_data())


def test_an_error_of_ranks_is_shown_whatever_another_ddp_would_say():
    class FailingOnce(Module):
        def training_step(self, batch, batch_idx):
            if dist.is_initialized():
                parameters = self.trainer.strategy.model.find_unused_parameters
                raise ValueError("second" if parameters else "first")
            return super().training_step(batch, batch_idx)

    _, findings = found(FailingOnce())
    assert findings["`ddp` on 2 ranks"].text.endswith("ValueError: first")


class OnCuda(Module):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + torch.zeros(1, device="cuda").sum()


def test_a_module_that_needs_cuda_is_refused_with_the_remedy():
    with pytest.raises(ImpossibleError, match=r"the module needs CUDA, but .* create tensors on `self.device`"):
        verify(OnCuda(), make_data())


class NeverStepping(Module):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))


def test_nothing_is_proved_without_an_optimizer_step():
    report, findings = found(NeverStepping())
    assert findings == {}
    assert {"`ddp` on 2 ranks", "`balanced_ddp` on 2 ranks"} <= {*report.unproved}


def test_a_report_without_a_strategy_does_not_pass():
    with pytest.raises(AssertionError, match=r"nothing is proved: ranks\."):
        Report([Check("ranks", "note", "why", compared=False)], "", "", 1.0).raise_for_findings()


def test_a_logged_number_of_low_precision_hides_nothing():
    class Logging(Module):
        def training_step(self, batch, batch_idx):
            self.log("coarse", self(batch[0]).detach().bfloat16().mean())
            logits = self(batch[0])
            return self.compute(logits, batch[1]) + 1e-3 * logits.mean(0).square().sum()

    _, findings = found(Logging())
    assert GRADIENT in findings


def flip_rarely(logits, labels):
    return modules.losses(logits.flip(1) if random.random() > 0.9 else logits, labels).mean()


def test_a_rare_random_choice_is_no_proof():
    assert "`ddp` on 2 ranks" in found(Module(flip_rarely))[0].unproved


class AsArrays(Module):
    def training_step(self, batch, batch_idx):
        return super().training_step([torch.as_tensor(batch["features"]), torch.as_tensor(batch["labels"])], batch_idx)


def collate_arrays(samples):
    features, labels = zip(*samples, strict=True)
    return {"features": np.stack(features), "labels": np.stack(labels), "number": torch.zeros(len(samples), dtype=int)}


def test_batches_of_arrays_are_compared():
    data = DataLoader(make_data().dataset, 8, collate_fn=collate_arrays)
    report, findings = found(AsArrays(), data)
    assert (findings, report.unproved) == ({}, [])
