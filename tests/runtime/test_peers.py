"""Tables by which ranks find each other, and what they say of failures."""

import ctypes
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fake import make_config
from test_device_memory import Host

from inkrt.errors import ConfigError
from inkrt.runtime.engine_file import EngineCode, StateLayout, encode_code, plan_file, read_code
from inkrt.runtime.executor.cuda_memory import DeviceMemory
from inkrt.runtime.executor.peers import (
    Mailbox,
    RankSlice,
    describe_error,
    inbox_size,
    looped_back,
    peer_table,
)
from inkrt.runtime.plan import (
    Kernel,
    KernelParam,
    Launch,
    PeersParam,
    Plan,
    TensorParam,
    TensorSpec,
    dangling,
    inbox_bytes,
    slot_bytes,
)

SLOT = 512


def make_plan(name: str, *params: KernelParam) -> Plan:
    tensors = (
        TensorSpec("tokens", "int32", (1,), (1,), "input", "tokens", 0),
        TensorSpec("error.1", "uint8", (4,), (1,), "scratch", "", 0),
    )
    kernel = Kernel("c", "k", (1, 1, 1), (1, 1, 1), 1, 0, True, False, (TensorParam(1), *params))
    launch = Launch("op", "tactic", {}, (), "", 0, (kernel,))
    return Plan(name, 1, 1, tensors, (launch,), 256, {"tokens": 0}, {}, 4)


PLANS = {
    "decode": make_plan("decode", PeersParam(300)),
    "verify2": make_plan("verify2", PeersParam(20), PeersParam(400)),
    "alone": make_plan("alone"),
}


def test_slots_have_room_for_the_largest_launch_of_all_steps() -> None:
    assert slot_bytes(PLANS.values()) == SLOT
    assert slot_bytes([PLANS["alone"]]) == 0
    assert inbox_bytes([PLANS["alone"]], 4) == 0
    assert inbox_bytes(PLANS.values(), 4) == 3 * 4 * SLOT + 8 * 132 + 8 * (3 + 2 * 4)
    assert inbox_size(SLOT, 4) == 3 * 4 * SLOT


def test_plans_come_back_from_their_file(tmp_path: Path) -> None:
    (tmp_path / plan_file(1)).write_bytes(encode_code(EngineCode(PLANS)))
    assert read_code(tmp_path, 1).plans == PLANS
    assert dangling(PLANS["decode"], {"c"}) is None
    assert msgspec.to_builtins(PeersParam(7)) == {"type": "peers", "num_bytes": 7}


def test_every_rank_finds_all_inboxes_and_error_words() -> None:
    """As kernels read them: rank, bytes of a slot, turns, inboxes, error words."""
    memories = []
    hosts = []
    for rank in range(3):
        hosts.append(Host(1 << 20))
        config = make_config(tp_size=3, state=StateLayout(1, 4, 1, 3, ()))
        code = EngineCode(PLANS)
        memories.append(DeviceMemory(hosts[rank].driver, Path(), config, code, 0, rank))
    boxes = [memory.mailbox for memory in memories]
    for rank, memory in enumerate(memories):
        memory.connect(boxes)
        table = list((ctypes.c_uint64 * 9).from_address(memory.peers))
        turns = memory.base + memory.region("turns").offset
        assert table[:3] == [rank, SLOT, turns]
        assert table[3:6] == [other.base + other.region("inbox").offset for other in memories]
        assert table[6:] == [other.error for other in memories]
        assert not any((ctypes.c_uint8 * (8 * 132)).from_address(turns))
        inbox = (ctypes.c_uint8 * (3 * 3 * SLOT)).from_address(memory.mailbox.inbox)
        assert set(inbox) == {0xFF}


def test_an_engine_that_sends_nothing_has_no_inbox() -> None:
    host = Host(1 << 20)
    config = make_config(state=StateLayout(1, 4, 1, 3, ()))
    memory = DeviceMemory(host.driver, Path(), config, EngineCode({"alone": PLANS["alone"]}), 0)
    memory.connect([memory.mailbox])
    assert memory.slot_bytes == 0
    with pytest.raises(KeyError):
        memory.region("inbox")


@pytest.mark.parametrize("part", [RankSlice(0, 2), RankSlice(1, 2), RankSlice(5, 8)])
def test_what_a_slice_sends_arrives_as_that_of_the_others(part: RankSlice) -> None:
    """A kernel writes at inbox[r] + (buffer * ranks + rank) * slot and reads its own inbox."""
    own = Mailbox(1 << 20, 4096)
    boxes = looped_back(own, part, SLOT)
    assert boxes[part.rank] == own
    assert {box.error for box in boxes} == {4096}
    for buffer in range(3):
        written = [box.inbox + (buffer * part.num_ranks + part.rank) * SLOT for box in boxes]
        read = [own.inbox + (buffer * part.num_ranks + r) * SLOT for r in range(part.num_ranks)]
        assert written == read
        assert max(read) + SLOT <= own.inbox + inbox_size(SLOT, part.num_ranks)


def test_tables_are_words_of_64_bits() -> None:
    table = peer_table(1, SLOT, 77, [Mailbox(2**63, 5), Mailbox(9, 6)])
    assert table.dtype == np.uint64
    assert table.tolist() == [1, SLOT, 77, 2**63, 9, 5, 6]


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "1/2/3", "a/b", "0/0", "1.0/2"])
def test_what_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a rank slice is R/N, rank R of N, counted from 0"):
        RankSlice.parse(text)


def test_slices_are_labelled() -> None:
    assert str(RankSlice.parse("3/4")) == "rank slice 3/4, collectives looped back"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0x2, "a kernel gave up waiting (error word 0x2); another process may occupy"),
        (0x30001, "a kernel of rank 2 gave up waiting (error word 0x30001); another process"),
        (
            0x10103,
            "a kernel of rank 0 gave up waiting for rank 1 (error word 0x10103); that",
        ),
        (0x80003, "a kernel of rank 7 gave up waiting for rank 0 (error word 0x80003)"),
    ],
)
def test_failures_name_the_ranks(code: int, words: str) -> None:
    assert describe_error(code).startswith(words)
