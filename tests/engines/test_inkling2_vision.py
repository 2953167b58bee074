"""Inkling-2's vision tower: the traced module against `Inkling2VisionModel` of transformers."""

import copy
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from inkrt.builder.checkpoint import Checkpoint
from inkrt.builder.pack import packed_tensors, read_weight
from inkrt.builder.rewrite import VIEW_OPS
from inkrt.engines.catalog import find_definition
from inkrt.engines.inkling2.config import parse_config
from inkrt.engines.inkling2.vision import VisionTower, tower_input_shapes
from inkrt.engines.inkling2.vision_config import VisionConfig, parse_vision_config
from inkrt.engines.inkling2.vision_weights import vision_sources
from inkrt.engines.tiny import inkling2
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.errors import BuildError, CheckpointError, ConfigError
from inkrt.plugins.plain import to_plain
from inkrt.runtime.images.grid import image_grid
from inkrt.runtime.images.patches import tiles
from inkrt.runtime.images.settings import INKLING2
from inkrt.runtime.images.tower_inputs import tower_inputs

transformers = pytest.importorskip("transformers")

CONFIG = inkling2.config("float32")
TILE = inkling2.VISION_PATCH * inkling2.VISION_MERGE
SETTINGS = replace(INKLING2, tile=TILE)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Width and height in pixels: one pixel, ends within tiles, coarser and finer than the grid of
# position embeddings, and exactly one tile.
SIZES = ((1, 1), (13, 29), (TILE, TILE), (71, 5), (90, 97))
MAX_TOKENS = 13 * 12  # of the largest of these is 12 columns, 13 rows
# Of float32: the tower has a handful of products of up to 96 terms.
BOUNDS = {"float32": 2e-6, "bfloat16": 1e-2}


def vision_config(config: dict[str, Any] = CONFIG) -> VisionConfig:
    found = parse_vision_config(config, parse_config(config))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(layout: str) -> Path:
        path = tmp_path_factory.mktemp("vision") / "checkpoint"
        write_checkpoint(path, layout=layout, dtype="float32")  # type: ignore[arg-type]
        return path

    return make


def load_tower(folder: Path, dtype: torch.dtype) -> VisionTower:
    checkpoint = Checkpoint(folder)
    tower = VisionTower(vision_config(), dtype)
    sources = vision_sources(tower.config, checkpoint.names)
    assert sources.keys() == dict(tower.named_parameters()).keys()
    weights = {
        tensor.name: read_weight(tensor, checkpoint, sources[tensor.name])
        for tensor in packed_tensors(tower)
    }
    tower.load_state_dict(weights, assign=True)
    return tower


@pytest.fixture(scope="module")
def tower(folder: Callable[[str], Path]) -> Callable[[str], VisionTower]:
    return cache(lambda dtype: load_tower(folder("publisher"), DTYPES[dtype]))


@pytest.fixture(scope="module")
def reference(folder: Callable[[str], Path]) -> Callable[[str], nn.Module]:
    @cache
    def make(dtype: str) -> nn.Module:
        model = transformers.Inkling2ForConditionalGeneration.from_pretrained(
            folder("transformers"), dtype=DTYPES[dtype], attn_implementation="eager"
        )
        return model.model.vision_tower.eval()

    return make


def image(size: tuple[int, int]) -> tuple[np.ndarray, tuple[Tensor, ...], tuple[int, int]]:
    """`pixel_values` of a random image, the tower's inputs, rows and columns of tiles."""
    width, height = size
    pixels = np.random.default_rng(width + 1000 * height).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    grid = image_grid(width, height, SETTINGS)
    values = tiles(pixels, grid, SETTINGS)
    inputs = tower_inputs(values, grid, inkling2.VISION_MERGE)
    # Not dataclasses.astuple, which copies with deepcopy.
    arrays = (inputs.patches, inputs.positions, inputs.grid, inputs.num_rows)
    return values, tuple(map(torch.from_numpy, arrays)), (grid.rows, grid.columns)


def padded(inputs: tuple[Tensor, ...], tower: VisionTower, num_tokens: int) -> tuple[Tensor, ...]:
    """Inputs of a step for more tiles, as the executor fills them: zeros behind the image."""
    dtype = tower.class_token.dtype
    filled = []
    shapes = tower_input_shapes(tower.config, num_tokens, dtype)
    for value, (shape, kind) in zip(inputs, shapes.values(), strict=True):
        target = torch.zeros(shape, dtype=kind)
        target[: len(value)] = value.to(kind)
        filled.append(target)
    return tuple(filled)


def relative_error(x: Tensor, reference: Tensor) -> float:
    x, reference = x.double(), reference.double()
    return ((x - reference).norm() / reference.norm()).item()


def theirs(module: nn.Module, size: tuple[int, int]) -> Tensor:
    values, _, (rows, columns) = image(size)
    with torch.no_grad():
        return module(torch.from_numpy(values), torch.tensor([[1, rows, columns]])).pooler_output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_features_are_those_of_transformers(
    size: tuple[int, int],
    dtype: str,
    tower: Callable[[str], VisionTower],
    reference: Callable[[str], nn.Module],
) -> None:
    _, inputs, (rows, columns) = image(size)
    ours = tower(dtype)
    expected = theirs(reference(dtype), size)
    exact = padded(inputs, ours, rows * columns)
    (features,) = ours(*exact)
    assert features.dtype is DTYPES[dtype]
    assert features.shape == expected.shape == (rows * columns, inkling2.TINY.hidden)
    assert relative_error(features, expected) < BOUNDS[dtype]

    # In a step for more tiles, what stands behind the image changes nothing.
    (features,) = ours(*padded(inputs, ours, MAX_TOKENS))
    assert torch.isfinite(features).all()
    assert relative_error(features[: rows * columns], expected) < BOUNDS[dtype]


def test_every_part_of_the_tower_is_heard(tower: Callable[[str], VisionTower]) -> None:
    """Else an error in it would not show in the features of a tiny tower."""
    whole = tower("float32")
    _, inputs, _ = image((90, 97))
    (features,) = whole(*inputs)
    for name, parameter in whole.named_parameters():
        changed = copy.deepcopy(whole)
        changed.load_state_dict({name: parameter.roll(1, 0)}, strict=False)
        assert relative_error(changed(*inputs)[0], features) > 100 * BOUNDS["float32"], name


def test_trace_has_views_and_operators_only(tower: Callable[[str], VisionTower]) -> None:
    module = VisionTower(vision_config(), torch.bfloat16)
    shapes = tower_input_shapes(module.config, 5, torch.bfloat16)
    inputs = tuple(torch.empty(s, dtype=kind, device="meta") for s, kind in shapes.values())
    graph = torch.export.export(module, inputs, strict=False).graph
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    assert {target for target in targets - VIEW_OPS if target.namespace != "ink"} == set()
    names = {target._schema.name for target in targets - VIEW_OPS}
    assert "ink::bidirectional_attention" in names

    # The graph computes what the module does.
    ours = tower("float32")
    _, inputs, _ = image((13, 29))
    traced = torch.export.export(ours, inputs, strict=False).module()
    assert torch.equal(traced(*inputs)[0], ours(*inputs)[0])


def one_layer(tower: VisionTower) -> VisionTower:
    """The same with its first layer only: it is layers that take time to export."""
    small = VisionTower(replace(tower.config, num_hidden_layers=1), tower.class_token.dtype)
    own = dict(small.named_parameters())
    weights = {name: value for name, value in tower.named_parameters() if name in own}
    small.load_state_dict(weights, assign=True)
    return small


def exported_plain(tower: VisionTower) -> torch.export.ExportedProgram:
    """The tower in standard operators, for any number of tiles."""
    # torch.export makes a program of its own for a size of 1.
    count = torch.export.Dim("tiles", min=2, max=1024)
    per_tile = tower.config.patches_per_token
    sizes = {
        "patches": {0: per_tile * count},
        "positions": {0: per_tile * count + 1},
        "grid": None,
        "num_rows": None,
    }
    inputs = padded(image((13, 29))[1], tower, 8)
    return to_plain(torch.export.export(tower, inputs, dynamic_shapes=sizes, strict=False))


def test_plain_form_has_standard_operators_and_any_size(
    tower: Callable[[str], VisionTower],
) -> None:
    ours = one_layer(tower("float32"))
    plain = exported_plain(ours)
    targets = [node.target for node in plain.graph.nodes if node.op == "call_function"]
    assert not [t for t in targets if getattr(t, "namespace", "") == "ink"]
    module = plain.module()
    for size in SIZES:
        _, inputs, (rows, columns) = image(size)
        (expected,) = ours(*padded(inputs, ours, rows * columns))
        # Exactly as many tiles as there are, and more.
        for num_tokens in (max(rows * columns, 2), MAX_TOKENS):
            (features,) = module(*padded(inputs, ours, num_tokens))
            error = relative_error(features[: rows * columns], expected)
            assert error < BOUNDS["float32"], (size, num_tokens)


@pytest.mark.slow
def test_plain_form_runs_in_onnxruntime(
    tower: Callable[[str], VisionTower], tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    ours = one_layer(tower("float32"))
    path = str(tmp_path / "tower.onnx")
    torch.onnx.export(exported_plain(ours), (), dynamo=True).save(path)  # type: ignore[union-attr]
    model = onnx.load(path)
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} == {""}
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    for size in SIZES:
        _, inputs, (rows, columns) = image(size)
        given = padded(inputs, ours, max(rows * columns, 2))
        (features,) = session.run(
            None, {name: value.numpy() for name, value in zip(names, given, strict=True)}
        )
        (expected,) = ours(*padded(inputs, ours, rows * columns))
        found = torch.from_numpy(features)[: rows * columns]
        assert relative_error(found, expected) < BOUNDS["float32"], size


def test_programs_that_write_state_have_no_plain_form() -> None:
    class Writer(nn.Module):
        def forward(self, x: Tensor, weight: Tensor, state: Tensor, one: Tensor) -> Tensor:
            y: Tensor = torch.ops.ink.short_conv(x, weight, state, one, one, one, True)
            return y

    one = torch.ones(1, dtype=torch.int32)
    inputs = (torch.ones(1, 4), torch.ones(4, 3), torch.ones(1, 16, 4), one)
    program = torch.export.export(Writer(), inputs, strict=False)
    with pytest.raises(BuildError, match=r"ink::short_conv, node \w+: it writes state"):
        to_plain(program)


def test_both_spellings_have_the_same_weights(folder: Callable[[str], Path]) -> None:
    published, renamed = (
        dict(load_tower(folder(layout), torch.float32).named_parameters())
        for layout in ("publisher", "transformers")
    )
    assert all(torch.equal(value, renamed[name]) for name, value in published.items())


def test_a_checkpoint_without_a_tower_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no vision tower: no model\.visual\.\* or"):
        vision_sources(vision_config(), frozenset({"model.llm.embed.weight"}))


@pytest.mark.parametrize("family", ["inkling2", "inkling2_loop"])
def test_absent_keys_are_as_in_transformers(family: str) -> None:
    values = {"model_type": family}
    text = find_definition(values).parse_config(values)
    ours = parse_vision_config(values, text)
    theirs = transformers.AutoConfig.for_model(family).vision_config
    assert ours is not None
    values = astuple(replace(ours, rope_theta=0.0))
    names = [name for name in ours.__slots__ if name != "rope_theta"]
    assert values == (*(getattr(theirs, name) for name in names), 0.0)
    assert (ours.rope_theta, theirs.rope_parameters["rope_theta"]) == (10000.0, 10000.0)
    assert parse_vision_config({"model_type": f"{family}_text"}, text) is None


def test_both_spellings_of_the_configuration_come_to_the_same() -> None:
    """transformers reads the publisher's and writes its own."""
    theirs = transformers.Inkling2Config.from_dict(copy.deepcopy(CONFIG)).to_dict()
    assert vision_config(theirs) == vision_config()
    aliases = copy.deepcopy(CONFIG)
    aliases["vision_config"]["native_patch_size"] = aliases["vision_config"].pop("patch_size")
    aliases["vision_config"]["adapter_merge_size"] = aliases["vision_config"].pop(
        "spatial_merge_size"
    )
    assert vision_config(aliases) == vision_config()


@settings(max_examples=60, deadline=None)
@given(
    key=st.sampled_from([*CONFIG["vision_config"], "native_patch_size", "projector_bias"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(["rope_type", "rope_theta"]), inner)
        ),
        max_leaves=3,
    ),
)
def test_any_value_is_taken_or_refused(key: str, value: Any) -> None:
    try:
        found = vision_config(CONFIG | {"vision_config": CONFIG["vision_config"] | {key: value}})
    except ConfigError:
        return
    assert found.head_dim % 4 == 0
    assert found.patch_values == 3 * found.patch_size**2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu_tanh"}, "vision_config.hidden_act = 'gelu_tanh' is not supported"),
        ({"projector_bias": True}, "vision_config.projector_bias = True is not supported"),
        ({"patch_size": 0}, "vision_config.patch_size must be an integer from 1"),
        ({"num_channels": 1}, "vision_config.num_channels = 1 is not supported"),
        ({"num_attention_heads": 5}, "vision_config.hidden_size = 24 does not make 5 heads"),
        ({"text_hidden_size": 61}, "text_hidden_size = 61 differs from text_config.hidden_size"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters.rope_type = 'mrope'"),
        ({"intermediate_size": None, "mlp_ratio": float("inf")}, "mlp_ratio = inf does not make"),
        ({"intermediate_size": None, "mlp_ratio": 1e-3}, "mlp_ratio = 0.001 does not make"),
        ({"rope_parameters": 3}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a positive number"),
    ],
)
def test_unsupported_towers_are_refused(changes: dict[str, Any], message: str) -> None:
    config = copy.deepcopy(CONFIG)
    config["vision_config"] |= changes
    with pytest.raises(ConfigError, match=message):
        vision_config(config)


def test_the_width_of_mlps_may_be_a_ratio() -> None:
    config = copy.deepcopy(CONFIG)
    config["vision_config"] |= {"intermediate_size": None, "mlp_ratio": 2.5}
    assert vision_config(config).intermediate_size == 60


def test_a_vision_config_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="vision_config must be an object, got 3"):
        vision_config(CONFIG | {"vision_config": 3})
