"""The tiny Flint is complete, the same model in all layouts and formats, and lively."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from inkrt.engines.tiny import flint, tokenizer
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.engines.tiny.nvfp4 import QuantizedMatrix, quantize, stack
from inkrt.errors import ConfigError

transformers = pytest.importorskip("transformers")

NUM_TOKENS = 120  # several windows
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, Path] = {}

    def make(**arguments: str) -> Path:
        key = str(sorted(arguments.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny") / "checkpoint"
            write_checkpoint(made[key], model="flint", **arguments)
        return made[key]

    return make


@pytest.fixture(scope="module")
def load(folder: Make) -> Callable[..., nn.Module]:
    loaded: dict[tuple[str, str], nn.Module] = {}

    def make(layout: str, compute: str) -> nn.Module:
        if (layout, compute) not in loaded:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder(layout=layout),
                dtype=getattr(torch, compute),
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
            )
            assert not any(info.values()), info
            loaded[layout, compute] = model.eval()
        return loaded[layout, compute]

    return make


def logits_of(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(tokenizer.VOCAB_SIZE, (1, NUM_TOKENS), generator=generator)
    with torch.inference_mode():
        return model(input_ids=prompt).logits[0].float()


def relative_error(x: Tensor, reference: Tensor) -> float:
    return ((x - reference).norm() / reference.norm()).item()


def test_both_layouts_are_the_same_model(load: Callable[..., nn.Module]) -> None:
    logits = logits_of(load("publisher", "float32"))
    assert torch.equal(logits, logits_of(load("transformers", "float32")))


def test_logits_are_lively_and_calm_in_bfloat16(load: Callable[..., nn.Module]) -> None:
    logits = logits_of(load("publisher", "float32"))
    assert 2 < logits.std() < 4
    assert logits.argmax(-1).unique().numel() > NUM_TOKENS // 4
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert 1 < entropy.mean() < 5
    rounded = logits_of(load("publisher", "bfloat16"))
    assert relative_error(rounded, logits) < 0.06
    assert (rounded.argmax(-1) == logits.argmax(-1)).float().mean() > 0.9


# Each silences or bends one part of the model: (modules by class name, attribute, new value).
BENDS: dict[str, tuple[str, str, Callable[..., object]]] = {
    "no sinks": ("Attention", "sinks", lambda old: torch.full_like(old, -1e4)),
    "window one longer": ("Model", "sliding_window", lambda _: flint.TINY.window + 1),
    "no query norm": ("Attention", "q_norm", lambda _: nn.Identity()),
    "no key norm": ("Attention", "k_norm", lambda _: nn.Identity()),
    "another rotation": ("RotaryEmbedding", "inv_freq", lambda old: old * 1.1),
    "one expert less": ("TopKRouter", "top_k", lambda old: old - 1),
    "weights are not normalized": ("TopKRouter", "norm_topk_prob", lambda _: False),
    "no shared expert": ("SparseMoeBlock", "shared_expert", lambda _: _Zero()),
    "no routed experts": ("SparseMoeBlock", "experts", lambda _: _Zero()),
}


class _Zero(nn.Module):
    def forward(self, x: Tensor, *_: object) -> Tensor:
        return torch.zeros_like(x)


@pytest.mark.parametrize("bend", BENDS)
def test_every_part_is_audible(load: Callable[..., nn.Module], bend: str) -> None:
    """A mistake in any part moves float32 logits a thousand times more than rounding does."""
    class_name, attribute, change = BENDS[bend]
    model = load("publisher", "float32")
    straight = logits_of(model)
    modules = [m for m in model.modules() if type(m).__name__ == f"Flint{class_name}"]
    if attribute == "sliding_window":
        modules = [model.config]
    assert modules
    saved = [getattr(module, attribute) for module in modules]
    for module, old in zip(modules, saved, strict=True):
        new = change(old)
        setattr(module, attribute, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
    try:
        bent = logits_of(model)
    finally:
        for module, old in zip(modules, saved, strict=True):
            setattr(module, attribute, old)
    assert relative_error(bent, straight) > 1e-3


def test_published_files(folder: Make) -> None:
    path = folder()
    config = json.loads((path / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for shard in path.glob("*.safetensors"):
        tensors |= load_file(shard)
    in_float32 = {name for name, value in tensors.items() if value.dtype == torch.float32}
    assert in_float32 == {name for name in tensors if name.endswith(".softmax_offset")}
    # 9 tensors of attention and norms a layer; dense, shared and routed experts, router; 3 others.
    assert len(tensors) == 8 * 9 + 2 * 3 + 6 * (1 + 3 + 16 * 3) + 3
    assert config["layer_types"] == transformers.FlintConfig(num_hidden_layers=8).layer_types
    assert config["eos_token_id"] is None
    ids = tokenizer.special_ids(tokenizer.GLM)
    generation = json.loads((path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [
        ids[token] for token in ("<|endoftext|>", "<|user|>", "<|observation|>")
    ]


def test_gguf_holds_the_same_numbers(folder: Make) -> None:
    """Decoded by the package; its tensors stand under names of their own."""
    (path,) = folder(format="gguf").glob("*.gguf")
    reader = gguf.GGUFReader(path)
    published = dict(flint.tensors(0, torch.bfloat16))
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds == {"NVFP4", "BF16", "F32"}
    assert reader.get_field("general.tensor_extra.prec_a4") is not None
    values = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type)
        for t in reader.tensors
        if not t.name.endswith(".scale")
    }
    scales = {t.name: np.array(t.data) for t in reader.tensors if t.name.endswith(".scale")}
    assert len(scales) == sum(t.tensor_type.name == "NVFP4" for t in reader.tensors)
    for ours, theirs in (
        ("model.layers.3.self_attn.q_proj.weight", "blk.3.attn_q"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down"),
        ("lm_head.weight", "output"),
        ("model.layers.6.mlp.shared_expert.up_proj.weight", "blk.6.ffn_up_shexp"),
    ):
        value = values[f"{theirs}.weight"] * scales[f"{theirs}.scale"]
        np.testing.assert_array_equal(value, published[ours].float().numpy())
    for e in (0, 7, 15):
        value = values["blk.5.ffn_gate_exps.weight"][e] * scales["blk.5.ffn_gate_exps.scale"][e]
        expected = published[f"model.layers.5.mlp.experts.{e}.gate_proj.weight"]
        np.testing.assert_array_equal(value, expected.float().numpy())
    sinks = published["model.layers.2.self_attn.softmax_offset"].numpy()
    np.testing.assert_array_equal(values["blk.2.attn_sinks.weight"], sinks)
    # Experts have scales of their own, or an engine could mix them up unnoticed.
    assert len(set(scales["blk.5.ffn_down_exps.scale"].tolist())) == 3


def test_quantization_takes_the_nearest_values() -> None:
    matrix = torch.randn(6, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix[0, :16] = 0
    quantized = quantize(matrix, 0.25)
    values = quantized.values()
    assert torch.count_nonzero(values[0, :16]) == 0
    table = quantized_table(quantized)
    nearest = (table - matrix[..., None]).abs().amin(-1)
    torch.testing.assert_close((values - matrix).abs(), nearest, rtol=0, atol=1e-12)
    assert torch.equal(values, values.bfloat16().double())
    both = stack([quantized, quantize(matrix, 0.5)])
    assert torch.equal(both.values()[0], values)
    assert both.super_blocks().shape == (2, 6, 36)


def quantized_table(matrix: QuantizedMatrix) -> Tensor:
    """The 16 values that each element could have, [N, K, 16]."""
    codes = torch.arange(16, dtype=torch.uint8).expand(*matrix.codes.shape, 16)
    columns = [
        QuantizedMatrix(codes[..., i].contiguous(), matrix.scales, matrix.global_scale).values()
        for i in range(16)
    ]
    return torch.stack(columns, dim=-1)


def test_tokenizer_and_template(folder: Make) -> None:
    loaded = transformers.AutoTokenizer.from_pretrained(folder())
    ids = tokenizer.special_ids(tokenizer.GLM)
    assert len(loaded) == tokenizer.VOCAB_SIZE
    assert loaded.convert_tokens_to_ids(list(ids)) == list(ids.values())
    assert loaded.eos_token_id == ids["<|endoftext|>"]
    text = "The keeper writes: Grüße, 你好\n\ttab"
    assert loaded.decode(loaded(text).input_ids) == text
    marked = loaded("<think>so</think>").input_ids
    assert (marked[0], marked[-1]) == (ids["<think>"], ids["</think>"])
    # Reasoning and calls are part of the text, turns are not.
    assert (
        loaded.decode([*marked, ids["<|user|>"]], skip_special_tokens=True) == "<think>so</think>"
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "reasoning_content": "easy", "content": "2"},
        {"role": "tool", "content": "ok"},
    ]
    rendered = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\n1+1?<|assistant|>\n<think>easy</think>2"
        "<|observation|>\nok<|assistant|>\n<think>"
    )


def test_seed_decides_the_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_checkpoint(tmp_path / name, model="flint", seed=seed, format="gguf")
    contents = {path.name: (path / "model-nvfp4.gguf").read_bytes() for path in tmp_path.iterdir()}
    assert contents["a"] == contents["b"] != contents["c"]


def test_formats_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inkling2 in the layout of the publisher has no GGUF"):
        write_checkpoint(tmp_path, model="inkling2", format="gguf")
    with pytest.raises(ConfigError, match="flint in the layout of the transformers has no GGUF"):
        write_checkpoint(tmp_path, model="flint", layout="transformers", format="gguf")
    with pytest.raises(ConfigError, match="format 'onnx' is unknown; use one of safetensors, gguf"):
        write_checkpoint(tmp_path, format="onnx")  # type: ignore[arg-type]
