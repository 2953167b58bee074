"""Packing: the ranks' weights add up to the checkpoint, whatever it is spelled like."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_model import (
    OPTIONS,
    edit_config,
    edit_tensors,
    files_of,
    rank_weights,
    small_config,
    small_module,
    write_small,
    write_weights,
)
from torch import Tensor

from inkrt.builder import pack
from inkrt.builder.build import build_engine
from inkrt.builder.checkpoint import Checkpoint
from inkrt.builder.pack import PackedTensor, packed_tensors, read_weight, split_files
from inkrt.engines.inkling2.weights import weight_sources
from inkrt.engines.interface import Part, Sharding, WeightSource

SHARDINGS = [
    (1, "experts"),
    (2, "experts"),
    (4, "experts"),
    (2, "width"),
    (4, "width"),
]
NUM_TOKENS = 490  # unpadded vocabulary; the checkpoint has 512 rows
HEAD_ROWS = {1: 490, 2: 496, 4: 496}  # of all ranks: several have whole fours each

# Every rank has a copy of these; of all others the ranks have a share each.
REPLICATED = (
    r"embed\.weight",
    r"embed_norm\.weight",
    r"norm\.weight",
    r"attn_res\..*",
    r"layers\.\d\.(attn_norm|[qkv]_input_norm|mlp_norm)\.weight",
    r"layers\.\d\.attn\.rel_logits_proj\.proj",
    r"layers\.\d\.(attn|mlp)_sconv\.weight",
    r"layers\.\d\.mlp\.gate\.(weight|bias)",
)
# Where the shares are joined: dimension, and the checkpoint's tensor that they then are.
JOINED = {
    "attn.wq": (0, "attn.wq_du.weight"),
    "attn.wk": (0, "attn.wk_dv.weight"),
    "attn.wv": (0, "attn.wv_dv.weight"),
    "attn.wr": (0, "attn.wr_du.weight"),
    "attn.wsink": (0, "attn.attn_sink_proj.weight"),
    "attn.wgate": (0, "attn.gate_attn.weight"),
    "attn.wo": (1, "attn.wo_ud.weight"),
    "attn.q_scale": (0, "attn.q_l2_clip.scale"),
    "attn.rel_scale": (0, "attn.rel_l2_clip.scale"),
    "attn.k_conv.weight": (0, "attn.k_sconv.weight"),
    "attn.v_conv.weight": (0, "attn.v_sconv.weight"),
    "attn.k_conv.static_weight": (1, "attn.k_sconv.static_w"),
    "attn.v_conv.static_weight": (1, "attn.v_sconv.static_w"),
    "attn.k_conv.dynamic_proj": (0, "attn.k_sconv.weight_proj"),
    "attn.v_conv.dynamic_proj": (0, "attn.v_sconv.weight_proj"),
}


def read_all(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def number_elements(tensors: dict[str, Tensor]) -> None:
    """Give every element of the text model a float32 number of its own, from 1 on."""
    count = 1
    for name in sorted(tensors):
        if name.startswith("model.llm."):
            size = tensors[name].numel()
            numbers = torch.arange(count, count + size, dtype=torch.float32)
            tensors[name] = numbers.reshape(tensors[name].shape)
            count += size
    assert count < 2**24, "float32 cannot tell so many numbers apart"


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_small(tmp_path_factory.mktemp("weights") / "numbered")
    edit_tensors(folder, number_elements)
    return folder


@pytest.mark.parametrize(("tp_size", "moe_split"), SHARDINGS)
def test_every_element_is_packed_as_often_as_it_should(
    numbered: Path, tp_size: int, moe_split: str
) -> None:
    tensors = read_all(numbered)
    ranks = rank_weights(numbered, tp_size, moe_split, torch.float32)
    packed = np.concatenate([x.numpy().ravel() for rank in ranks for x in rank.values()])
    num_elements = sum(x.numel() for name, x in tensors.items() if name.startswith("model.llm."))
    counts = np.bincount(packed.astype(np.int64), minlength=num_elements + 1)
    assert len(counts) == num_elements + 1
    num_padding = HEAD_ROWS[tp_size] - NUM_TOKENS
    assert counts[0] == num_padding * small_config().hidden_size
    replicated = set()
    for name, value in tensors.items():
        if not name.startswith("model.llm."):
            continue
        short = name.removeprefix("model.llm.")
        got = counts[value.numpy().astype(np.int64)]
        if short == "unembed.weight":
            assert (got[:NUM_TOKENS] == 1).all()
            assert (got[NUM_TOKENS:] == 0).all()
        elif any(re.fullmatch(pattern, short) for pattern in REPLICATED):
            replicated.add(name)
            assert (got == tp_size).all(), name
        else:
            assert (got == 1).all(), name
    # 4 of the whole model, 5 queries, 8 input norms and 5 more in each of the layers.
    assert len(replicated) == 4 + 5 + 8 + 3 * 5


@pytest.mark.parametrize(("tp_size", "moe_split"), SHARDINGS)
def test_shares_are_where_the_operators_want_them(
    numbered: Path, tp_size: int, moe_split: str
) -> None:
    tensors = read_all(numbered)
    ranks = rank_weights(numbered, tp_size, moe_split, torch.float32)
    joined = 0
    for layer in range(3):
        theirs, ours = f"model.llm.layers.{layer}.", f"layers.{layer}."
        for name, (dim, source) in JOINED.items():
            if ours + name in ranks[0]:
                value = torch.cat([rank[ours + name] for rank in ranks], dim)
                assert torch.equal(value, tensors[theirs + source].reshape(value.shape)), name
                joined += 1
        dims = (0, 0) if moe_split == "experts" else (1, 2)
        halves = [rank[ours + "mlp.gate_up"].chunk(2, dim=1) for rank in ranks]
        gate, up = (torch.cat(parts, dims[0]) for parts in zip(*halves, strict=True))
        w13 = tensors[theirs + "mlp.experts.w13_weight"]  # rows gate 0, up 0, gate 1, ...
        assert torch.equal(gate, w13[:, 0::2])
        assert torch.equal(up, w13[:, 1::2])
        down = torch.cat([rank[ours + "mlp.down"] for rank in ranks], dims[1])
        assert torch.equal(down, tensors[theirs + "mlp.experts.w2_weight"])
    assert joined == 2 * 11 + 13
    head = torch.cat([rank["unembed"] for rank in ranks])
    assert torch.equal(head[:NUM_TOKENS], tensors["model.llm.unembed.weight"][:NUM_TOKENS])
    assert not head[NUM_TOKENS:].any()
    assert len(head) == HEAD_ROWS[tp_size]


def test_a_share_of_the_vocabulary_may_be_padding_only() -> None:
    """Five tokens on four ranks: shares of four rows, of which the last two ranks have none."""
    config = small_config()
    for name, value in (("unpadded_vocab_size", 5), ("vocab_size", 6)):
        object.__setattr__(config, name, value)
    names = frozenset({"model.llm.embed.weight"})
    rows = []
    for rank in range(4):
        source = weight_sources(config, names, rank, Sharding(4, "experts"))["unembed"]
        (part,) = source.parts
        rows.append((len(range(6)[part.index[0]]), source.pad))
    assert rows == [(4, 0), (1, 3), (0, 4), (0, 4)]


def text_only(folder: Path) -> Path:
    """A folder as the text-only class of transformers writes it."""
    write_small(folder, layout="transformers")

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            value = tensors.pop(name)
            if not name.startswith("model.vision_tower."):
                tensors[name.replace("model.language_model.", "model.")] = value

    edit_tensors(folder, rename)
    edit_config(folder, lambda config: config.update(config.pop("text_config")))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "inkling2_text"
    return folder


@pytest.mark.parametrize("spelling", ["transformers", "text only"])
def test_all_spellings_pack_to_the_same_bytes(
    checkpoint: Path, tmp_path: Path, spelling: str
) -> None:
    if spelling == "transformers":
        other = write_small(tmp_path / "other", layout="transformers")
    else:
        other = text_only(tmp_path / "other")
    for tp_size, moe_split in SHARDINGS:
        module = small_module(tp_size, moe_split, torch.bfloat16, last_row_only=False)
        tensors = packed_tensors(module)
        contents = []
        for source in (checkpoint, other):
            out = tmp_path / f"{source.name}-{tp_size}-{moe_split}"
            out.mkdir()
            opened = Checkpoint(source)
            sharding = Sharding(tp_size, moe_split)
            ranks = [
                weight_sources(small_config(), opened.names, rank, sharding)
                for rank in range(tp_size)
            ]
            for sources in ranks:
                assert set(sources) == {tensor.name for tensor in tensors}
            write_weights(out, tensors, opened, ranks)
            contents.append(files_of(out))
        assert contents[0] == contents[1]
        assert len(contents[0]) == tp_size


def one_tensor(folder: Path, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A checkpoint's tensor as it is packed for a weight of another dtype."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file({"x": value}, folder / "model.safetensors")
    part = Part("x", tuple(value.shape), (slice(None),) * value.dim())
    packed = PackedTensor("x", tuple(value.shape), dtype)
    return read_weight(packed, Checkpoint(folder), WeightSource((part,)))


def test_float32_is_rounded_to_the_nearest_even_bfloat16(tmp_path: Path) -> None:
    tie = 2.0**-8
    special = torch.tensor(
        [1 + tie, 1 + 3 * tie, -1 - tie, 1 + tie * 1.0001, 0.0, -0.0, 1e-40, 3.4e38, torch.inf]
    )
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator).to(torch.int32)
    value = torch.cat([special, bits.view(torch.float32)])
    value = value[~value.isnan()]
    packed = one_tensor(tmp_path / "x", value, torch.bfloat16)
    source = value.numpy().view(np.uint32).astype(np.uint64)
    expected = (source + 0x7FFF + ((source >> 16) & 1)) >> 16
    got = packed.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(got, expected.astype(np.uint16))
    assert packed[:4].tolist() == [1.0, 1 + 4 * tie, -1.0, 1 + 2 * tie]


def test_bfloat16_is_widened_exactly(checkpoint: Path, tmp_path: Path) -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    packed = one_tensor(tmp_path / "x", bits.view(torch.bfloat16), torch.float32)
    got = packed.view(torch.int32).numpy().view(np.uint32)
    np.testing.assert_array_equal(got, bits.numpy().view(np.uint16).astype(np.uint32) << 16)
    # The router is one: stored in BF16, used in float32.
    router = rank_weights(checkpoint, 1)[0]["layers.1.mlp.router"]
    assert router.dtype == torch.float32
    stored = read_all(checkpoint)["model.llm.layers.1.mlp.gate.weight"]
    assert stored.dtype == torch.bfloat16
    assert torch.equal(router, stored.float())


def test_files_are_split_by_size(
    checkpoint: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 60_000
    monkeypatch.setattr(pack, "MAX_FILE_BYTES", limit)
    config = build_engine(checkpoint, tmp_path / "engine", OPTIONS)
    names = sorted(name for name in config.files if name.startswith("rank0-"))
    assert len(names) > 5
    assert names == [
        f"rank0-{number:05}-of-{len(names):05}.safetensors" for number in range(1, len(names) + 1)
    ]
    whole = load_file(engine / "rank0-00001-of-00001.safetensors")
    order: list[str] = []
    for name in names:
        content = load_file(tmp_path / "engine" / name)
        for key, value in content.items():
            assert torch.equal(value, whole[key])
            assert value.dtype == whole[key].dtype
        assert sum(value.nbytes for value in content.values()) <= limit or len(content) == 1
        with safe_open(tmp_path / "engine" / name, framework="pt") as file:
            order += file.offset_keys()
    module = small_module(1, "experts", torch.bfloat16, last_row_only=False)
    assert order == [tensor.name for tensor in packed_tensors(module)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4, 4, 2], [[4, 4, 2]]),
        ([4, 4, 3], [[4, 4], [3]]),
        ([11, 4], [[11], [4]]),
        ([4, 11, 4], [[4], [11], [4]]),
        ([], [[]]),
    ],
)
def test_split_sizes(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], expected: list[list[int]]
) -> None:
    monkeypatch.setattr(pack, "MAX_FILE_BYTES", 40)
    tensors = [PackedTensor(str(i), (size,), torch.float32) for i, size in enumerate(sizes)]
    files = split_files(tensors)
    assert [[tensor.shape[0] for tensor in file] for file in files] == expected


def test_a_tensor_of_an_odd_number_of_bytes_may_come_first(tmp_path: Path) -> None:
    values = {
        "a": torch.tensor([1.0, 2.0, 3.0]),
        "b": torch.tensor([[4.0, 5.0]]),
        "c": torch.tensor([6.0]),
    }
    (tmp_path / "config.json").write_text("{}")
    save_file(values, tmp_path / "model.safetensors")
    sources = {
        name: WeightSource((Part(name, tuple(x.shape), (slice(None),) * x.dim()),))
        for name, x in values.items()
    }
    dtypes = {"a": torch.bfloat16, "b": torch.float32, "c": torch.bfloat16}
    tensors = [PackedTensor(name, tuple(x.shape), dtypes[name]) for name, x in values.items()]
    (name,) = write_weights(tmp_path, tensors, Checkpoint(tmp_path), [sources])
    loaded = load_file(tmp_path / name)
    for name, value in values.items():
        assert loaded[name].dtype == dtypes[name]
        assert torch.equal(loaded[name].float() + 1, value + 1)
