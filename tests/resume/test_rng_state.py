"""RNG state of a process and of loaders is captured and restored."""

import io
import itertools
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, RandomSampler, Subset

from lightning_ddp_ext.distributed import exchange
from lightning_ddp_ext.resume.rng_state import (
    SharedRandomNumbers,
    capture_rng_state,
    capture_states,
    find_loader_rngs,
    gather_states,
    load_state,
    restore_rng_state,
    restore_states,
    seed_all,
)
from tests.support.fake_group import run_ranks

KINDS = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "Python": lambda: random.Random(1),
    "NumPy, of old": lambda: numpy.random.RandomState(1),
    "NumPy": lambda: numpy.random.default_rng(1),
    "NumPy, with arrays": lambda: numpy.random.Generator(numpy.random.Philox(1)),
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0.0, 1.0) for _ in range(3)]
    return generator.standard_normal(3).tolist()


def in_a_checkpoint(value):
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


class Drawing(Dataset):
    def __init__(self, generator):
        self.samples = list(range(4))
        self.generator = generator

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_draws_the_same_from_a_saved_state_and_from_a_seed(kind):
    generator, other = KINDS[kind](), KINDS[kind]()
    draw(generator)
    saved = in_a_checkpoint(capture_states([generator]))
    expected = draw(generator)
    assert draw(other) != expected
    restore_states([other], saved)
    assert draw(other) == expected
    assert draw(other) != expected
    drawn = []
    for seed in (5, 5, 6):
        seed_all([generator], seed)
        drawn.append(draw(generator))
    assert drawn[0] == drawn[1] != drawn[2]


def test_generators_of_other_kinds_are_left_alone():
    made = [make() for make in KINDS.values()]
    for first, second in itertools.permutations(made, 2):
        expected = capture_states([first])
        restore_states([first], capture_states([second]))
        restore_states([first], capture_states([first, second]))
        assert capture_states([first]) == expected


def test_generators_are_found_in_loaders_samplers_and_datasets_once():
    of_loader = torch.Generator()
    of_sampler, first, second = (random.Random(number) for number in range(3))
    dataset = ConcatDataset([Subset(Drawing(first), [0, 1]), Drawing(second), Drawing(first)])
    sampler = RandomSampler(dataset, generator=of_loader)
    sampler.other = of_sampler
    loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 2, drop_last=False), generator=of_loader)
    found = find_loader_rngs([loader, loader])
    assert len(found) == 4
    assert {id(generator) for generator in found} == set(map(id, (of_loader, of_sampler, first, second)))


def test_samplers_may_be_of_any_class_and_generators_without_a_state_are_none():
    sampler = SimpleNamespace(generator=random.Random(2))
    loader = DataLoader(Drawing(random.SystemRandom()), sampler=[0])
    vars(loader)["sampler"] = sampler
    assert find_loader_rngs([loader]) == [sampler.generator]


def draw_from_process():
    of_numpy = numpy.random.standard_normal(), numpy.random.rand()
    return [random.gauss(0, 1), random.random(), *of_numpy, *torch.rand(3).tolist()]


def test_a_restored_process_draws_the_same_numbers():
    for _ in range(2):  # the second time, a Gaussian number is kept for the next call
        random.gauss(0, 1)
        numpy.random.standard_normal()
        states = capture_rng_state()
        drawn = draw_from_process()
        assert draw_from_process() != drawn
        restore_rng_state(in_a_checkpoint(states))
        assert draw_from_process() == drawn


@pytest.fixture
def draw_on_device(monkeypatch):
    """Draw from a device other than CUDA, with one generator."""
    generator = torch.Generator()
    module = SimpleNamespace(
        get_rng_state=generator.get_state, set_rng_state=generator.set_state, manual_seed=generator.manual_seed
    )
    monkeypatch.setattr(torch, "privateuseone", module, raising=False)
    clear_cache = getattr(torch.get_device_module, "cache_clear", lambda: None)  # torch 2.6 has no cache
    clear_cache()
    yield lambda: draw(generator)
    clear_cache()


def test_a_device_of_any_kind_draws_the_same_numbers_again_and_shares_them_between_ranks(draw_on_device):
    device = torch.device("privateuseone")
    states = capture_rng_state(device)
    drawn = draw_on_device(), draw_from_process()
    assert (draw_on_device(), draw_from_process()) != drawn
    restore_rng_state(in_a_checkpoint(states), device)
    assert (draw_on_device(), draw_from_process()) == drawn
    assert capture_rng_state(torch.device("cpu")).keys() < states.keys()  # resumed on another kind of device
    shared = []
    for seed in (1, 2):
        torch.privateuseone.manual_seed(seed)
        own = draw_on_device()
        torch.privateuseone.manual_seed(seed)
        with SharedRandomNumbers(5, device).shared(0):
            shared.append(draw_on_device())
        assert draw_on_device() == own
    assert shared[0] == shared[1]


def numbers_of_a_step(shared, seed, number=0):
    """Draw around and within a step; ranks differ in their seeds."""
    torch.manual_seed(seed)
    drawn = {"before": torch.rand(())}
    with shared.shared(number):
        drawn["step"] = torch.rand(())
        with shared.own():
            drawn["closure"] = torch.rand(())
            with shared.shared(number + 1):
                drawn["inner step"] = torch.rand(())
        drawn["step, again"] = torch.rand(())
    drawn["after"] = torch.rand(())
    return {name: float(value) for name, value in drawn.items()}


def test_shared_numbers_are_those_of_all_ranks_and_leave_no_trace_in_others():
    shared = SharedRandomNumbers(5)
    first, second = (numbers_of_a_step(shared, seed) for seed in (1, 2))
    own = ["before", "closure", "after"]
    for drawn, seed in ((first, 1), (second, 2)):
        torch.manual_seed(seed)
        assert [drawn[name] for name in own] == [float(torch.rand(())) for _ in own]
    common = first.keys() - set(own)
    assert {name: first[name] for name in common} == {name: second[name] for name in common}
    assert len(set(first.values())) == len(first)
    others = [numbers_of_a_step(shared, 1, 3), numbers_of_a_step(SharedRandomNumbers(6), 1)]
    assert len({drawn["step"] for drawn in (first, *others)}) == 3


def test_a_failure_leaves_a_rank_its_own_numbers():
    shared = SharedRandomNumbers(5)
    torch.manual_seed(1)
    expected = float(torch.rand(()))
    torch.manual_seed(1)
    with pytest.raises(ArithmeticError), shared.shared(0), shared.own():
        raise ArithmeticError
    assert float(torch.rand(())) == expected


def test_rank_0_alone_gets_the_states_of_all_ranks_for_a_checkpoint(monkeypatch):
    """No rank decodes a state before the run resumes, and equal states are written once."""

    def gather(group):
        own = {"now": states[group.rank], "loaders": [torch.ones(group.rank % 3)]}
        return states[group.rank], gather_states(own, group)

    states = []
    for seed in (1, 2, 3, 1):
        random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
        draw_from_process()
        states.append(capture_rng_state())
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "unpack", None)
        found = run_ranks(4, gather)
    assert [len(rows) for _, rows in found] == [4, 0, 0, 0]
    file = io.BytesIO()
    torch.save({"of_ranks": found[0][1]}, file)
    assert file.tell() < 3 * 14_000  # plain values take 13,500 for a state, and a rank has at least two
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)["of_ranks"]
    assert [load_state(row)["now"] for row in saved] == [state for state, _ in found]
    assert saved[0] is saved[3]
    assert len({id(row) for row in saved}) == 3
