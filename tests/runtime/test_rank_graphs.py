"""Which graphs a rank makes, and in which thread."""

from threading import Thread, local
from types import SimpleNamespace

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
