"""Building: from a checkpoint folder to an engine folder.

`prepare` does all that needs no weights: it reads the configuration, traces and lowers every step
and sizes the memory. `build_engine` then packs the weights and publishes the folder. Progress goes
to a callback, one line per stage.
"""

import dataclasses
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import inkrt
from inkrt.builder.checkpoint import CheckpointSource, open_checkpoint, read_json
from inkrt.builder.choose_drafter import (
    AnyDrafter,
    choose_drafter,
    require_buildable,
)
from inkrt.builder.compile import PLUGIN_FOLDER, Compiler, compile_cubin
from inkrt.builder.dequantize import choose_forms
from inkrt.builder.dummy import dummy_weights
from inkrt.builder.fuse import fuse
from inkrt.builder.lower import Target, lower, start_compiling
from inkrt.builder.memory import memory_table, require_fits
from inkrt.builder.onnx_export import write_steps
from inkrt.builder.onnx_model import require_onnx
from inkrt.builder.options import MAX_VERIFY_TOKENS, BuildOptions, rebuild_command
from inkrt.builder.pack import PackedTensor, packed_tensors
from inkrt.builder.pack_weights import build_key, pack_weights
from inkrt.builder.passes import passes_for
from inkrt.builder.ratio_tests import apart_from_steps, ratio_tests
from inkrt.builder.steps import engine_steps, state_layout, step_modules
from inkrt.builder.tactics import TacticChooser
from inkrt.builder.timing_cache import SHIPPED, read_timing_cache
from inkrt.builder.towers import (
    choose_towers,
    plain_steps,
    tower_sources,
    tower_specs,
    tower_steps,
    traced_steps,
)
from inkrt.builder.weights import Meter
from inkrt.builder.writer import (
    Staging,
    check_target,
    file_entries,
    staged_folder,
    write_file,
)
from inkrt.engines.catalog import find_definition
from inkrt.engines.interface import (
    ROLLBACK_TOKENS,
    Definition,
    ModelConfig,
    Sharding,
    StateOptions,
)
from inkrt.engines.reader import ConfigReader
from inkrt.engines.tower import Tower
from inkrt.errors import ConfigError
from inkrt.plugins.registry import plugins
from inkrt.plugins.tactic import BLACKWELL
from inkrt.runtime.engine_file import (
    CONFIG_NAME,
    DRAFT_STEP,
    FORMAT,
    FORMAT_VERSION,
    TOKENIZER_FILES,
    EngineCode,
    EngineConfig,
    MemoryTable,
    ModelInfo,
    StateLayout,
    encode_code,
    encode_config,
    plan_file,
)
from inkrt.runtime.plan import Plan

Progress = Callable[[str], None]

# 64 positions of one head are 16 KiB in BF16: long enough for full-rate copies, short enough that a
# conversation wastes little of its last page.
PAGE_TOKENS = 64
CPU_PREFILL_CHUNK = 64
# Of Flint's 256 experts, 512 tokens leave none unread, so a wider step reads no more weights; its
# products begin to weigh as much as their bytes.
GPU_PREFILL_CHUNK = 512
# Plans, configuration and tokenizer beside the weights: room that is asked of the disk on top.
_FOLDER_OVERHEAD_BYTES = 64 * 2**20
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything about an engine but its weights."""

    definition: Definition
    model: ModelConfig
    model_type: str
    dtype: torch.dtype
    options: BuildOptions
    plans: dict[str, Plan]
    tensors: list[PackedTensor]
    state: StateLayout
    memory: MemoryTable
    code: EngineCode
    drafter: AnyDrafter | None = None
    towers: tuple[Tower, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Weights of all ranks."""
        return self.memory.weights * self.options.tp_size


def prepare(
    checkpoint: CheckpointSource,
    options: BuildOptions,
    progress: Progress = lambda _line: None,
    dump_folder: Path | None = None,
    timing_cache: Path | None = None,
    draft_checkpoint: Path | None = None,
    onnx_folder: Path | None = None,
) -> Prepared:
    """Read the configuration, trace, fuse and lower every step, and size the memory.

    Args:
        checkpoint: only its config and the headers of its shards are read; dummy weights need no
            shards.
        options: choices of the build, which replace "auto" and 0 by what they stand for.
        progress: called with a line per stage.
        dump_folder: where to write the graphs after every pass, if anywhere.
        timing_cache: file of times that tactics are chosen by; None takes that of the package.
        draft_checkpoint: folder of the drafter; None for the one that the checkpoint may bundle.
        onnx_folder: where to write what every step has become as ONNX, if anywhere, and steps of
            towers in standard operators too.

    Raises:
        InkError: the model, an option or their combination is not supported.
    """
    if onnx_folder is not None:
        require_onnx()
    definition = find_definition(checkpoint.config)
    model: ModelConfig = definition.parse_config(checkpoint.config)
    model = choose_forms(definition, model, options, progress)
    sharding = Sharding(options.tp_size, options.moe_split)
    model.check_sharding(sharding)
    options = _resolve(checkpoint, definition, model, options)
    towers = choose_towers(checkpoint, definition, model, options, progress)
    if options.weights == "real":
        _check_weights(checkpoint, definition, model, sharding, towers)
    drafter = choose_drafter(checkpoint, definition, model, options, draft_checkpoint, progress)
    if drafter is not None:
        require_buildable(drafter, definition, options.target, options.tp_size)
    options = dataclasses.replace(options, spec=drafter.method if drafter else "none")
    dtype, state = _DTYPES[options.dtype], state_options(options)
    plans: dict[str, Plan] = {}
    target = Target(options.target, shares_arena=not options.keep_intermediates)
    if options.target != "cpu":
        target.compiler = Compiler(options.target)
        times = read_timing_cache(timing_cache or SHIPPED)
        target.chooser = TacticChooser(options.target, times)
    elif timing_cache is not None:
        raise ConfigError("a timing cache is for GPU targets; leave it out for target cpu")
    passes = passes_for(
        options.target, keeps_intermediates=options.keep_intermediates, sums=options.sums
    )
    started = time.monotonic()
    modules = list(step_modules(definition, model, options, dtype, state, drafter))
    further = tower_steps(towers, options.tp_size, dtype)
    graphs = []
    try:
        for traced in traced_steps(modules, further, model, state, options, dtype):
            graph = fuse(traced, passes, dump_folder)
            start_compiling(graph, target)  # beside the tracing of other steps
            graphs.append(graph)
        for graph in graphs:
            plan = plans[graph.step.name] = lower(graph, target)
            progress(f"step {plan.name}: {len(plan.launches)} launches")
    finally:
        if target.compiler is not None:
            target.compiler.stop()
    if onnx_folder is not None:
        write_steps(onnx_folder, graphs, plain_steps(towers, options.tp_size, dtype))
        progress(f"onnx {onnx_folder}: {len(graphs)} steps")
    _, module = modules[0]  # all steps have its weights and state, the draft step some of them
    if target.chooser is not None:
        progress(target.chooser.summary())
    progress(f"traced and lowered {len(plans)} steps in {time.monotonic() - started:.1f} s")
    layout = state_layout(module, state)
    tensors = packed_tensors(module, target.packed, [each for each, _ in further])
    code = _engine_code(plans, target, tensors, options)
    return Prepared(
        definition,
        model,
        str(checkpoint.config["model_type"]),
        dtype,
        options,
        code.plans,
        tensors,
        layout,
        memory_table(tensors, layout, code, options.tp_size),
        code,
        drafter,
        towers,
    )


def build_engine(
    checkpoint_folder: Path,
    target: Path,
    options: BuildOptions,
    progress: Progress = lambda _line: None,
    dump_folder: Path | None = None,
    timing_cache: Path | None = None,
    draft_checkpoint: Path | None = None,
    workers: int = 0,
    meter: Meter | None = None,
    onnx_folder: Path | None = None,
) -> EngineConfig:
    """Build an engine folder; it appears under `target` complete or not at all.

    The same checkpoints, options and timing cache give the same bytes. A build that was stopped
    goes on where its last finished weight file ends; see `writer`.

    Args:
        checkpoint_folder: or a GGUF file.
        target: must not exist.
        options: see `prepare`, as for all that follow but `workers` and `meter`.
        progress: called with a line per stage.
        dump_folder: where to write graphs.
        timing_cache: file of times.
        draft_checkpoint: folder of the drafter.
        workers: threads that pack weights; 0 for one per processor.
        meter: called with the bytes of weights that are written, and all of them.
        onnx_folder: where to write graphs as ONNX.

    Raises:
        InkError: the checkpoint or an option is unfit, or writing failed.
    """
    check_target(target)
    checkpoint = open_checkpoint(checkpoint_folder)
    progress(f"checkpoint {checkpoint_folder}: {len(checkpoint.names)} tensors")
    if options.target == BLACKWELL:
        progress(
            f"target {BLACKWELL}: kernels compile, but none has run on such a GPU yet; attention "
            f"of up to {MAX_VERIFY_TOKENS} tokens takes the kernel without tensor cores"
        )
    prepared = prepare(
        checkpoint, options, progress, dump_folder, timing_cache, draft_checkpoint, onnx_folder
    )
    require_fits(prepared.memory.total, options.target, options.tp_size)
    is_dummy = options.weights == "dummy"
    needed = _FOLDER_OVERHEAD_BYTES + (0 if is_dummy else prepared.weight_bytes)
    code = encode_code(prepared.code)
    key = "" if is_dummy else build_key(prepared, checkpoint, code)
    with staged_folder(target, needed, key, progress) as staging:
        if not is_dummy:
            pack_weights(staging, checkpoint, prepared, progress, workers, meter)
        for rank in range(options.tp_size):
            write_file(staging.folder / plan_file(rank), code)
        for name in TOKENIZER_FILES:
            if (checkpoint.folder / name).is_file():
                shutil.copyfile(checkpoint.folder / name, staging.folder / name)
        config = _engine_config(prepared, checkpoint, staging)
        write_file(staging.folder / CONFIG_NAME, encode_config(config))
    progress(f"engine {target}: {sum(entry.size for entry in config.files.values()):,} bytes")
    return config


def _resolve(
    checkpoint: CheckpointSource, definition: Definition, model: ModelConfig, options: BuildOptions
) -> BuildOptions:
    """Replace "auto" and 0 by what the checkpoint gives."""
    limit = model.max_position_embeddings
    if options.max_seq_len > limit:
        raise ConfigError(
            f"max seq len {options.max_seq_len:,} exceeds the model's {limit:,} positions"
        )
    dtype = options.dtype
    if dtype == "auto":
        dtype = model.dtype or _stored_dtype(checkpoint, definition, model)  # type: ignore[assignment]
    max_seq_len = options.max_seq_len or limit
    most = max(max_seq_len, MAX_VERIFY_TOKENS + 1)  # rows of a wider step would never be used
    if options.prefill_chunk > most:
        raise ConfigError(
            f"prefill chunk {options.prefill_chunk:,} exceeds the {max_seq_len:,} positions of a "
            f"session; leave it out or give at most {most:,}"
        )
    default = CPU_PREFILL_CHUNK if options.target == "cpu" else GPU_PREFILL_CHUNK
    chunk = options.prefill_chunk or min(default, most)
    return dataclasses.replace(options, dtype=dtype, max_seq_len=max_seq_len, prefill_chunk=chunk)


def state_options(options: BuildOptions) -> StateOptions:
    """How much state an engine holds, and in which form."""
    state = StateOptions(options.max_batch_size, options.max_seq_len, PAGE_TOKENS)
    if options.target == "cpu" and not options.keep_intermediates:
        return state
    return dataclasses.replace(
        state,
        kv_ring_multiple=PAGE_TOKENS,
        kv_ring_ahead=max(ROLLBACK_TOKENS, options.prefill_chunk),
    )


def _stored_dtype(checkpoint: CheckpointSource, definition: Definition, model: ModelConfig) -> str:
    """The dtype of the embedding, for a config that names none."""
    checkpoint.require_shards()
    source = definition.weight_sources(model, checkpoint.names, 0, Sharding(1, "experts"))["embed"]
    return str(checkpoint.dtype_of(source.parts[0].name)).removeprefix("torch.")


def _check_weights(
    checkpoint: CheckpointSource,
    definition: Definition,
    model: ModelConfig,
    sharding: Sharding,
    towers: tuple[Tower, ...],
) -> None:
    """Compare the headers of all tensors with the configuration, before anything takes long."""
    checkpoint.require_shards()
    for rank in range(sharding.tp_size):
        sources = definition.weight_sources(model, checkpoint.names, rank, sharding)
        sources |= tower_sources(towers, checkpoint.names)
        for part in (part for source in sources.values() for part in source.all_parts):
            checkpoint.check(part)


def _engine_code(
    plans: dict[str, Plan], target: Target, tensors: list[PackedTensor], options: BuildOptions
) -> EngineCode:
    cubins: dict[str, bytes] = {}
    tests: dict[str, Plan] = {}
    if target.compiler:
        plans = apart_from_steps(plans)
        tests = ratio_tests(plans, target.compiler)
        cubins |= target.compiler.cubins
        # What closes a step that feeds itself belongs to the executor, not to an operator.
        cubins["advance"] = compile_cubin(PLUGIN_FOLDER / "advance.cu", (), target.name)
        if DRAFT_STEP in plans:
            cubins["round"] = compile_cubin(PLUGIN_FOLDER / "round" / "round.cu", (), target.name)
    if options.weights == "real":
        return EngineCode(plans, cubins, ratio_tests=tests)
    dummies = dummy_weights(tensors)
    return EngineCode(plans, cubins, dummies.kind_of, dummies.templates, tests)


def _engine_config(
    prepared: Prepared, checkpoint: CheckpointSource, staging: Staging
) -> EngineConfig:
    options, model, drafter = prepared.options, prepared.model, prepared.drafter
    build = dataclasses.asdict(options)
    used = {launch.op for plan in prepared.plans.values() for launch in plan.launches}
    return EngineConfig(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        inkrt_version=inkrt.__version__,
        model=ModelInfo(
            model_type=prepared.model_type,
            dtype=options.dtype,
            num_layers=model.num_hidden_layers,
            hidden_size=model.hidden_size,
            vocab_size=model.unpadded_vocab_size,
            num_embeddings=model.vocab_size,
            eos_token_ids=model.eos_token_ids or _generation_eos(checkpoint),
        ),
        target=options.target,
        tp_size=options.tp_size,
        max_seq_len=options.max_seq_len,
        steps=tuple(engine_steps(options)),
        state=prepared.state,
        memory=prepared.memory,
        build=build,
        rebuild_command=rebuild_command(options, drafter is not None and drafter.has_folder),
        plugins={name: plugins()[name].version for name in sorted(used)},
        checkpoint_fingerprint=(drafter.checkpoint if drafter else checkpoint).fingerprint,
        files=file_entries(staging),
        draft=drafter.spec if drafter else None,
        towers=tower_specs(prepared.towers, prepared.dtype),
    )


def _generation_eos(checkpoint: CheckpointSource) -> tuple[int, ...]:
    """End tokens of generation_config.json, for a model whose config.json names none."""
    path = checkpoint.folder / "generation_config.json"
    if not path.is_file():
        return ()
    return ConfigReader(read_json(path), path.name).token_ids("eos_token_id", None)
