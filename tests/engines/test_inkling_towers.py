"""Inkling's towers: which stages follow from a configuration, both spellings, what is refused."""

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from inkrt.engines.catalog import find_definition
from inkrt.engines.inkling.vision import parse_vision, plan_scales
from inkrt.engines.tiny import inkling
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.engines.tower import Tower
from inkrt.errors import ConfigError
from inkrt.plugins.plain import to_plain

TINY = inkling.config("float32")
Edit = Callable[[dict[str, Any]], object]


def towers(config: dict[str, Any]) -> tuple[Tower, ...]:
    definition = find_definition(config)
    return definition.towers(config, definition.parse_config(config))


@pytest.mark.parametrize("hidden_size", [6144, 4096])
def test_published_stages(hidden_size: int) -> None:
    """Inkling's, and those of Inkling-Small, which differ in the last width."""
    own = {"n_layers": 4, "decoder_dmodel": hidden_size, "use_vision_norm": True}
    config = parse_vision(own, hidden_size)
    assert config.widths == ((75, 128), (512, 320), (5120, 4800), (9600, hidden_size))
    assert config.folds == ((1, 5, 5), (1, 2, 2), (1, 4, 4), (2, 1, 1))


@pytest.mark.parametrize(
    "sizes", [(2, 2, 3, 3), (2, 4, 4, 3), (2, 6, 5, 3), (4, 20, 9, 3), (3, 14, 24, 3), (1, 9, 3, 1)]
)
def test_stages_are_those_of_transformers(sizes: tuple[int, int, int, int]) -> None:
    pytest.importorskip("transformers")
    from transformers.models.inkling.modeling_inkling import plan_out_scales

    assert plan_scales(*sizes) == tuple(map(tuple, plan_out_scales(*sizes).tolist()))


@pytest.mark.parametrize("sizes", [(2, 40, 4, 3), (2, 40, 3, 3), (2, 28, 3, 1), (4, 36, 5, 3)])
def test_fewer_stages_than_cells(sizes: tuple[int, int, int, int]) -> None:
    """transformers needs scipy for these."""
    pytest.importorskip("transformers")
    pytest.importorskip("scipy")
    from transformers.models.inkling.modeling_inkling import plan_out_scales

    assert plan_scales(*sizes) == tuple(map(tuple, plan_out_scales(*sizes).tolist()))


def test_fewer_stages_are_of_least_distance() -> None:
    """Against all ascending choices, for the sizes that need an assignment."""
    for num_frames, patch_size, num_layers in ((2, 40, 4), (2, 40, 3), (4, 36, 5), (2, 28, 2)):
        all_cells = plan_scales(num_frames, patch_size, 24, 3)
        cells = sorted(set(all_cells))
        sizes = [math.log(math.prod(cell[:3])) for cell in cells]
        step = math.log(patch_size**2 * num_frames * 3) / num_layers
        choices = itertools.combinations(range(len(cells)), num_layers + 1)
        best = min(
            choices,
            key=lambda places: sum(abs(step * i - sizes[p]) for i, p in enumerate(places)),
        )
        expected = [0, *best[1:-1], len(cells) - 1]
        found = plan_scales(num_frames, patch_size, num_layers, 3)
        assert found == tuple(cells[place] for place in expected)


def test_both_spellings_of_the_configuration() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.InklingConfig.from_dict(copy.deepcopy(TINY)).to_dict()
    vision, audio = towers(TINY)
    for ours, other in zip((vision, audio), towers(theirs), strict=True):
        assert (ours.kind, ours.placeholder) == (other.kind, other.placeholder)
        assert (ours.sizes, ours.processor) == (other.sizes, other.processor)
        inputs = [tower.inputs(5, torch.float32) for tower in (ours, other)]
        assert inputs[0] == inputs[1]
    ids = theirs["image_token_id"], theirs["audio_token_id"]
    assert (vision.placeholder.token_id, audio.placeholder.token_id) == ids
    assert vision.processor["folds"] == [2, 1, 1]
    assert audio.inputs(5, torch.float32) == {"levels": ((5, 6), torch.int32)}


def test_a_text_model_has_none_and_absent_values_are_as_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    text = TINY["text_config"] | {"model_type": "inkling_text"}
    assert towers(text) == ()
    theirs = transformers.InklingConfig()
    bare = {
        **TINY,
        "audio_config": {},
        "text_config": {**TINY["text_config"], "vocab_size": 201024},
    }
    for key in ("image_token_id", "audio_token_id", "image_bos_token_id", "audio_bos_token_id"):
        del bare[key]
    del bare["vision_config"]
    (audio,) = towers(bare)
    assert audio.placeholder.token_id == theirs.audio_token_id
    assert audio.placeholder.marker_id == theirs.audio_bos_token_id
    levels = theirs.audio_config.mel_vocab_size
    assert audio.processor["num_bands"] == theirs.audio_config.n_mel_bins
    assert audio.processor["num_levels"] == levels
    rows = audio.weight_sources(frozenset())["table"].parts[0].shape
    assert rows == (theirs.audio_config.n_mel_bins * levels, inkling.TINY.hidden)


def test_layouts_give_equal_weights_and_nothing_is_left(tmp_path: Path) -> None:
    values: list[dict[str, Tensor]] = []
    for layout in ("publisher", "transformers"):
        folder = tmp_path / layout
        write_checkpoint(folder, model="inkling", layout=layout)  # type: ignore[arg-type]
        tensors = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
        found, used = {}, set()
        for tower in towers(TINY):
            own = {name for name in tensors if tower.is_weight(name)}
            sources = tower.weight_sources(frozenset(tensors))
            module = tower.build_module(torch.bfloat16)
            shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
            assert shapes == {name: x.parts[0].shape for name, x in sources.items()}
            for name, source in sources.items():
                (part,) = source.parts
                found[f"{tower.kind}.{name}"] = tensors[part.name][part.index]
                used.add(part.name)
            assert own == used & own
        values.append(found)
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_checkpoint(folder, model="inkling", seed=2)
    return transformers.InklingForConditionalGeneration.from_pretrained(
        folder, dtype=torch.bfloat16
    ).eval(), folder


def loaded(kind: str, folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """A tower's module with the weights of a checkpoint."""
    (tower,) = (tower for tower in towers(TINY) if tower.kind == kind)
    tensors = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
    values = {
        name: tensors[source.parts[0].name].to(dtype)
        for name, source in tower.weight_sources(frozenset(tensors)).items()
    }
    module = tower.build_module(dtype)
    module.load_state_dict(values, assign=True)
    return module


def inputs(kind: str, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    if kind == "audio":
        shape = (num_rows, inkling.MEL_BINS)
        return torch.randint(inkling.MEL_VOCAB, shape, generator=generator, dtype=torch.int32)
    shape_ = (num_rows, inkling.NUM_FRAMES, inkling.TILE_SIZE, inkling.TILE_SIZE, 3)
    return torch.randn(shape_, generator=generator).bfloat16()


@pytest.mark.parametrize("kind", ["vision", "audio"])
def test_rows_in_bfloat16_are_near_those_of_transformers(reference: Any, kind: str) -> None:
    """Theirs round before a norm's weight, ours behind it."""
    model, folder = reference
    values = inputs(kind, 21)
    with torch.inference_mode():
        if kind == "vision":
            theirs = model.model.vision_tower(pixel_values=values).pooler_output[:, 0]
            ours = loaded(kind, folder, torch.bfloat16)(values.flatten(1))  # one fold: no order
        else:
            theirs = model.model.audio_tower(values[None].long()).last_hidden_state[0]
            ours = loaded(kind, folder, torch.bfloat16)(values)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    assert error < 1e-2


@pytest.mark.parametrize("kind", ["vision", "audio"])
def test_towers_are_standard_operators(reference: Any, kind: str) -> None:
    """The traced module, in ATen operators alone, gives the same rows."""
    module = loaded(kind, reference[1], torch.float32)
    values = inputs(kind, 21)
    values = values.float().flatten(1) if kind == "vision" else values
    plain = to_plain(torch.export.export(module, (values,), strict=False))
    called = [node.target for node in plain.graph.nodes if node.op == "call_function"]
    assert called
    assert all(target.namespace == "aten" for target in called)  # type: ignore[union-attr]
    ours, theirs = module(values), plain.module()(values)
    assert (ours - theirs).norm() < 1e-6 * ours.norm()


def edit(section: str, **values: Any) -> Edit:
    return lambda config: config[section].update(values)


REFUSED: dict[str, tuple[Edit, str]] = {
    "vision is a list": (
        lambda c: c.update(vision_config=[]),
        "config.json: vision_config must be an object, got []",
    ),
    "other width": (
        edit("vision_config", decoder_dmodel=64),
        "config.json: vision_config.text_hidden_size = 64 is not supported for inkling, only 60",
    ),
    "grey": (
        edit("vision_config", num_channels=1),
        "config.json: vision_config.num_channels = 1 is not supported for inkling, only 3",
    ),
    "no norm": (
        edit("audio_config", use_audio_norm=False),
        "config.json: audio_config.use_audio_norm = False is not supported for inkling, only True",
    ),
    "mode": (
        edit("audio_config", audio_mode="codec"),
        "config.json: audio_config.audio_mode = 'codec' is not supported for inkling, only 'dmel'",
    ),
    "one level": (
        edit("audio_config", mel_vocab_size=1),
        "config.json: audio_config.mel_vocab_size must be an integer from 2 to 2147483647, got 1",
    ),
    "range": (
        edit("audio_config", dmel_min_value=3),
        "config.json: audio_config.dmel_min_value 3.0 must be below dmel_max_value 2.0",
    ),
    "no number": (
        edit("audio_config", dmel_max_value="2"),
        "config.json: audio_config.dmel_max_value must be a number from -1000 to 1000, got '2'",
    ),
    "placeholder": (
        lambda c: c.update(audio_token_id=512),
        "config.json: audio_token_id 512 is none of 512 tokens; give the id of the placeholder",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    change, message = REFUSED[name]
    config = copy.deepcopy(TINY)
    change(config)
    with pytest.raises(ConfigError) as caught:
        towers(config)
    assert str(caught.value) == message
