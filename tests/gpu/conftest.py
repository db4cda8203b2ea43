from pathlib import Path

import pytest

from tests.support import devices

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            for warning in ("TensorFloat32 tensor cores", "Synchronization debug mode is a prototype"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}:UserWarning"))


@pytest.fixture
def needs_cuda():
    """What the test shows does not exist on other devices."""
    if devices.accelerator() != "cuda":
        pytest.skip(f"shows what CUDA does, not `--accelerator={devices.accelerator()}`")
