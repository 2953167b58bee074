"""GGUF files are read without loss, and refused where they cannot be.

The files are written with the package's own writer; values are compared with its own dequantizer
and with a decoder written from the format's description, both in float64.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from inkrt.builder.checkpoint import Checkpoint, open_checkpoint
from inkrt.builder.gguf_checkpoint import GgufCheckpoint
from inkrt.builder.pack import PackedTensor, read_weight
from inkrt.engines.interface import Part, WeightSource
from inkrt.errors import CheckpointError, InkError
from inkrt.plugins.nvfp4 import dequantize

NVFP4, BF16 = gguf.GGMLQuantizationType.NVFP4, gguf.GGMLQuantizationType.BF16
ROWS, WIDTH, STACK = 5, 192, 3


def raw_blocks(*rows: int, seed: int = 0) -> np.ndarray:
    """Random super-blocks of matrices with WIDTH columns; scales have all legal bytes."""
    g = np.random.default_rng(seed)
    blocks = g.integers(0, 256, (*rows, WIDTH // 64, 36), dtype=np.uint8)
    # With and without the sign bit, which means nothing, and 0x7F, which means zero.
    legal = np.array([b for b in range(256) if b != 0xFF], np.uint8)
    blocks[..., :4] = g.choice(legal, blocks[..., :4].shape)
    return blocks.reshape(*rows, -1)


def write(folder: Path, changes: dict[str, Any] | None = None, **metadata: Any) -> Path:
    """A checkpoint with tensors of all kinds; `changes` replaces tensors, None leaves them out.

    Tensors are arrays, or pairs of raw bytes and type.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"}))
    plain = np.random.default_rng(1).normal(size=(ROWS, 4)).astype(np.float32)
    half = torch.from_numpy(plain).bfloat16()
    tensors: dict[str, Any] = {
        "a.weight": (raw_blocks(ROWS), NVFP4),
        "a.scale": np.array([0.3], np.float32),
        "stack.weight": (raw_blocks(STACK, ROWS, seed=2), NVFP4),
        "stack.scale": np.array([0.5, 3.7, 1.1], np.float32),
        "f32.weight": plain,
        "bf16.weight": (half.view(torch.uint8).numpy(), BF16),
    }
    writer = gguf.GGUFWriter(folder / "model.gguf", "toy")
    for key, value in metadata.items():
        writer.add_array(key.replace("__", "."), value)
    for name, value in (tensors | (changes or {})).items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        elif value is not None:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> GgufCheckpoint:
    checkpoint = open_checkpoint(write(tmp_path_factory.mktemp("gguf") / "toy"))
    assert isinstance(checkpoint, GgufCheckpoint)
    return checkpoint


def whole(checkpoint: GgufCheckpoint, name: str, *shape: int) -> torch.Tensor:
    return checkpoint.read(Part(name, shape, (slice(None),) * len(shape)))


def decoded(raw: np.ndarray) -> np.ndarray:
    """Values without tensor scale, from the description of a super-block, one byte at a time."""
    out = []
    for block in raw.reshape(-1, 36).tolist():
        for j in range(4):
            byte = 0 if block[j] == 0x7F else block[j] & 0x7F
            exponent, mantissa = byte >> 3, byte & 7
            scale = mantissa / 512 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
            codes = block[4 + 8 * j : 12 + 8 * j]
            for code in [c & 15 for c in codes] + [c >> 4 for c in codes]:
                size = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
                out.append(scale * (-size if code & 8 else size))
    return np.array(out).reshape(*raw.shape[:-1], -1)


@pytest.mark.parametrize(("name", "rows", "seed"), [("a", (ROWS,), 0), ("stack", (STACK, ROWS), 2)])
def test_every_value_is_kept(
    opened: GgufCheckpoint, name: str, rows: tuple[int, ...], seed: int
) -> None:
    codes = whole(opened, f"{name}.weight", *rows, WIDTH // 2)
    scales = whole(opened, f"{name}.weight_scale", *rows, WIDTH // 16)
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.uint8)
    assert int(scales.max()) <= 0x7E
    ours = dequantize(codes, scales, torch.float32).double().numpy()
    raw = raw_blocks(*rows, seed=seed)
    np.testing.assert_array_equal(ours, decoded(raw))
    # The package's decoder takes the meaningless sign bit of a scale for a number: clear it first.
    cleared = raw.reshape(-1, 36).copy()
    cleared[:, :4] &= 0x7F
    theirs = gguf.quants.dequantize(cleared.reshape(raw.shape), NVFP4)
    np.testing.assert_array_equal(ours, theirs.astype(np.float64))
    # All codes are kept, not only their values: -0 too, and those under a zero scale.
    halves = raw.reshape(-1, 36)[:, 4:].reshape(-1, 8)
    expected = np.concatenate([halves & 15, halves >> 4], axis=1)
    kept = codes.numpy().reshape(-1, 8)
    np.testing.assert_array_equal(
        np.stack([kept & 15, kept >> 4], axis=-1).reshape(-1, 16), expected
    )


def test_plain_tensors(opened: GgufCheckpoint, tmp_path: Path) -> None:
    assert opened.names == {
        "a.weight", "a.weight_scale", "a.scale", "stack.weight", "stack.weight_scale",
        "stack.scale", "f32.weight", "bf16.weight",
    }  # fmt: skip
    f32, bf16 = whole(opened, "f32.weight", ROWS, 4), whole(opened, "bf16.weight", ROWS, 4)
    assert (opened.dtype_of("f32.weight"), opened.dtype_of("bf16.weight")) == (
        torch.float32,
        torch.bfloat16,
    )
    assert torch.equal(f32.bfloat16(), bf16)
    assert torch.equal(whole(opened, "stack.scale", STACK), torch.tensor([0.5, 3.7, 1.1]))
    assert opened.config["quantization_config"] == {
        "quant_method": "nvfp4",
        "tensors": ["a.weight", "stack.weight"],
    }


def test_slices_are_slices_of_the_whole(opened: GgufCheckpoint) -> None:
    index = (slice(1, 3), slice(2, 5))
    for name, width, columns in (
        ("stack.weight", WIDTH // 2, slice(40, 88)),
        ("stack.weight_scale", WIDTH // 16, slice(5, 11)),
    ):
        shape = (STACK, ROWS, width)
        piece = opened.read(Part(name, shape, (*index, columns)))
        assert torch.equal(piece, whole(opened, name, *shape)[(*index, columns)])


def test_an_invalid_scale_is_refused(tmp_path: Path) -> None:
    raw = raw_blocks(ROWS)
    raw[3, 36 + 2] = 0xFF
    checkpoint = open_checkpoint(write(tmp_path / "x", {"a.weight": (raw, NVFP4)}))
    shape = (ROWS, WIDTH // 16)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(Part("a.weight_scale", shape, (slice(None), slice(None))))
    assert str(caught.value) == (
        f"{tmp_path / 'x' / 'model.gguf'}: tensor a.weight has a block scale 0xFF, which is no "
        f"number; download the file again"
    )
    # Rows without it can be read.
    checkpoint.read(Part("a.weight_scale", shape, (slice(0, 3), slice(None))))


def test_narrow_activations_are_refused(tmp_path: Path) -> None:
    key = "general__tensor_extra__prec_a4"
    open_checkpoint(write(tmp_path / "x", **{key: [False, False]}))
    with pytest.raises(CheckpointError, match="prec_a4 asks for 4-bit activations, only 16-bit"):
        open_checkpoint(write(tmp_path / "y", **{key: [False, True]}))


BAD_TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"f32.weight": np.zeros((2, 4), np.float16)}, "f32.weight has ggml type F16, only F32, BF16"),
    ({"b.bias": (raw_blocks(2), NVFP4)}, "b.bias has ggml type NVFP4, only F32, BF16 and, for wei"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_TENSORS)
def test_other_types_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(tmp_path / "x", changes))


def test_missing_and_misshapen_tensors(opened: GgufCheckpoint) -> None:
    every = (slice(None), slice(None))
    with pytest.raises(CheckpointError, match=r"has no tensor b\.weight; it is not complete or"):
        opened.check(Part("b.weight", (1, 1), every))
    with pytest.raises(CheckpointError, match=r"bf16\.weight is torch\.bfloat16, NVFP4 expected"):
        opened.check(Part("bf16.weight_scale", (ROWS, 1), every))
    with pytest.raises(CheckpointError, match=r"a\.weight is NVFP4 and reads as shape \[5, 96\]"):
        opened.check(Part("a.weight", (ROWS, WIDTH), every))
    with pytest.raises(CheckpointError, match=r"f32\.weight has shape \[5, 4\], \[4, 5\] expected"):
        opened.check(Part("f32.weight", (4, ROWS), every))


def test_weights_that_must_be_equal(tmp_path: Path) -> None:
    same = {"b.scale": np.array([0.3], np.float32)}
    tensor = PackedTensor("scale", (1,), torch.float32)
    parts = tuple(Part(name, (1,), (slice(None),)) for name in ("a.scale", "b.scale"))
    source = WeightSource(parts, is_one_of_equals=True)
    taken = read_weight(tensor, open_checkpoint(write(tmp_path / "x", same)), source)
    assert taken.tolist() == [pytest.approx(0.3)]
    other = {"b.scale": np.array([0.25], np.float32)}
    with pytest.raises(CheckpointError) as caught:
        read_weight(tensor, open_checkpoint(write(tmp_path / "y", other)), source)
    assert "a.scale and b.scale must be equal, because the matrices" in str(caught.value)
    assert "[0.30000001192092896] and [0.25]" in str(caught.value)


def test_codes_are_not_taken_for_numbers(opened: GgufCheckpoint) -> None:
    part = Part("a.weight", (ROWS, WIDTH // 2), (slice(None), slice(None)))
    tensor = PackedTensor("w", part.shape, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"a\.weight is uint8, bfloat16 expected for w"):
        read_weight(tensor, opened, WeightSource((part,)))


def test_which_checkpoint_is_opened(tmp_path: Path) -> None:
    folder = write(tmp_path / "x")
    assert isinstance(open_checkpoint(folder / "model.gguf"), GgufCheckpoint)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds safetensors and model\.gguf; name the"):
        open_checkpoint(folder)
    assert isinstance(open_checkpoint(folder / "model.gguf"), GgufCheckpoint)
    (folder / "model.safetensors").unlink()
    (folder / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files; name one of them"):
        open_checkpoint(folder)
    for file in folder.glob("*.gguf"):
        file.unlink()
    assert isinstance(open_checkpoint(folder), Checkpoint)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """A cut at any place, in the header, the metadata or the data, is noticed at opening."""
    folder = write(tmp_path / "x", general__tensor_extra__prec_a4=[False, False])
    path = folder / "model.gguf"
    content = path.read_bytes()
    # The writer pads the last tensor: that much can be missing without a loss.
    for size in [*range(0, 700, 13), len(content) // 2, len(content) - 64]:
        path.write_bytes(content[:size])
        with pytest.raises(
            CheckpointError, match=r"truncated, damaged or of an unknown kind|cannot"
        ):
            open_checkpoint(path)
    for position in range(0, 600, 7):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except InkError:
            continue
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        open_checkpoint(path)


def test_fingerprint_covers_header_name_size_and_config(tmp_path: Path) -> None:
    first = open_checkpoint(write(tmp_path / "x")).fingerprint
    assert first == open_checkpoint(write(tmp_path / "y")).fingerprint
    assert len(first) == len(hashlib.sha256().hexdigest())
    (tmp_path / "y" / "config.json").write_text(json.dumps({"model_type": "other"}))
    assert open_checkpoint(tmp_path / "y").fingerprint != first
    changed = open_checkpoint(write(tmp_path / "z", {"a.scale": None}))
    assert changed.fingerprint != first
