"""The tiny checkpoint is complete, the same model in both layouts, and lively."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from inkrt.engines.tiny import tokenizer
from inkrt.engines.tiny.__main__ import main
from inkrt.engines.tiny.checkpoint import Layout, write_checkpoint
from inkrt.engines.tiny.inkling2 import config
from inkrt.engines.tiny.random_tensor import RandomTensor, draw
from inkrt.errors import ConfigError

transformers = pytest.importorskip("transformers")

NUM_TOKENS = 120  # beyond both windows and the start of the log scaling
LAYOUTS: tuple[Layout, ...] = ("publisher", "transformers")
TEXT = config("float32")["text_config"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout, str], Path]:
    made: dict[tuple[Layout, str], Path] = {}

    def make(layout: Layout, dtype: str) -> Path:
        if (layout, dtype) not in made:
            path = tmp_path_factory.mktemp("tiny") / "checkpoint"
            write_checkpoint(path, layout=layout, dtype=dtype)
            made[layout, dtype] = path
        return made[layout, dtype]

    return make


@pytest.fixture(scope="module")
def load(folder: Callable[[Layout, str], Path]) -> Callable[..., nn.Module]:
    loaded: dict[tuple[Layout, str, str], nn.Module] = {}

    def make(layout: Layout, dtype: str, compute: str | None = None) -> nn.Module:
        compute = compute or dtype
        if (layout, dtype, compute) not in loaded:
            model, info = transformers.Inkling2ForConditionalGeneration.from_pretrained(
                folder(layout, dtype),
                dtype=getattr(torch, compute),
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
            )
            assert not any(info.values()), info
            loaded[layout, dtype, compute] = model.eval()
        return loaded[layout, dtype, compute]

    return make


def prompt() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(tokenizer.VOCAB_SIZE, (1, NUM_TOKENS), generator=generator)


def logits_of(model: nn.Module) -> Tensor:
    """Logits of the prompt, float32 [NUM_TOKENS, vocabulary]."""
    with torch.inference_mode():
        return model(input_ids=prompt()).logits[0]


def relative_error(x: Tensor, reference: Tensor) -> float:
    return ((x - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_layouts_are_the_same_model(load: Callable[..., nn.Module], dtype: str) -> None:
    published, renamed = (load(layout, dtype) for layout in LAYOUTS)
    logits = logits_of(published)
    assert logits.shape == (NUM_TOKENS, tokenizer.VOCAB_SIZE)
    assert torch.equal(logits, logits_of(renamed))

    generator = torch.Generator().manual_seed(2)
    pixels = {
        "pixel_values": torch.rand(6, 8, 8, 3, generator=generator) * 2 - 1,
        "image_grid_thw": torch.tensor([[1, 2, 3]]),
    }
    with torch.inference_mode():
        first, second = (
            torch.cat(tuple(model.get_image_features(**pixels).pooler_output))
            for model in (published, renamed)
        )
    assert first.shape == (6, TEXT["hidden_size"])
    assert torch.isfinite(first).all()
    assert first.float().std(0).min() > 0.02
    assert torch.equal(first, second)


def test_logits_are_lively(load: Callable[..., nn.Module]) -> None:
    logits = logits_of(load("publisher", "float32"))
    assert torch.isfinite(logits).all()
    assert 2 < logits.std() < 4
    assert logits.argmax(-1).unique().numel() > NUM_TOKENS // 4
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert 1 < entropy.mean() < 5


def test_bfloat16_stays_close_to_float32(load: Callable[..., nn.Module]) -> None:
    exact = logits_of(load("publisher", "bfloat16", "float32"))
    rounded = logits_of(load("publisher", "bfloat16"))
    assert relative_error(rounded, exact) < 0.06
    assert (rounded.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9


def test_router_bias_changes_the_experts(load: Callable[..., nn.Module]) -> None:
    model = load("publisher", "float32")
    changed: list[float] = []

    def record(router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        scores, chosen = output[0].sigmoid(), output[2].sort().values
        by_score = scores.topk(chosen.shape[-1]).indices.sort().values
        changed.append((chosen != by_score).any(-1).float().mean().item())

    routers = [layer.mlp.gate for layer in model.model.language_model.layers]
    hooks = [router.register_forward_hook(record) for router in routers]
    logits_of(model)
    for hook in hooks:
        hook.remove()
    assert len(changed) == TEXT["num_hidden_layers"]
    assert min(changed) > 0.1
    assert max(changed) < 1


# Each entry silences or bends one part of the model: (modules by class name, attribute, new value).
BENDS: dict[str, tuple[str, str, Callable[[object], object]]] = {
    "no log scaling": ("LogScale", "log_scaling_alpha", lambda _: 0.0),
    "no clip of keys": ("L2Clip", "threshold", lambda _: 1e9),
    "no clip of queries and relative states": ("ScaledL2Clip", "threshold", lambda _: 1e9),
    "relative extent one shorter": ("RelativePositionBias", "rel_extent", lambda old: old - 1),
    "no relative bias": ("RelativePositionBias", "proj", torch.zeros_like),
    "no router bias": ("TopKRouter", "e_score_correction_bias", torch.zeros_like),
    "route scale": ("TopKRouter", "routed_scaling_factor", lambda old: old * 1.5),
    "even residual mix": ("BlockAttentionResidual", "query", torch.zeros_like),
    "no dynamic taps": ("DynamicShortConvolution", "static_weight", torch.zeros_like),
    "gate cap": ("Softcap", "softcap", lambda old: 2.0 if old == 4.0 else old),
    "up cap": ("Softcap", "softcap", lambda old: 5.0 if old == 25.0 else old),
    "logit cap": ("Softcap", "softcap", lambda old: 25.0 if old == 30.0 else old),
}


@pytest.mark.parametrize("bend", BENDS)
def test_every_part_is_audible(load: Callable[..., nn.Module], bend: str) -> None:
    """A mistake in any part moves float32 logits a thousand times more than rounding does."""
    class_name, attribute, change = BENDS[bend]
    model = load("publisher", "float32")
    straight = logits_of(model)
    modules = [m for m in model.modules() if type(m).__name__ == f"Inkling2{class_name}"]
    saved = [getattr(module, attribute) for module in modules]
    assert modules
    for module, old in zip(modules, saved, strict=True):
        new = change(old)
        setattr(module, attribute, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
    try:
        bent = logits_of(model)
    finally:
        for module, old in zip(modules, saved, strict=True):
            setattr(module, attribute, old)
    assert relative_error(bent, straight) > 1e-3


def test_published_files(folder: Callable[[Layout, str], Path]) -> None:
    path = folder("publisher", "bfloat16")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) >= 2
    dtypes: dict[str, str] = {}
    total_bytes = 0
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                assert index["weight_map"][name] == shard.name
                tensor = file.get_tensor(name)
                dtypes[name] = str(tensor.dtype)
                total_bytes += tensor.nbytes
    assert dtypes.keys() == index["weight_map"].keys()
    assert total_bytes == index["metadata"]["total_size"]
    # 20 tensors per sliding layer, 24 per full one, 13 + 14 + 1 queries, 4 others; 2 vision layers.
    assert len(dtypes) == 12 * 20 + 2 * 24 + 28 + 4 + (6 + 2 * 18 + 2)
    in_float32 = {name for name, dtype in dtypes.items() if dtype == "torch.float32"}
    assert in_float32 == {
        name for name in dtypes if ".attn_res." in name or name.endswith(".mlp.gate.bias")
    }
    assert set(dtypes.values()) == {"torch.float32", "torch.bfloat16"}


def test_seed_decides_the_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_checkpoint(tmp_path / name, seed=seed)
    contents = {
        folder.name: {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in tmp_path.iterdir()
    }
    assert contents["a"] == contents["b"]
    different = {name for name in contents["a"] if contents["a"][name] != contents["c"][name]}
    assert different == {name for name in contents["a"] if name.endswith(".safetensors")}


def test_draw_has_the_asked_moments() -> None:
    value = draw(RandomTensor("x", (200, 100), 0.5, mean=3.0), 0, torch.float32)
    assert abs(value.mean().item() - 3.0) < 0.02
    assert abs(value.std().item() - 0.5) < 0.01
    # Golden values: a checkpoint must not depend on the machine.
    expected = torch.tensor([3.054377556, 2.680631876, 2.662158012])
    torch.testing.assert_close(value[0, :3], expected, rtol=0, atol=1e-6)


def test_tokenizer_and_template(folder: Callable[[Layout, str], Path]) -> None:
    path = folder("publisher", "bfloat16")
    loaded = transformers.AutoTokenizer.from_pretrained(path)
    settings = transformers.AutoConfig.from_pretrained(path)
    ids = tokenizer.special_ids()
    assert len(loaded) == tokenizer.VOCAB_SIZE == settings.text_config.unpadded_vocab_size
    assert settings.text_config.vocab_size > tokenizer.VOCAB_SIZE
    assert list(ids.values()) == list(range(tokenizer.VOCAB_SIZE - len(ids), tokenizer.VOCAB_SIZE))
    assert loaded.convert_tokens_to_ids(list(ids)) == list(ids.values())
    assert loaded.eos_token_id == settings.text_config.eos_token_id == ids[tokenizer.EOS_TOKEN]
    assert settings.image_token_id == ids[tokenizer.IMAGE_TOKEN]

    text = "The keeper writes: Grüße, 你好, \N{WAVING HAND SIGN}\n\ttab"
    assert loaded.decode(loaded(text).input_ids) == text
    assert len(loaded("lighthouse keeper").input_ids) < len("lighthouse keeper") / 2

    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "1+1?"}, {"type": "text", "text": "!"}],
        },
        {"role": "assistant", "reasoning_content": "easy", "content": "2"},
        {"role": "user", "content": "And 2+2?"},
    ]
    rendered = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|message_system|><|content_text|>Be brief.<|end_message|>"
        "<|message_user|><|content_text|>1+1?<|end_message|>"
        "<|message_user|><|content_text|>!<|end_message|>"
        "<|message_model|><|content_thinking|>easy<|end_message|>"
        "<|message_model|><|content_text|>2<|end_message|><|content_model_end_sampling|>"
        "<|message_user|><|content_text|>And 2+2?<|end_message|>"
        "<|message_model|>"
    )
    assert not loaded.apply_chat_template(messages, tokenize=False).endswith("<|message_model|>")


def test_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "x"), "--seed", "5"]
    subprocess.run([sys.executable, "-m", "inkrt.engines.tiny", *arguments], check=True)
    write_checkpoint(tmp_path / "y", seed=5)
    for file in (tmp_path / "y").iterdir():
        assert (tmp_path / "x" / file.name).read_bytes() == file.read_bytes()
    monkeypatch.setattr(sys, "argv", ["tiny", *arguments])
    assert main() == 1
    assert capsys.readouterr().err == (
        f"error: tiny checkpoint: {tmp_path / 'x'} is not an empty folder; "
        "remove it or name another\n"
    )


def test_unknown_choices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model 'gpt' is unknown; use one of inkling2, inkling,"):
        write_checkpoint(tmp_path, model="gpt")
    with pytest.raises(ConfigError, match="dtype 'int8' is unknown; use one of bfloat16, float32"):
        write_checkpoint(tmp_path, dtype="int8")
