"""The tiny Inkling is complete, the same model in both layouts, and lively."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from inkrt.builder.towers import tower_sources
from inkrt.engines.catalog import find_definition
from inkrt.engines.inkling.config import InklingConfig, parse_config
from inkrt.engines.inkling.weights import mtp_sources, weight_sources
from inkrt.engines.interface import Sharding
from inkrt.engines.tiny import inkling, tokenizer
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.errors import CheckpointError

transformers = pytest.importorskip("transformers")

NUM_TOKENS = 120  # several windows
Make = Callable[..., Path]
Load = Callable[..., nn.Module]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(layout: str, dtype: str = "bfloat16") -> Path:
        path = tmp_path_factory.mktemp("tiny") / "checkpoint"
        write_checkpoint(path, model="inkling", layout=layout, dtype=dtype)  # type: ignore[arg-type]
        return path

    return make


@pytest.fixture(scope="module")
def load(folder: Make) -> Load:
    @cache
    def make(layout: str, compute: str) -> nn.Module:
        model, info = transformers.InklingForConditionalGeneration.from_pretrained(
            folder(layout),
            dtype=getattr(torch, compute),
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        assert not any(info.values()), info
        return model.eval()

    return make


def logits_of(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(tokenizer.VOCAB_SIZE, (1, NUM_TOKENS), generator=generator)
    with torch.inference_mode():
        return model(input_ids=prompt).logits[0].float()


def test_both_layouts_are_the_same_model(load: Load) -> None:
    logits = logits_of(load("publisher", "float32"))
    assert logits.shape == (NUM_TOKENS, tokenizer.VOCAB_SIZE)
    assert torch.equal(logits, logits_of(load("transformers", "float32")))


def test_logits_are_lively_and_calm_in_bfloat16(load: Load) -> None:
    logits = logits_of(load("publisher", "float32"))
    assert 2 < logits.std() < 4
    assert logits.argmax(-1).unique().numel() > NUM_TOKENS // 4
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert 1 < entropy.mean() < 5
    rounded = logits_of(load("publisher", "bfloat16"))
    assert (logits - rounded).norm() < 0.04 * logits.norm()


def test_every_part_is_heard(load: Load) -> None:
    """Without any one of them the logits are others."""
    model = load("publisher", "float32")
    logits = logits_of(model)
    text = model.model.language_model
    sparse, dense = text.layers[4], text.layers[1]
    parts = {
        "relative bias": sparse.self_attn.rel_logits_proj.proj,
        "key convolution": sparse.self_attn.k_sconv.conv1d.weight,
        "value convolution": sparse.self_attn.v_sconv.conv1d.weight,
        "attention convolution": sparse.attn_sconv.conv1d.weight,
        "MLP convolution": sparse.mlp_sconv.conv1d.weight,
        "shared experts": sparse.mlp.shared_experts.down_proj,
        "scale of experts": sparse.mlp.gate.global_scale,
        "selection bias": sparse.mlp.gate.e_score_correction_bias,
        "scale of the dense MLP": dense.mlp.global_scale,
    }
    for name, part in parts.items():
        kept = part.detach().clone()
        with torch.no_grad():
            part.zero_()
            changed = logits_of(model)
            part.copy_(kept)
        assert (changed - logits).norm() > 5e-3 * logits.norm(), name
    with torch.no_grad():
        floor, text.config.log_scaling_n_floor = text.config.log_scaling_n_floor, None
        assert not torch.equal(logits_of(model), logits)
        text.config.log_scaling_n_floor = floor


def config() -> InklingConfig:
    return parse_config(inkling.config("bfloat16"))


def read(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
    return tensors


@pytest.mark.parametrize("split", ["experts", "width"])
def test_layouts_give_equal_weights(folder: Make, split: str) -> None:
    """Parameters of every rank from both; together they use every tensor but the towers'."""
    found = []
    for layout in ("publisher", "transformers"):
        tensors = read(folder(layout))
        used, values = set(), {}
        for rank in (0, 1):
            sources = weight_sources(config(), frozenset(tensors), rank, Sharding(2, split))  # type: ignore[arg-type]
            for name, source in sources.items():
                pieces = [tensors[part.name][part.index] for part in source.parts]
                assert all(tensors[p.name].shape == p.shape for p in source.parts), name
                values[rank, name] = torch.cat(pieces, source.dim)
                used |= {part.name for part in source.parts}
        definition = find_definition(inkling.config("bfloat16"))
        left = tensors.keys() - used
        assert {name.split(".")[1] for name in left} == (
            {"audio", "visual", "mtp"} if layout == "publisher" else {"audio_tower", "vision_tower"}
        )
        assert all(map(definition.ignored, left))
        found.append(values)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("is_original", [True, False])
def test_what_transformers_saves_is_the_same_model(
    folder: Make, load: Load, tmp_path: Path, is_original: bool
) -> None:
    """Its own config.json, with names of either spelling, towers included; no MTP heads."""
    load("publisher", "float32").save_pretrained(tmp_path, save_original_format=is_original)
    values = []
    for path in (folder("publisher"), tmp_path):
        content = json.loads((path / "config.json").read_text())
        definition = find_definition(content)
        model, tensors = definition.parse_config(content), read(path)
        names = frozenset(tensors)
        sources = definition.weight_sources(model, names, 0, Sharding(1, "experts"))
        sources |= tower_sources(definition.towers(content, model), names)
        values.append(
            {
                name: torch.cat(
                    [tensors[x.name][x.index].float() for x in source.parts], source.dim
                )
                for name, source in sources.items()
            }
        )
        left = tensors.keys() - {part.name for source in sources.values() for part in source.parts}
        assert all(name.startswith("model.mtp.") for name in left)
    assert any(name.startswith("model.llm.") for name in read(tmp_path)) == is_original
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())


def test_heads_use_all_of_their_tensors(folder: Make) -> None:
    model, tensors = config(), read(folder("publisher"))
    assert model.mtp is not None
    sources = mtp_sources(model, model.mtp)
    names = {part.name for source in sources.values() for part in source.parts}
    assert names == {name for name in tensors if name.startswith("model.mtp.")}
    gate = sources["drafter.depths.1.layer.mlp.gate_up"].parts
    stored = tensors["model.mtp.layers.1.transformer_block.mlp.w13_dn.weight"]
    assert torch.equal(stored[gate[0].index], stored[0::2])
    assert torch.equal(stored[gate[1].index], stored[1::2])
    first = mtp_sources(model, model.mtp.first(2))
    assert first.keys() == {name for name in sources if ".depths.2." not in name}


def test_a_checkpoint_of_heads_alone_is_refused() -> None:
    names = frozenset({"model.mtp.layers.0.input_proj.weight"})
    with pytest.raises(CheckpointError, match="the checkpoint has no Inkling text model"):
        weight_sources(config(), names, 0, Sharding(1, "experts"))
