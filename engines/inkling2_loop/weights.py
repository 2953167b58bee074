"""Where every parameter of one rank stands in a looped Inkling-2 checkpoint of either spelling."""

from inkrt.engines.inkling2.weights import TextMap
from inkrt.engines.inkling2.weights import is_ignored as is_ignored_inkling2
from inkrt.engines.inkling2_loop.config import Inkling2LoopConfig
from inkrt.engines.interface import Part, Sharding, WeightSource

# What comes into an input: its gates by the publisher's names and by those of transformers, in the
# order of their results.
_GATES = {
    "attn_input": (("attn", "q"), ("k", "k"), ("v", "v")),
    "mlp_input": (("mlp", "mlp"),),
}
# Module parameter -> (publisher, transformers).
_GATE_NAMES = {
    "down": ("down_weight", "down_proj.weight"),
    "forget": ("forget_weight", "forget_gate_proj.weight"),
    "gain": ("gain_weight", "message_gate_proj.weight"),
}
# Of both of the publisher's tensors rows 2i and 2i + 1 are the i-th core layer's.
_MESSAGE_QUERIES = "middle_cycle_cross_pass_queries"  # of queries, of experts
_MESSAGE_KV_QUERIES = "middle_cycle_cross_pass_kv_queries"  # of keys, of values


def is_ignored(name: str) -> bool:
    """Whether a tensor belongs to a part that text engines leave out, or of one pass all gates."""
    parts = (".controllers.", "_message_gate.", "message_input.", "middle_cycle_cross_pass_")
    return is_ignored_inkling2(name) or any(part in name for part in parts)


def weight_sources(
    config: Inkling2LoopConfig, names: frozenset[str], rank: int, sharding: Sharding
) -> dict[str, WeightSource]:
    """Map every parameter of `Inkling2Loop` on `rank` to its place in a checkpoint.

    Raises:
        CheckpointError: the names follow neither spelling, or experts are quantized in another way
            than the configuration says.
    """
    return _LoopMap(config, names, rank, sharding).sources()


class _LoopMap(TextMap):
    """Adds gates and the queries of messages; a layer's parameters are its first visit's."""

    config: Inkling2LoopConfig

    def sources(self) -> dict[str, WeightSource]:
        sources = super().sources()
        for index, visit in enumerate(self.config.visits):
            if visit.number == 1:
                for name, source in self.gates(visit.layer).items():
                    sources[f"layers.{index}.{name}"] = source
        return sources

    def place(self, layer: int) -> int:
        behind = layer >= self.config.core_end
        repeated = (self.config.num_passes - 1) * self.config.num_core_layers
        return layer + (repeated if behind else 0)

    def gates(self, layer: int) -> dict[str, WeightSource]:
        """What only the later passes over a layer have; whole on all ranks."""
        hidden, rank = self.config.hidden_size, self.config.gate_rank
        shapes = {"down": (rank, 2 * hidden), "forget": (hidden, rank), "gain": (hidden, rank)}
        sources = {}
        for module, gates in _GATES.items():
            for ours, shape in shapes.items():
                publisher, theirs = _GATE_NAMES[ours]
                names = (
                    (f"controllers.{gate[0]}.{publisher}", f"{gate[1]}_message_gate.{theirs}")
                    for gate in gates
                )
                parts = (
                    Part(self.spell.in_layer(layer, pair), shape, (slice(None),) * 2)
                    for pair in names
                )
                sources[f"{module}.{ours}"] = WeightSource(tuple(parts))
        at = layer - self.config.core_start
        sources["message_queries"] = self.message_queries(at)
        return sources

    def message_queries(self, at: int) -> WeightSource:
        """Of core layer `at` those of queries, keys, values and experts."""
        hidden, number = self.config.hidden_size, self.config.num_core_layers
        if not self.spell.is_publisher:
            place = (slice(at, at + 1), slice(None), slice(None))
            name = self.spell.root + "message_input.query"
            return WeightSource((Part(name, (number, 4, hidden), place),))
        stored = (
            (_MESSAGE_QUERIES, 2 * at),
            (_MESSAGE_KV_QUERIES, 2 * at),
            (_MESSAGE_KV_QUERIES, 2 * at + 1),
            (_MESSAGE_QUERIES, 2 * at + 1),
        )
        parts = (
            Part(
                self.spell.root + name,
                (2 * number, hidden),
                (slice(row, row + 1), slice(None)),
            )
            for name, row in stored
        )
        return WeightSource(tuple(parts))
