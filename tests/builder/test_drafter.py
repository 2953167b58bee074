"""Drafters of tiny checkpoints are found, equal in every layout, and part of the fingerprint."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import OPTIONS, edit_config, edit_tensors, write_small
from torch import Tensor

from inkrt.builder.build import prepare
from inkrt.builder.checkpoint import Checkpoint, open_checkpoint
from inkrt.builder.choose_drafter import choose_drafter
from inkrt.builder.drafter import DRAFT_ROOT, FoundDrafter, find_drafter
from inkrt.builder.pack import PackedTensor, read_weight
from inkrt.engines.catalog import find_definition
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.engines.tiny.drafter import DRAFTER_LAYOUTS, HEAD_KINDS, TinyDrafter
from inkrt.errors import CheckpointError, ConfigError

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Tiny checkpoints with a drafter, made once for equal arguments."""
    made: dict[object, Path] = {}

    def write(*arguments: object, dtype: str = "bfloat16", layout: str = "publisher") -> Path:
        key = (*arguments, dtype, layout)
        if key not in made:
            folder = tmp_path_factory.mktemp("drafter") / "checkpoint"
            drafter = TinyDrafter(*arguments)  # type: ignore[arg-type]
            made[key] = write_small(folder, dtype=dtype, layout=layout, drafter=drafter)
        return made[key]

    return write


def find(checkpoint: Path, folder: Path | None = None, **arguments: bool) -> FoundDrafter | None:
    target = open_checkpoint(checkpoint)
    definition = find_definition(target.config)
    return find_drafter(
        target, definition, definition.parse_config(target.config), folder, **arguments
    )


def own_folder(checkpoint: Path) -> Path | None:
    return checkpoint / "drafter" if (checkpoint / "drafter").exists() else None


def weights(found: FoundDrafter) -> dict[str, Tensor]:
    """Every parameter as packing reads it."""
    read = {}
    for name, source in found.sources.items():
        (part,) = source.parts
        dtype = torch.int64 if part.is_ids else torch.float32
        shape = (part.shape[0] + source.pad, *part.shape[1:])
        read[name] = read_weight(PackedTensor(name, shape, dtype), found.checkpoint, source)
    return read


@pytest.mark.parametrize("is_trimmed", [False, True])
@pytest.mark.parametrize("head", HEAD_KINDS)
def test_layouts_give_equal_settings_and_weights(make: Make, head: str, is_trimmed: bool) -> None:
    every = {}
    for layout in DRAFTER_LAYOUTS:
        checkpoint = make(layout, head, is_trimmed)
        found = find(checkpoint, own_folder(checkpoint))
        assert found is not None
        assert (found.method, found.layout) == ("dspark", layout)
        every[layout] = (found.config, weights(found))
    config, values = every["embedded"]
    stored = {}
    for shard in make("embedded", head, is_trimmed).glob("*.safetensors"):
        stored |= load_file(shard)
    assert len(values) == 38 + (2 if head != "vanilla" else 0) + int(is_trimmed) + 2
    assert torch.equal(values["drafter.markov_w1"], stored["dspark.markov_head.markov_w1.weight"])
    assert torch.equal(
        values["drafter.layers.2.down"], stored["dspark.layers.2.mlp.down_proj.weight"]
    )
    assert values["drafter.layers.1.gate"].shape == (44, 60)
    for layout in DRAFTER_LAYOUTS[1:]:
        assert every[layout][0] == dataclasses.replace(
            config, has_own_embedding=False, has_own_unembed=False
        )
        assert every[layout][1].keys() == values.keys()
        for name, value in every[layout][1].items():
            assert torch.equal(value, values[name]), (layout, name)
    if is_trimmed:
        tokens = torch.arange(327) + values["drafter.d2t"]
        assert torch.equal(tokens, torch.tensor([x for x in range(490) if x % 3 != 1]))


@pytest.mark.parametrize(("layout", "rows"), [("publisher", 512), ("transformers", 490)])
@pytest.mark.parametrize("changed", [None, "embed_tokens.weight", "lm_head.weight"])
def test_copies_of_the_targets_tables_are_shared(
    make: Make, tmp_path: Path, layout: str, rows: int, changed: str | None
) -> None:
    """One bit of difference makes a table the drafter's own; padding that is cut off does not."""
    checkpoint = make("deepspec", layout=layout)
    tensors = load_file(checkpoint / "drafter" / "model.safetensors")
    assert tensors["lm_head.weight"].shape == (rows, 60)
    if changed is not None:
        tensors[changed].view(torch.int16)[489, 59] ^= 1
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "drafter" / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    found = find(checkpoint, folder)
    assert found is not None
    for name, is_own in (
        ("embed_tokens.weight", found.config.has_own_embedding),
        ("lm_head.weight", found.config.has_own_unembed),
    ):
        assert is_own == (name == changed)
        line = (
            "is the drafter's own: it is not the target's"
            if is_own
            else "equals the target's, which is used"
        )
        assert f"{name} {line}" in found.decisions
        assert (DRAFT_ROOT + name in found.left_out) != is_own
    own = weights(found)
    assert ("drafter.embed" in own) == (changed == "embed_tokens.weight")
    if changed == "lm_head.weight":
        assert own["drafter.unembed"].shape == (512, 60)
        assert torch.equal(own["drafter.unembed"][:rows], tensors[changed].float())
        assert not own["drafter.unembed"][rows:].any()


def test_part_of_a_table_is_no_copy(make: Make, tmp_path: Path) -> None:
    """300 rows that equal the target's are not its projection; 327 are a trimmed one's own."""
    short = damaged(make, tmp_path / "short")
    table = "model.llm.unembed.weight"
    edit_tensors(short, lambda t: t.update({"dspark.lm_head.weight": t[table][:300].clone()}))
    with pytest.raises(CheckpointError, match=r"has shape \[300, 60\], \[512, 60\] expected"):
        find(short)
    trimmed = damaged(make, tmp_path / "trimmed", "embedded", "rnn", True)
    edit_tensors(trimmed, lambda t: t.update({"dspark.lm_head.weight": t[table][:327].clone()}))
    found = find(trimmed)
    assert found is not None
    assert found.config.has_own_unembed
    assert weights(found)["drafter.unembed"].shape == (327, 60)


def test_without_weights_the_configuration_is_read(make: Make, tmp_path: Path) -> None:
    checkpoint = make("embedded")
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    found, real = find(tmp_path, has_weights=False), find(checkpoint)
    assert found is not None
    assert real is not None
    assert found.config == real.config
    assert found.sources == {}
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors file; download its shards"):
        find(tmp_path)


def test_a_checkpoint_without_drafter_has_none(make: Make) -> None:
    checkpoint = make("specforge")
    assert find(checkpoint) is None
    lines: list[str] = []
    target = open_checkpoint(checkpoint)
    definition = find_definition(target.config)
    model = definition.parse_config(target.config)

    def choose(spec: str, folder: Path | None) -> FoundDrafter | None:
        options = dataclasses.replace(OPTIONS, spec=spec)  # type: ignore[arg-type]
        return choose_drafter(target, definition, model, options, folder, lines.append)

    assert choose("auto", None) is None
    with pytest.raises(ConfigError) as caught:
        choose("dspark", None)
    assert str(caught.value) == (
        f"checkpoint {checkpoint} bundles no drafter (dspark_block_size, dspark_markov_rank, "
        "dspark_noise_token_id, dspark_target_layer_ids are absent from its config.json); name one "
        "with --draft-checkpoint"
    )
    with pytest.raises(ConfigError) as caught:
        choose("none", checkpoint / "drafter")
    assert str(caught.value) == (
        f"draft checkpoint {checkpoint / 'drafter'} is not used with --spec none; leave out one of "
        "them"
    )
    assert lines == []
    found = choose("auto", checkpoint / "drafter")
    assert found is not None
    assert lines[0] == (
        "drafter: dspark in the layout specforge, 3 layers, 7 drafts, head rnn of rank 14, "
        "taps 1, 2"
    )
    assert lines[1:] == [f"drafter: {line}" for line in found.decisions]


def damaged(make: Make, folder: Path, *arguments: object) -> Path:
    """A copy of a checkpoint with an embedded drafter, to be damaged."""
    source = make(*(arguments or ("embedded",)))
    folder.mkdir()
    for path in source.glob("*.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_settings_and_tensors_come_together(make: Make, tmp_path: Path) -> None:
    bare = damaged(make, tmp_path / "bare")
    edit_config(bare, lambda c: [c.pop(key) for key in list(c) if key.startswith("dspark_")])
    with pytest.raises(ConfigError) as config_error:
        find(bare)
    assert str(config_error.value) == (
        f"{bare}/config.json has none of dspark_block_size, dspark_markov_rank, "
        "dspark_noise_token_id, dspark_target_layer_ids, but the checkpoint has a drafter's tensor "
        "dspark.markov_head.markov_w1.weight; take the config.json that belongs to it"
    )
    empty = damaged(make, tmp_path / "empty")
    edit_tensors(empty, lambda t: [t.pop(key) for key in list(t) if key.startswith("dspark.")])
    with pytest.raises(CheckpointError) as checkpoint_error:
        find(empty)
    assert str(checkpoint_error.value) == (
        f"{empty}/config.json names a bundled drafter, but no tensor stands under dspark., "
        "mtp_dspark. or mtp.; download its shard"
    )
    with pytest.raises(CheckpointError) as hint:
        prepare(Checkpoint(empty), OPTIONS)
    assert str(hint.value) == (
        f"{checkpoint_error.value}; to build without the drafter: --spec none"
    )
    without = prepare(Checkpoint(empty), dataclasses.replace(OPTIONS, spec="none"))
    assert without.options.spec == "none"


def test_unfit_tensors_are_refused_and_unknown_ones_told(make: Make, tmp_path: Path) -> None:
    folder = damaged(make, tmp_path / "unknown")
    edit_tensors(folder, lambda t: t.update({"dspark.layers.0.scale": torch.ones(3)}))
    found = find(folder)
    assert found is not None
    assert found.decisions[-1] == "unknown tensor dspark.layers.0.scale is left out"
    assert found.left_out == {"dspark.layers.0.scale"}

    def halve(tensors: dict[str, Tensor]) -> None:
        tensors["dspark.fc.weight"] = tensors["dspark.fc.weight"].half()

    edit_tensors(folder, halve)
    with pytest.raises(CheckpointError, match=r"tensor dspark\.fc\.weight has dtype F16, only "):
        find(folder)

    trimmed = damaged(make, tmp_path / "trimmed", "embedded", "rnn", True)
    edit_tensors(trimmed, lambda t: t["dspark.t2d"].__setitem__(1, True))
    with pytest.raises(CheckpointError, match="t2d must be true exactly at the 327 tokens"):
        find(trimmed)
    edit_tensors(trimmed, lambda t: t.update({"dspark.d2t": t["dspark.d2t"].float()}))
    with pytest.raises(
        CheckpointError, match="d2t has dtype F32, token ids must be I64, I32, BOOL"
    ):
        find(trimmed)

    moved = damaged(make, tmp_path / "moved")
    edit_tensors(moved, lambda t: t.update({"dspark.d2t": torch.ones(512, dtype=torch.int64)}))
    with pytest.raises(
        CheckpointError, match="d2t moves tokens, but all 512 tokens can be drafted"
    ):
        find(moved)


def test_folders_that_hold_no_drafter(make: Make, tmp_path: Path) -> None:
    checkpoint = make("embedded")
    with pytest.raises(ConfigError, match="describes no drafter that is known: architectures "):
        find(checkpoint, checkpoint)
    with pytest.raises(CheckpointError, match="is not a folder"):
        find(checkpoint, tmp_path / "nowhere")
    (tmp_path / "drafter.gguf").touch()
    with pytest.raises(CheckpointError) as caught:
        find(checkpoint, tmp_path)
    assert str(caught.value) == (
        f"draft checkpoint {tmp_path} holds a GGUF file; this version reads drafters from "
        "safetensors, take such a release"
    )
    (tmp_path / "drafter.gguf").unlink()
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(CheckpointError, match=r"has a mask embedding of its own \(mask_embedding"):
        find(checkpoint, tmp_path)


def test_a_drafter_of_another_model_is_refused(make: Make, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "flint", model="flint", drafter=TinyDrafter("specforge"))
    folder = tmp_path / "flint" / "drafter"
    found = find(tmp_path / "flint", folder)
    assert found is not None
    assert found.config.softcap_place == "none"
    write_checkpoint(tmp_path / "copies", model="flint", drafter=TinyDrafter("deepspec"))
    copies = find(tmp_path / "copies", tmp_path / "copies" / "drafter")
    assert copies is not None
    assert copies.config == found.config
    with pytest.raises(ConfigError, match="was made for another model than this target: hidden_"):
        find(make("embedded"), folder)


def test_tiny_drafters_are_the_same_every_time(make: Make, tmp_path: Path) -> None:
    for layout in ("embedded", "speculators"):
        again = write_small(tmp_path / layout, drafter=TinyDrafter(layout))
        files = {x.relative_to(again): x.read_bytes() for x in again.rglob("*.*")}
        first = make(layout)
        assert files == {x.relative_to(first): x.read_bytes() for x in first.rglob("*.*")}
    with pytest.raises(ConfigError, match="a GGUF file has no drafter"):
        write_checkpoint(
            tmp_path / "gguf", model="flint", format="gguf", drafter=TinyDrafter("deepspec")
        )


def test_the_drafters_files_take_part_in_the_fingerprint(make: Make, tmp_path: Path) -> None:
    checkpoint = make("specforge")
    folder = tmp_path / "drafter"
    folder.mkdir()
    for path in (checkpoint / "drafter").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())

    def fingerprint() -> str:
        found = find(checkpoint, folder)
        assert found is not None
        assert found.checkpoint.names > Checkpoint(checkpoint).names
        return found.checkpoint.fingerprint

    first = fingerprint()
    assert first == fingerprint() != Checkpoint(checkpoint).fingerprint
    edit_config(folder, lambda config: config.update(note="another"))
    second = fingerprint()
    edit_tensors(folder, lambda tensors: tensors.update({"extra": torch.ones(2)}))
    assert len({first, second, fingerprint()}) == 3
