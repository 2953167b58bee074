"""Which graphs a rank makes, and in which thread."""

from threading import Thread, local
from types import SimpleNamespace

import pytest

from inkrt.runtime.engine_file import DRAFT_STEP
from inkrt.runtime.executor import cuda_rank, cuda_rounds
from inkrt.runtime.executor.cuda_memory import ROUND_CODE
from inkrt.runtime.executor.cuda_rank import CudaRank


class Device:
    """As in cuda.core: an object for each thread, which must be made current to give streams."""

    _own = local()

    def __new__(cls, device_id: int) -> "Device":
        if not hasattr(cls._own, "device"):
            cls._own.device = super().__new__(cls)
            cls._own.device.is_current = False
        device: Device = cls._own.device
        device.device_id = device_id
        return device

    def set_current(self) -> None:
        self.is_current = True

    def create_stream(self) -> str:
        assert self.is_current, "not yet initialized, perhaps you forgot to call .set_current()"
        return "stream"

    def create_graph_builder(self) -> SimpleNamespace:
        # The body of a conditional node.
        def body() -> str:
            return Device(self.device_id).create_stream()

        self.create_stream()
        return SimpleNamespace(begin_building=lambda: None, if_then=body)


def test_a_graph_with_bodies_is_built_in_a_thread_that_did_not_open_the_engine() -> None:
    rank = object.__new__(CudaRank)
    rank.device = Device(3)
    rank.device.set_current()
    found = [rank.begin_graph().if_then()]
    thread = Thread(target=lambda: found.append(rank.begin_graph().if_then()))
    thread.start()
    thread.join()
    assert found == ["stream", "stream"]


@pytest.mark.parametrize("on_device", [True, False])
def test_rounds_can_be_left_to_the_host(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    monkeypatch.setattr(cuda_rounds, "ON_DEVICE", on_device)
    monkeypatch.setattr(cuda_rank, "RankRounds", lambda rank, _vocab_size: f"of {rank.rank}")
    monkeypatch.setattr(CudaRank, "capture", lambda *_args, **_options: "graph")
    monkeypatch.setattr(CudaRank, "enter", lambda _rank: None)
    rank = object.__new__(CudaRank)
    rank.rank, rank.rounds, rank._vocab_size = 2, None, 400
    rank.memory = SimpleNamespace(connect=lambda _mailboxes: None)  # type: ignore[assignment]
    rank.plans = {"decode": None, DRAFT_STEP: None}  # type: ignore[dict-item]
    rank.modules = {ROUND_CODE: None}
    rank.prepare([])
    assert rank.rounds == ("of 2" if on_device else None)
