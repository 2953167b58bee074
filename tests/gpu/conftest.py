"""GPU tests run where a GPU and NVRTC are; elsewhere they are skipped with the reason."""

import pytest


@pytest.fixture(scope="session")
def gpu():
    """The GPU's compute capability, e.g. "sm_90"."""
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    try:
        device = core.Device(0)
        device.set_current()
    except Exception as error:
        pytest.skip(f"no usable GPU: {error}")
    return f"sm_{device.compute_capability.major}{device.compute_capability.minor}"
