"""The timing cache: how long tactics took on a GPU, in a file that people can read and merge.

A time belongs to what ran: a device, an operator, and the kernels of a tactic with their macros,
launch parameters and sources (`KernelDigests`). Shapes, dtypes and attributes of a call are in
there, as far as kernels depend on them; the call is written beside the times for people. So a
changed source makes old times unused, never wrong. The file knows nothing of how times are taken.
"""

import hashlib
import re
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from inkrt.builder.compile import PLUGIN_FOLDER
from inkrt.errors import ConfigError
from inkrt.plugins.tactic import HOPPER, CallArg, CallArgs, KernelLaunch, Tactic, TensorArg

FORMAT = "ink-timing-cache"
FORMAT_VERSION = 1
# Times that the package brings.
SHIPPED = Path(__file__).parent / "timing_cache.json"
# Whose times count for a target; a build needs no GPU, so it cannot ask one for its name.
DEVICES = {HOPPER: "NVIDIA H200"}


def looped_back(device: str) -> str:
    """A device's name for launches that exchange data, timed on a rank slice.

    These times lack the way between GPUs, so they are never compared with those of real ranks.
    """
    return f"{device}, collectives looped back"


_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class Timing(Struct, frozen=True, forbid_unknown_fields=True):
    """The time of one tactic.

    Attributes:
        tactic: its name.
        kernels: what ran, see `KernelDigests.of_tactic`.
        median_us: GPU time of a call, weights cold in the L2.
        n: times that the median is of.
        context: positions in front of the step.
        commit: of the sources.
        date: of the measurement, YYYY-MM-DD.
    """

    tactic: str
    kernels: str
    median_us: float
    n: int
    context: int
    commit: str
    date: str


class _Call(Struct, frozen=True, forbid_unknown_fields=True):
    op: str
    call: str
    times: list[Timing]


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["ink-timing-cache"]
    format_version: Literal[1]
    devices: dict[str, list[_Call]]


class TimingCache:
    """Times by device, operator and kernels."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, str], dict[str, Timing]] = {}
        self._latest: dict[tuple[str, str, str], Timing] | None = None

    @property
    def devices(self) -> list[str]:
        """Devices that there are times of."""
        return sorted({device for device, _, _ in self._calls})

    def median_us(self, device: str, op: str, kernels: str) -> float | None:
        """The time of what `kernels` names, None if it is not known.

        Calls that differ in nothing that kernels depend on share times; the latest counts.
        """
        if self._latest is None:
            self._latest = {}
            for (of_device, of_op, _), times in self._calls.items():
                for timing in times.values():
                    key = (of_device, of_op, timing.kernels)
                    known = self._latest.setdefault(key, timing)
                    if (timing.date, -timing.median_us) > (known.date, -known.median_us):
                        self._latest[key] = timing
        found = self._latest.get((device, op, kernels))
        return None if found is None else found.median_us

    def add(self, device: str, op: str, call: str, timing: Timing) -> None:
        """Add a time; it replaces that of the same tactic of the same call, whatever ran then."""
        self._calls.setdefault((device, op, call), {})[timing.tactic] = timing
        self._latest = None

    def encode(self) -> bytes:
        """The file: sorted, a line for every time, so that versions of it merge by lines."""
        lines = [f'{{\n"format": "{FORMAT}",\n"format_version": {FORMAT_VERSION},\n"devices": {{']
        for number, device in enumerate(self.devices):
            lines.append(f"{_json(device)}: [")
            calls = sorted(key for key in self._calls if key[0] == device)
            for key in calls:
                lines.append(f'{{"op": {_json(key[1])}, "call": {_json(key[2])}, "times": [')
                times = [_json(timing) for _, timing in sorted(self._calls[key].items())]
                lines += [f"{line}," for line in times[:-1]] + times[-1:]
                lines.append("]}" if key == calls[-1] else "]},")
            lines.append("]" if number == len(self.devices) - 1 else "],")
        return ("\n".join([*lines, "}", "}"]) + "\n").encode()


def read_timing_cache(path: Path) -> TimingCache:
    """Read a file.

    Raises:
        ConfigError: it cannot be read or is no timing cache of this version.
    """
    mend = f"make one with: ink-bench ops ENGINE --tune --timing-cache {path}"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read timing cache {path} ({error.strerror}); {mend}") from None
    try:
        header = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise ConfigError(f"timing cache {path} is damaged ({error}); {mend}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ConfigError(f"{path} is no timing cache (no format {FORMAT!r}); {mend}")
    if (version := header.get("format_version")) != FORMAT_VERSION:
        raise ConfigError(
            f"timing cache {path} has version {version!r}, this inkrt reads {FORMAT_VERSION}; "
            f"{mend}"
        )
    try:
        file = msgspec.convert(header, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(f"timing cache {path} is damaged ({error}); {mend}") from None
    cache = TimingCache()
    for device, calls in file.devices.items():
        for call in calls:
            for timing in call.times:
                cache.add(device, call.op, call.call, timing)
    return cache


class KernelDigests:
    """Names of what tactics run; reads every source once."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._sources: dict[Path, str] = {}

    def of_tactic(self, tactic: Tactic) -> str:
        """Sixteen hex digits over kernels, sources, layouts of weights and the architecture."""
        packings = [packing.name for packing in tactic.packings]
        kernels = [self._description(kernel) for kernel in tactic.kernels]
        return _digest(repr((self._target, packings, kernels)).encode())

    def _description(self, kernel: KernelLaunch) -> tuple[object, ...]:
        if kernel.source not in self._sources:
            self._sources[kernel.source] = _digest(
                *(path.read_bytes() for path in source_files(kernel.source))
            )
        return (
            self._sources[kernel.source], kernel.entry, kernel.defines, kernel.grid, kernel.block,
            kernel.cluster, kernel.smem_bytes, kernel.pdl, kernel.cooperative, kernel.params,
        )  # fmt: skip


def source_files(source: Path) -> list[Path]:
    """A CUDA file and every file of ours that it includes, each once, in order of first use."""
    found = [source]
    for path in found:
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            places = (folder / name for folder in (path.parent, source.parent, PLUGIN_FOLDER))
            included = next((place for place in places if place.is_file()), None)
            if included is not None and included not in found:
                found.append(included)  # its own includes follow
    return found


def describe_call(args: CallArgs) -> str:
    """Shapes, dtypes and attributes of a call, for people."""
    return " ".join(f"{name}={_describe(value)}" for name, value in args.items())


def _describe(value: CallArg) -> str:
    if isinstance(value, TensorArg):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}".replace(" ", "")
    if isinstance(value, list):
        items = [_describe(item) for item in value]
        counts = "+".join(f"{items.count(item)}*{item}" for item in dict.fromkeys(items))
        # Counts do not tell the order; a few digits do.
        order = f"#{_digest(repr(items).encode())[:4]}" if len(set(items)) > 1 else ""
        return f"{counts}{order}"
    return str(value).removeprefix("torch.")


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
