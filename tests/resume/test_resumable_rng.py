import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext.resume.resumable_rng import ResumableRng


class Noise(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index + torch.rand(())


def steps(rng, loader, ahead, stop=None, used=0):
    """Train on batches that are fetched some steps before they are used; a step draws a number itself."""
    batches = rng.iterate(loader, [loader], used, looks_ahead=bool(ahead))
    for _ in range(used):
        next(batches)
    waiting = list(itertools.islice(batches, ahead))
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("stop", [0, 1, 3, 4])
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
