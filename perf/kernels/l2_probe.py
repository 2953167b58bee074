"""How much of what the L2 was asked for is still there behind a stream of other bytes.

    python perf/kernels/l2_probe.py

Needs a GPU. A line: megabytes asked for ahead, with which hint; megabytes read in between, with
which hint; whether the same blocks read that asked; the time to read what was asked for, us.
"""

import ctypes
import statistics
import sys
from pathlib import Path

import numpy as np

from inkrt.builder.compile import compile_cubin

PIECE, BLOCKS, WARPS = 4096, 132, 11
RUNS = 9
BETWEEN = 36


def main() -> None:
    """See the module."""
    from cuda.bindings import driver
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    device = Device(0)
    device.set_current()
    macros = (("PIECE", PIECE), ("NUM_BLOCKS", BLOCKS), ("WARPS", WARPS))
    cubin = compile_cubin(Path(__file__).with_suffix(".cu"), macros, "sm_90a")
    code = ObjectCode.from_cubin(cubin)
    fetch, read, idle = (code.get_kernel(name) for name in ("fetch", "stream", "idle"))
    stream = device.create_stream()
    total = 2 << 30
    status, base = driver.cuMemAlloc(total)
    assert not status, status
    status, times = driver.cuMemAlloc(16)
    assert not status, status
    (status,) = driver.cuMemsetD8(base, 1, total)
    config = LaunchConfig(grid=BLOCKS, block=32 * WARPS)
    one = LaunchConfig(grid=1, block=1)
    at = 0

    def take(megabytes: int) -> int:
        """Bytes that no one has read for long."""
        nonlocal at
        if at + (megabytes << 20) > total:
            at = 0
        at += megabytes << 20
        return int(base) + at - (megabytes << 20)

    def run(ahead: int, hint: int, between: int, once: int, shift: int, size: int) -> float:
        found = []
        for _ in range(RUNS):
            region, other, flush = take(size), take(max(between, 1)), take(128)
            launch(stream, config, read, flush, ctypes.c_int((128 << 20) // PIECE),
                   ctypes.c_int(0), ctypes.c_int(1), ctypes.c_uint64(0))  # fmt: skip
            if ahead:
                launch(stream, config, fetch, region, ctypes.c_int((ahead << 20) // PIECE),
                       ctypes.c_int(hint))  # fmt: skip
                launch(stream, one, idle, ctypes.c_int(25_000))
            if between:
                launch(stream, config, read, other, ctypes.c_int((between << 20) // PIECE),
                       ctypes.c_int(0), ctypes.c_int(once), ctypes.c_uint64(0))  # fmt: skip
            stream.sync()
            host = np.array([2**63, 0], np.uint64)
            driver.cuMemcpyHtoD(times, host.ctypes.data, 16)
            launch(stream, config, read, region, ctypes.c_int((size << 20) // PIECE),
                   ctypes.c_int(shift), ctypes.c_int(0), ctypes.c_uint64(int(times)))  # fmt: skip
            stream.sync()
            driver.cuMemcpyDtoH(host.ctypes.data, times, 16)
            found.append(float(host[1] - host[0]) / 1e3)
        return statistics.median(found)

    hints = ("normal", "evict_last")
    for size in (10, 20, 35):
        sys.stdout.write(f"{size} MB, nothing asked for: {run(0, 0, 0, 0, 0, size):.2f} us\n")
        for hint in (0, 1):
            for between, once in ((0, 0), (BETWEEN, 0), (BETWEEN, 1)):
                for shift in (0, 1):
                    us = run(size, hint, between, once, shift, size)
                    sys.stdout.write(
                        f"{size} MB ahead {hints[hint]}, {between} MB between "
                        f"{('normal', 'evict_first')[once]}, shift {shift}: {us:.2f} us\n"
                    )


if __name__ == "__main__":
    main()
