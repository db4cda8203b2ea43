"""Pytest's side of the virtual accelerator: the fixture `virtual_devices`, and which tests a run has.

torch takes the registered devices for the accelerator of the whole process, and they cannot be added after the first
backward pass. So tests on them run by themselves, with `pytest --accelerator=virtual`; other runs leave them out.
"""

import pytest
import torch

from tests import virtual_accelerator
from tests.virtual_accelerator.build import NoCompilerError

_MISSING = pytest.StashKey[str]()


def pytest_configure(config):
    config.addinivalue_line("markers", "virtual: uses `virtual_devices`, and so runs with --accelerator=virtual only")
    if config.getoption("--accelerator") == "virtual":
        try:
            virtual_accelerator.load()
        except NoCompilerError as error:
            config.stash[_MISSING] = str(error)


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "virtual_devices" in getattr(item, "fixturenames", ()):
            item.add_marker("virtual")
    if config.getoption("--accelerator") != "virtual":
        left_out = [item for item in items if item.get_closest_marker("virtual")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def virtual_devices(request):
    """The virtual devices, with counts at zero; fails if an error is found that the test has not raised."""
    from tests.conftest import skip

    if reason := request.config.stash.get(_MISSING, None):
        skip(reason)
    torch.accelerator.set_device_index(0)
    virtual_accelerator.reset()
    yield [torch.device("virtual", index) for index in range(torch.accelerator.device_count())]
    virtual_accelerator.check()
