"""Decode steps that a device runs ahead of the host.

Each step's last kernel makes the token that it has drawn the input of the next, so the host can
queue steps without knowing their tokens, and reads these a few steps behind. It knows no GPU; the
executor gives it a device and says when anything else has used it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from inkrt.runtime.executor import Sampling, StepInput


class DecodeDevice(Protocol):
    """What a queue drives. Work of the device, all of it, runs in the order of the calls."""

    def begin(self, step_input: StepInput) -> None:
        """Wait for all work, forget tokens drawn, and set the inputs of the next decode step."""

    def extend_pages(self, first: int, pages: Sequence[int]) -> None:
        """Set entries of the page table from `first` on, for the steps that are queued from now."""

    def queue_step(self) -> None:
        """Queue a decode step; it leaves token and position of the next in the inputs."""

    def await_token(self, position: int) -> int:
        """Wait until the token for `position` is drawn, and give it.

        Raises:
            DeviceError: a kernel of the step that draws it gave up, or of one before.
        """


@dataclass(slots=True)
class _Chain:
    """Queued steps that feed each other.

    Attributes:
        slot: of all steps.
        sampling: of all steps.
        pages: what the device's page table holds.
        position: of the step that the host must ask for next to stay in the chain.
        token: that this step reads.
        end: steps at positions below are queued.
        num_taken: tokens that the host has taken.
    """

    slot: int
    sampling: Sampling
    pages: list[int]
    position: int
    token: int
    end: int
    num_taken: int = 0

    def continues(self, step_input: StepInput) -> bool:
        """Whether the step is the next one here."""
        num_common = min(len(self.pages), len(step_input.pages))
        return (
            step_input.position == self.position
            and step_input.tokens[0] == self.token
            and step_input.slot == self.slot
            and step_input.sampling == self.sampling
            and list(step_input.pages[:num_common]) == self.pages[:num_common]
        )


class DecodeQueue:
    """Answers decode calls from steps that are queued already, where they are those asked for.

    It queues one step ahead more with every token that is taken in a row: sessions that take turns
    queue nothing in vain, and a session alone soon has the device always at work.

    Args:
        device: runs the steps.
    """

    def __init__(self, device: DecodeDevice) -> None:
        self._device = device
        self._chain: _Chain | None = None

    def decode(self, step_input: StepInput, num_ahead: int) -> int:
        """See `Executor.decode`."""
        chain, self._chain = self._chain, None  # an error ends it
        position = step_input.position
        if chain is None or not chain.continues(step_input):
            (token,) = step_input.tokens
            self._device.begin(step_input)
            pages = list(step_input.pages)
            chain = _Chain(step_input.slot, step_input.sampling, pages, position, token, position)
        elif new := list(step_input.pages[len(chain.pages) :]):
            self._device.extend_pages(len(chain.pages), new)
            chain.pages += new
        last = position + min(num_ahead, chain.num_taken)
        while chain.end <= last:
            self._device.queue_step()
            chain.end += 1
        chain.position = position + 1
        chain.token = self._device.await_token(chain.position)
        chain.num_taken += 1
        self._chain = chain
        return chain.token

    def clear(self) -> None:
        """The device's inputs or state are used otherwise: the next decode call begins anew."""
        self._chain = None
