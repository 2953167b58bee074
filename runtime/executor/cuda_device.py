"""Opening GPUs: whether driver and devices fit an engine, and access of its ranks to each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inkrt.errors import DeviceError, EngineMismatchError
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.rebuild import rebuild_with

NEEDED_MULTIPROCESSORS = 132
NEEDED_CUDA = 13_000  # as cuDriverGetVersion counts: CUDA 13.0, whose NVRTC compiles the kernels


def require_driver(driver: Any, folder: Path) -> None:
    """Raise if the driver is older than the compiler of the kernels, whose code it cannot load."""
    try:
        status, version = driver.cuDriverGetVersion()
    except Exception:  # without a driver; opening the device says so
        return
    if not status and version < NEEDED_CUDA:
        raise EngineMismatchError(
            f"engine {folder} needs a driver for CUDA {_cuda_name(NEEDED_CUDA)} or newer, "
            f"this one is for CUDA {_cuda_name(version)}; update it to release 580 or newer"
        )


def _cuda_name(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def open_device(device_class: Any, number: int, folder: Path, config: EngineConfig) -> Any:
    """Make the GPU current and check that it runs the engine's target."""
    try:
        device = device_class(number)
        device.set_current()
    except Exception as error:  # cuda.core raises its own classes, and ImportError without a driver
        raise DeviceError(
            f"engine {folder} was built for {config.target}, but no GPU is usable here ({error}); "
            f"check the driver with nvidia-smi, or build with --target cpu"
        ) from None
    capability = device.compute_capability
    found = f"sm_{capability.major}{capability.minor}"
    if found != config.target.rstrip("af"):
        raise EngineMismatchError(
            f"engine {folder} was built for {config.target}, this GPU is {found} ({device.name}); "
            f"rebuild it for {found}: {config.rebuild_command}"
        )
    # Blocks of some kernels wait for each other, one on each multiprocessor of an H200.
    multiprocessors = device.properties.multiprocessor_count
    if multiprocessors < NEEDED_MULTIPROCESSORS:
        raise EngineMismatchError(
            f"engine {folder} needs a GPU with {NEEDED_MULTIPROCESSORS} multiprocessors, "
            f"{device.name} has {multiprocessors}; use a whole GPU, or build with --target cpu"
        )
    return device


def require_peers(driver: Any, devices: Sequence[int], folder: Path, config: EngineConfig) -> None:
    """Raise unless the GPUs of all ranks are there and can write to each other's memory.

    Args:
        driver: `cuda.bindings.driver`; one device of it has been opened.
        devices: numbers of the GPUs, one for each rank.
        folder: of the engine.
        config: of the engine.

    Raises:
        EngineMismatchError: a GPU is missing, or two of them have no peer access.
    """
    if len(set(devices)) == 1:  # which is open
        return
    (status, count) = driver.cuDeviceGetCount()
    count = 0 if status else count
    fitting = 1 << max(count, 1).bit_length() - 1  # engines are of 1, 2, 4 or 8 ranks
    if count <= max(devices):
        raise EngineMismatchError(
            f"engine {folder} is for {config.tp_size} ranks, which need GPUs "
            f"{', '.join(map(str, devices))}, but there are {count}; rebuild it with: "
            + rebuild_with(config.rebuild_command, "--tp-size", str(fitting))
        )
    for a in devices:
        for b in devices:
            if a == b:
                continue
            status, can_access = driver.cuDeviceCanAccessPeer(a, b)
            if status or not can_access:
                raise EngineMismatchError(
                    f"engine {folder} is for {config.tp_size} ranks, but GPU {a} has no peer "
                    f"access to GPU {b}; choose GPUs that NVLink or one PCIe switch connects "
                    f"(nvidia-smi topo -p2p w) with CUDA_VISIBLE_DEVICES, or rebuild it with: "
                    + rebuild_with(config.rebuild_command, "--tp-size", "1")
                )


def enable_peer_access(driver: Any, check: Any, contexts: Sequence[Any]) -> None:
    """Let kernels of the current context write to the memory of other ranks' contexts.

    Args:
        driver: `cuda.bindings.driver`.
        check: turns a driver result into its values or raises.
        contexts: of all ranks.
    """
    own = check(driver.cuCtxGetCurrent())
    for context in contexts:
        if context == own:
            continue
        result = driver.cuCtxEnablePeerAccess(context, 0)
        if result[0] != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            check(result)
