import pytest

from lightning_ddp_ext.distributed.bandwidth import SIZES, AllReduceTime


@pytest.mark.parametrize(("world_size", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_bandwidths_are_those_of_nccls_tests(world_size, factor):
    measured = AllReduceTime(size=1000, seconds=0.5, world_size=world_size)
    assert measured.algorithm_bandwidth == 2000
    assert measured.bus_bandwidth == 2000 * factor


def test_sizes_go_from_a_kibibyte_to_64_mebibytes():
    assert (SIZES[0], SIZES[-1]) == (2**10, 2**26)
