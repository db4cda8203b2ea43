"""The RNG of loaders continues where an interrupted run has ended, on one rank."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext.resume.rng_state import ResumableRng


class Noise(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index + torch.rand(())


def steps(rng, loader, ahead, stop=None, used=0, between=lambda: None):
    """Train on batches that are fetched some steps before they are used; a step draws a number itself."""

    def iterate():  # the iteration begins with the first fetch
        yield from rng.iterate(loader, [loader], used, looks_ahead=bool(ahead))

    batches = iterate()
    for _ in range(used):
        next(batches)
    waiting = list(itertools.islice(batches, ahead))
    between()
    rng.advance()
    made = []
    for number in itertools.count(used):
        if number != stop:
            waiting.extend(itertools.islice(batches, 1))
        if number == stop or not waiting:
            break
        made.append((waiting.pop(0).tolist(), float(torch.rand(()))))
    has_fetched = number or ahead
    return made, rng.record(number if number == stop and has_fetched else None)


@pytest.mark.parametrize(("workers", "ahead"), [(0, 0), (0, 1), (0, 2), (1, 0), (2, 1)])
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_an_interrupted_epoch_goes_on_as_the_whole_one(workers, ahead, stop):
    loader = DataLoader(Noise(), batch_size=2, shuffle=True, num_workers=workers)
    torch.manual_seed(1)
    whole, _ = steps(ResumableRng(), loader, ahead)
    torch.manual_seed(1)
    until, record = steps(ResumableRng(), loader, ahead, stop)
    torch.manual_seed(2)
    resumed = ResumableRng()
    resumed.resume(record)
    rest, _ = steps(resumed, loader, ahead, used=stop)
    assert until + rest == whole
    torch.manual_seed(2)
    control, _ = steps(ResumableRng(), loader, ahead, used=stop)
    assert stop == 4 or control != rest


def test_numbers_that_are_drawn_before_the_first_step_do_not_matter_as_by_a_validation():
    loader = DataLoader(Noise(), batch_size=2, shuffle=True)
    torch.manual_seed(1)
    whole, _ = steps(ResumableRng(), loader, 1)
    torch.manual_seed(1)
    until, record = steps(ResumableRng(), loader, 1, 2)
    resumed = ResumableRng()
    resumed.resume(record)
    rest, _ = steps(resumed, loader, 1, used=2, between=lambda: torch.rand(5))
    assert until + rest == whole


def test_for_loaders_that_resume_by_themselves_only_the_state_of_the_interruption_is_restored():
    torch.manual_seed(1)
    saved = ResumableRng()
    saved.begin([])
    record = saved.record(2)
    expected = torch.rand(3)
    resumed = ResumableRng()
    resumed.resume(record)
    resumed.is_bypassed = True
    torch.manual_seed(2)
    resumed.advance()
    assert torch.equal(torch.rand(3), expected)
    resumed.advance()
    assert not torch.equal(torch.rand(3), expected)


def test_generators_of_a_loader_are_restored_unless_the_next_epoch_has_other_loaders():
    loader = DataLoader(Noise(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
    rng = ResumableRng()
    steps(rng, loader, 0)
    kept, forgotten = rng.record(None), rng.record(None, keeps_loaders=False)
    following = [batch.long().tolist() for batch in loader]
    assert kept.now["loaders"]
    assert forgotten.now["loaders"] == []
    resumed = ResumableRng()
    resumed.resume(kept)
    loader.generator.manual_seed(4)
    assert [batch.long().tolist() for batch in resumed.iterate(loader, [loader])] == following


def test_a_record_between_epochs_restores_the_order_of_the_next():
    loader = DataLoader(Noise(), batch_size=2, shuffle=True)
    torch.manual_seed(1)
    rng = ResumableRng()
    _, record = steps(rng, loader, 0)
    following, _ = steps(rng, loader, 0)
    torch.manual_seed(2)
    resumed = ResumableRng()
    resumed.resume(record)
    assert steps(resumed, loader, 0)[0] == following


def test_generators_of_loaders_continue_if_a_loop_advances_before_its_loader_is_known():
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    loaders = [DataLoader(range(8), batch_size=2, shuffle=True, generator=one) for one in generators]
    saved, resumed = ResumableRng(), ResumableRng()
    list(itertools.islice(saved.iterate(loaders[0], loaders[:1], looks_ahead=False), 2))
    resumed.resume(saved.record(2))
    resumed.advance()
    list(itertools.islice(resumed.iterate(loaders[1], loaders[1:], 2, looks_ahead=False), 3))
    assert torch.equal(generators[1].get_state(), generators[0].get_state())
