"""What can be chosen when an engine is built. The command line and config.json derive from it."""

from dataclasses import dataclass, field, fields
from typing import Literal

from inkrt.errors import ConfigError
from inkrt.plugins.tactic import GPU_TARGETS

# A verify step has at most this many tokens: decode kernels are T-invariant up to there.
MAX_VERIFY_TOKENS = 8

TP_SIZES = (1, 2, 4, 8)
TARGETS = ("cpu", *GPU_TARGETS)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Choices of one build; everything else follows from the checkpoint.

    Attributes:
        target: what the engine runs on.
        tp_size: ranks that share the model.
        moe_split: how ranks share the experts; see `Sharding`.
        max_seq_len: positions of one session, prompt and output together; 0 takes the model's own.
        max_batch_size: sessions that can be open at once.
        dtype: compute dtype; "auto" takes the checkpoint's.
        max_verify_tokens: width of the widest verify step (drafted tokens and one); 1 for none.
        prefill_chunk: tokens of the prefill step; 0 takes what suits the target: 64 on the CPU, 512
            on a GPU, where a chunk reads nearly all experts however short it is, and no more than
            `max_seq_len`.
        keep_intermediates: every intermediate tensor has memory of its own, so that a parity report
            can read all of them after a step; otherwise they share memory by lifetime. Rings are as
            on a GPU, so that plans of all targets have the same launches.
        spec: the drafter that is built in: "auto" is the one that the checkpoint bundles, if any;
            "dspark" and "mtp" ask for one of that kind, "none" leaves it out.
        towers: "auto" builds in what the checkpoint has for images and recordings, "none" leaves it
            out. On a GPU this version has no kernels for towers.
        projections: form of attention projections that the checkpoint has in bf16 or float32:
            "checkpoint" keeps them, "mxfp8" and "nvfp4" quantize them (Inkling-2 only).
        experts: form of quantized experts: "checkpoint" keeps it, "bf16" decodes them exactly, to
            bfloat16 (float32 in an engine that computes in it) and, of NVFP4, its global scale
            beside.
        sums: what sends a rank's part of a sum to the others: with "mix" the launch that adds the
            parts, with "pushed" the product that makes it, where a GPU has a kernel for that.
        weights: "dummy" writes no weight files; the runtime fills memory with a fixed pattern.
    """

    target: str = field(
        default="cpu",
        metadata={
            "help": "what the engine runs on: cpu, sm_90a, or sm_100a (compiled, never run yet)"
        },
    )
    tp_size: int = field(default=1, metadata={"help": "ranks that share the model: 1, 2, 4 or 8"})
    moe_split: Literal["experts", "width"] = field(
        default="experts",
        metadata={"help": "ranks hold whole experts, or a slice of the width of each"},
    )
    max_seq_len: int = field(
        default=0, metadata={"help": "positions of a session, prompt and output; 0: the model's"}
    )
    max_batch_size: int = field(default=1, metadata={"help": "sessions open at once"})
    dtype: Literal["auto", "bfloat16", "float32"] = field(
        default="auto", metadata={"help": "compute dtype; auto: the checkpoint's"}
    )
    max_verify_tokens: int = field(
        default=MAX_VERIFY_TOKENS, metadata={"help": "widest verify step, 1 for none"}
    )
    prefill_chunk: int = field(
        default=0, metadata={"help": "tokens of a prefill step; 0: what suits the target"}
    )
    keep_intermediates: bool = field(
        default=False, metadata={"help": "own memory for every intermediate, for parity reports"}
    )
    spec: Literal["auto", "none", "dspark", "mtp"] = field(
        default="auto", metadata={"help": "drafter to build in; auto: the checkpoint's, if any"}
    )
    towers: Literal["auto", "none"] = field(
        default="auto",
        metadata={"help": "auto: what the checkpoint has for images and audio; none: text only"},
    )
    projections: Literal["checkpoint", "mxfp8", "nvfp4"] = field(
        default="checkpoint",
        metadata={"help": "quantize attention projections (Inkling-2); checkpoint: as they are"},
    )
    experts: Literal["checkpoint", "bf16"] = field(
        default="checkpoint",
        metadata={"help": "decode quantized experts, exactly; checkpoint: as they are"},
    )
    sums: Literal["mix", "pushed"] = field(
        default="mix",
        metadata={"help": "of several ranks on GPUs; pushed: products send their sums themselves"},
    )
    weights: Literal["real", "dummy"] = field(
        default="real", metadata={"help": "dummy: no weight files, a fixed pattern at run time"}
    )

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ConfigError(
                f"target {self.target!r} is not supported; this version builds for "
                f"{', '.join(TARGETS)}"
            )
        if self.tp_size not in TP_SIZES:
            raise ConfigError(
                f"tp size {self.tp_size} is not supported; choose one of "
                f"{', '.join(map(str, TP_SIZES))}"
            )
        if self.max_seq_len < 0:
            raise ConfigError(f"max seq len must be positive, got {self.max_seq_len}")
        if self.max_batch_size < 1:
            raise ConfigError(f"max batch size must be at least 1, got {self.max_batch_size}")
        if not 1 <= self.max_verify_tokens <= MAX_VERIFY_TOKENS:
            raise ConfigError(
                f"max verify tokens must be 1 to {MAX_VERIFY_TOKENS}, got {self.max_verify_tokens}"
            )
        if self.prefill_chunk and self.prefill_chunk <= MAX_VERIFY_TOKENS:
            raise ConfigError(
                f"prefill chunk must be above {MAX_VERIFY_TOKENS} (narrower steps are verify "
                f"steps), got {self.prefill_chunk}"
            )
        for name, allowed in (
            ("dtype", ("auto", "bfloat16", "float32")),
            ("spec", ("auto", "none", "dspark", "mtp")),
            ("towers", ("auto", "none")),
            ("projections", ("checkpoint", "mxfp8", "nvfp4")),
            ("experts", ("checkpoint", "bf16")),
            ("sums", ("mix", "pushed")),
            ("weights", ("real", "dummy")),
            ("moe_split", ("experts", "width")),
        ):
            if (got := getattr(self, name)) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {got!r}")
        if self.sums != "mix" and (self.target == "cpu" or self.tp_size == 1):
            raise ConfigError(
                f"sums {self.sums!r} is for several ranks on GPUs, got target {self.target} and tp "
                f"size {self.tp_size}; leave the option out"
            )
        if self.sums != "mix" and self.keep_intermediates:
            raise ConfigError(
                f"sums {self.sums!r} leaves no intermediate results to keep; leave one of the "
                "options out"
            )


def rebuild_command(options: BuildOptions, has_draft_checkpoint: bool = False) -> str:
    """The command line that builds with the same options."""
    flags = []
    for name in (each.name for each in fields(options)):
        flag, value = f"--{name.replace('_', '-')}", getattr(options, name)
        if isinstance(value, bool):
            flags += [flag] if value else []
        else:
            flags.append(f"{flag} {value}")
    if has_draft_checkpoint:
        flags.append("--draft-checkpoint DRAFTER")
    return " ".join(["ink-build CHECKPOINT -o ENGINE", *flags])
