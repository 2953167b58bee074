"""What host and device agree on: the structs of rounds and their numpy dtypes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER  # noqa: E402

from inkrt.runtime.executor import round_state as mirror  # noqa: E402
from inkrt.runtime.executor.round_state import RoundPolicy, RoundRule, RoundStatus  # noqa: E402


@pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile the structs")
def test_dtypes_are_the_structs(tmp_path: Path) -> None:
    dtypes = {
        "PolicyState": mirror.POLICY_STATE,
        "RoundState": mirror.ROUND_STATE,
        "RoundRecord": mirror.ROUND_RECORD,
    }
    header = ROOT / "plugins/round/state.cuh"
    names = {
        "kMaxDrafts": mirror.MAX_DRAFTS, "kMaxStopIds": mirror.MAX_STOP_IDS,
        "kMaxContexts": mirror.MAX_CONTEXTS, "kRingRecords": mirror.RING_RECORDS,
        "POLICY_FIXED": RoundPolicy.FIXED, "POLICY_THRESHOLD": RoundPolicy.THRESHOLD,
        "POLICY_COST": RoundPolicy.COST, "RULE_COUPLED": RoundRule.COUPLED,
        "RULE_PROBABILISTIC": RoundRule.PROBABILISTIC, "RULE_FORCED": RoundRule.FORCED,
        "STATUS_OK": RoundStatus.OK, "STATUS_FINISHED": RoundStatus.FINISHED,
        "STATUS_ERROR": RoundStatus.ERROR, "STATUS_FULL": RoundStatus.FULL,
    }  # fmt: skip
    text = header.read_text()
    assert set(re.findall(r"\b(?:POLICY|RULE|STATUS)_\w+(?= =)", text)) == {
        name for name in names if name.isupper()
    }
    lines, wanted = [], []
    for name, value in names.items():
        lines.append(f'printf("{name} %d\\n", (int){name});')
        wanted.append(f"{name} {int(value)}")
    for struct, dtype in dtypes.items():
        lines.append(f'printf("{struct} %zu\\n", sizeof({struct}));')
        wanted.append(f"{struct} {dtype.itemsize}")
        assert dtype.fields is not None
        for field, (kind, offset, *_) in dtype.fields.items():
            lines.append(
                f'printf("{struct}.{field} %zu %zu\\n", offsetof({struct}, {field}), '
                f"sizeof({struct}::{field}));"
            )
            wanted.append(f"{struct}.{field} {offset} {kind.itemsize}")
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text(
        f'#include <cstddef>\n#include <cstdio>\n#include "{header}"\n'
        f"int main() {{\n{chr(10).join(lines)}\n}}\n"
    )
    assert COMPILER is not None
    subprocess.run([COMPILER, "-std=c++17", str(source), "-o", str(program)], check=True)
    shown = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == wanted


@pytest.mark.parametrize("name", ["POLICY_STATE", "ROUND_STATE", "ROUND_RECORD"])
def test_every_byte_has_a_name(name: str) -> None:
    """A copy by numpy leaves bytes between fields undefined, and bytes are compared."""
    dtype = getattr(mirror, name)
    ends = [offset + kind.itemsize for kind, offset, *_ in dtype.fields.values()]
    starts = [offset for _, offset, *_ in dtype.fields.values()]
    assert [*starts, dtype.itemsize] == [0, *ends]
