"""Rounds of speculation on GPUs: the graph of a round, its state, and the records it leaves.

    begin_round
    IF(draft)      the plan of the draft step, then choose_width
    SWITCH(width)  case i: the plan of the i-th row step, of "probabilistic" rounds then the ratio
                   test, then commit_round

What the kernels in between decide stands in `plugins/round/round.cu`. Kernels of a plan read
position and number of tokens before they wait for their predecessor, so what changes these is
apart from them by a conditional node or the end of the graph, across which nothing starts early.
All ranks decide the same from the same bits, and leave the same records; those of the first rank
are read.
"""

import ctypes
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import DeviceError
from inkrt.runtime.engine_file import DRAFT_STEP
from inkrt.runtime.executor.cuda_memory import ROUND_CODE, ROUND_REGION
from inkrt.runtime.executor.round_queue import RoundInput, RoundRecord
from inkrt.runtime.executor.round_state import (
    RING_RECORDS,
    ROUND_RECORD,
    ROUND_STATE,
    RoundPolicy,
    RoundRule,
    RoundStatus,
)
from inkrt.runtime.plan import Plan
from inkrt.runtime.spec.width import ConfidenceThreshold, CostAware, CostState, FixedWidth

if TYPE_CHECKING:
    from inkrt.runtime.executor.cuda import CudaExecutor
    from inkrt.runtime.executor.cuda_rank import CudaRank

assert ROUND_STATE.fields is not None
_WRITABLE_END = int(ROUND_STATE.fields["writable_end"][1])  # bytes from the state's start
# Longest that a round may take, in seconds, some thousand times what it does.
ROUND_S = 20.0
# Threads of the kernels between the steps.
_WARP = 32
# Times that the page table may be extended before the first of them has surely got there: more
# than rounds are ever queued.
_STAGED_ENDS = 64


def row_plans(plans: dict[str, Plan]) -> list[Plan]:
    """Those that give a row for every token, the narrowest first; not the draft step's."""
    rows = [
        plan
        for name, plan in plans.items()
        if plan.num_rows == plan.num_tokens and name != DRAFT_STEP
    ]
    return sorted(rows, key=lambda plan: plan.num_tokens)


def cases_of_widths(widths: Sequence[int], most: int) -> list[int]:
    """For 0 to `most` drafts, the place of the narrowest step that reads one token more.

    Args:
        widths: tokens of the steps, rising.
        most: drafts; below the widest.
    """
    return [
        next(case for case, width in enumerate(widths) if width > drafts)
        for drafts in range(most + 1)
    ]


def encode_state(
    given: RoundInput, vocab_size: int, widths: Sequence[int]
) -> NDArray[np.void]:  # of one item
    """The state that a chain of rounds begins with.

    Args:
        given: its first round.
        vocab_size: tokens that can be sampled.
        widths: tokens of the row steps, rising.
    """
    settings = given.settings
    policy, most = settings.policy, settings.most
    state = np.zeros(1, ROUND_STATE)
    state["rule"] = RoundRule[settings.rule.upper()]
    state["most"] = most
    state["num_left"] = given.num_left
    state["writable_end"] = given.writable_end
    state["vocab_size"] = vocab_size
    state["seed"] = given.step.sampling.seed
    state["num_contexts"] = 1
    cases = cases_of_widths(widths, most)
    state["case_of_width"][0, : len(cases)] = cases
    # Callers may name any token; others do not come.
    stop_ids = sorted(token for token in settings.stop_ids if token < vocab_size)
    state["num_stop_ids"] = len(stop_ids)
    state["stop_ids"][0, : len(stop_ids)] = stop_ids
    state["forced"][0, : len(settings.forced)] = settings.forced
    if isinstance(policy, FixedWidth):
        state["policy"] = RoundPolicy.FIXED
    elif isinstance(policy, ConfidenceThreshold):
        state["policy"] = RoundPolicy.THRESHOLD
        state["threshold"] = policy.threshold
    else:
        assert isinstance(policy, CostAware), policy
        _encode_costs(state, policy)
    return state


def _encode_costs(state: NDArray[np.void], policy: CostAware) -> None:
    costs = policy.on_device
    assert costs is not None, "not for a device"
    state["policy"] = RoundPolicy.COST
    state["explore_every"], state["num_first"] = policy.explore_every, policy.num_first
    state["margin"] = policy.margin
    count = len(costs.contexts)
    state["num_contexts"] = count
    state["contexts"][0, :count] = costs.contexts
    state["plain"][0, :count] = [one.plain for one in costs.costs]
    for place, one in enumerate(costs.costs):
        state["rounds"][0, place, : len(one.rounds)] = one.rounds
    learned, own = policy.state, state["policy_state"]
    most = len(learned.reached)
    own["reached"][0, :most], own["accepted"][0, :most] = learned.reached, learned.accepted
    own["unread"] = np.nan if learned.unread is None else learned.unread
    own["num_rounds"], own["num_plain"] = learned.num_rounds, learned.num_plain
    own["drafts_pay"], own["last_width"] = learned.drafts_pay, learned.last_width


def decode_record(record: NDArray[np.void], num_places: int) -> RoundRecord:
    """What a record says.

    Args:
        record: one item of ROUND_RECORD.
        num_places: drafts that a `CostAware` policy learns of; 0 for other policies.
    """
    count = int(record["num_tokens"][0])
    learned = None
    if num_places:
        own = record["policy_state"][0]
        unread = float(own["unread"])
        learned = CostState(
            tuple(own["reached"][:num_places].tolist()),
            tuple(own["accepted"][:num_places].tolist()),
            int(own["num_rounds"]),
            int(own["num_plain"]),
            bool(own["drafts_pay"]),
            int(own["last_width"]),
            None if np.isnan(unread) else unread,
        )
    return RoundRecord(
        RoundStatus(int(record["status"][0])),
        record["tokens"][0, :count].tolist(),
        int(record["drafted"][0]),
        int(record["proposed"][0]),
        int(record["position"][0]),
        learned,
    )


class RankRounds:
    """What one GPU holds and launches of rounds. Calls may come from any thread, one at a time.

    Attributes:
        ring: pinned records, by number of the round.
        graph: of the rounds of the chain that has begun last.

    Args:
        rank: whose plans run; it has the code of rounds and a drafter.
        vocab_size: tokens that can be sampled.
    """

    def __init__(self, rank: "CudaRank", vocab_size: int) -> None:
        self._rank, self._vocab_size = rank, vocab_size
        memory = rank.memory
        self._state = memory.base + memory.region(ROUND_REGION).offset
        self.ring = memory.host_bytes(RING_RECORDS * ROUND_RECORD.itemsize).view(ROUND_RECORD)
        self._staged = memory.host_bytes(ROUND_STATE.itemsize)
        self._ends = memory.host_bytes(4 * _STAGED_ENDS).view(np.int32)
        self._num_ends = 0
        self._plans = row_plans(rank.plans)
        # By whether drafts are judged by the ratio test: one is there from the beginning.
        self._graphs: dict[bool, Any] = {}
        # What graphs were made from, as conditional handles belong to it.
        self._builders: list[Any] = []
        self.prepare(has_test=False)
        self.graph = self._graphs[False]

    def is_prepared(self, *, has_test: bool) -> bool:
        """Whether the graph with or without the ratio test is there."""
        return has_test in self._graphs

    def prepare(self, *, has_test: bool) -> None:
        """Capture the graph with or without the ratio test, unless it is there."""
        if has_test not in self._graphs:
            self._graphs[has_test] = self._capture(has_test=has_test)

    def encode(self, given: RoundInput) -> NDArray[np.void]:
        """The state that a chain begins with; it is the same on all ranks."""
        return encode_state(given, self._vocab_size, [plan.num_tokens for plan in self._plans])

    def begin(self, block: NDArray[np.uint8], state: NDArray[np.void]) -> None:
        """Wait for all work, forget records, and set step inputs and state.

        Its graph must have been prepared.
        """
        self._rank.send_inputs(block)
        self.graph = self._graphs[bool(state["rule"][0] == RoundRule.PROBABILISTIC)]
        self.ring.view(np.uint8)[:] = 0
        self._staged[:] = state.view(np.uint8)
        self._rank.copy_to_device(self._state, self._staged)

    def extend(self, first: int, pages: Sequence[int], writable_end: int) -> None:
        """See `round_queue.RoundDevice`."""
        if pages:
            self._rank.extend_pages(first, pages)
        slot = self._num_ends % _STAGED_ENDS
        staged = self._ends[slot : slot + 1]
        self._num_ends += 1
        staged[0] = writable_end
        self._rank.copy_to_device(self._state + _WRITABLE_END, staged)

    def launch(self) -> None:
        """Queue a round."""
        self.graph.launch(self._rank.stream)

    def _capture(self, *, has_test: bool) -> Any:
        """A graph, see the module."""
        rank, memory = self._rank, self._rank.memory
        inputs, offsets = memory.inputs, memory.input_offsets
        tokens, position = inputs + offsets["tokens"], inputs + offsets["position"]
        num_tokens = inputs + offsets["num_tokens"]
        ring = self.ring.ctypes.data
        builder = rank.begin_graph()
        # Until a kernel says otherwise, nothing is drafted, and no case of the switch runs.
        draft = builder.create_condition(default_value=0)
        width = builder.create_condition(default_value=len(self._plans))
        handles = [ctypes.c_uint64(int(condition.handle)) for condition in (draft, width)]
        begin = (self._state, num_tokens, position, ring, memory.error, *handles)
        rank.add_control(builder, ROUND_CODE, "begin_round", begin, threads=_WARP, pdl=False)

        plan = rank.plans[DRAFT_STEP]
        outputs = {name: plan.tensors[index] for name, index in plan.outputs.items()}
        confidences = outputs.get("confidences")
        drafting = builder.if_then(draft).begin_building()
        rank.add_plan(drafting, plan)
        choose = (
            self._state,
            memory.address(plan.name, outputs["tokens"]),
            0 if confidences is None else memory.address(plan.name, confidences),
            ctypes.c_int(plan.num_rows),
            tokens,
            num_tokens,
            handles[1],
        )
        rank.add_control(drafting, ROUND_CODE, "choose_width", choose, threads=_WARP)
        drafting.end_building()

        bodies = builder.switch(width, len(self._plans))
        for body, plan in zip(bodies, self._plans, strict=True):
            body.begin_building()
            rank.add_plan(body, plan)
            if has_test and plan.name in rank.ratio_tests:
                test = rank.ratio_tests[plan.name]
                rank.add_plan(body, test, is_first=False)
            drawn = memory.address(plan.name, plan.tensors[plan.outputs["tokens"]])
            commit = (self._state, drawn, tokens, position, ring, memory.error)
            rank.add_control(body, ROUND_CODE, "commit_round", commit, threads=_WARP)
            body.end_building()
        self._builders.append(builder)
        graph = builder.end_building().complete()
        graph.upload(rank.stream)
        return graph


class CudaRounds:
    """Rounds of an executor's ranks; see `round_queue.RoundDevice`.

    Args:
        executor: a `CudaExecutor` whose ranks have rounds.
    """

    def __init__(self, executor: "CudaExecutor") -> None:
        self._executor = executor
        self._num_places = 0

    def begin_rounds(self, given: RoundInput) -> None:
        """See `RoundDevice`."""
        policy = given.settings.policy
        self._num_places = len(policy.state.reached) if isinstance(policy, CostAware) else 0
        self._executor.begin_rounds(given)

    def extend_rounds(self, first: int, pages: Sequence[int], writable_end: int) -> None:
        """See `RoundDevice`."""
        self._executor.on_rounds(lambda rounds: rounds.extend(first, pages, writable_end))

    def queue_round(self) -> None:
        """See `RoundDevice`."""
        self._executor.on_rounds(lambda rounds: rounds.launch())

    def await_record(self, number: int) -> RoundRecord:
        """Spin on pinned memory until a round has left its record."""
        rank = self._executor.ranks[0]
        assert rank.rounds is not None
        slot = number % RING_RECORDS
        item = rank.rounds.ring[slot : slot + 1]
        sequence = item["sequence"]
        spins, deadline = 0, time.monotonic() + ROUND_S
        while int(sequence[0]) != number + 1:
            spins += 1
            if spins % 100 == 0:  # other threads of the host have work too
                time.sleep(0)
            if spins % 100_000 == 0:  # a dead GPU must not hang the host
                self._require_alive(number, deadline)
        record = decode_record(item, self._num_places)
        if record.status is RoundStatus.ERROR:
            self._executor.require_sound()
        return record

    def _require_alive(self, number: int, deadline: float) -> None:
        rank = self._executor.ranks[0]
        assert rank.rounds is not None
        if rank.is_busy():
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"the GPU has worked on round {number} for {ROUND_S:g} s: it has stalled; look "
                    f"at nvidia-smi, end this process and open the engine again"
                )
            return
        self._executor.require_sound()
        if int(rank.rounds.ring["sequence"][number % RING_RECORDS]) != number + 1:
            raise DeviceError(f"the GPU is idle but has not run round {number}")
