"""Where the pieces of quantized weights of the Inkling models stand in a checkpoint.

A publisher stores codes under the weight's own name and scales under that name with a suffix. What
a module makes of them is decided here too: the parameters of a `QuantizedWeight`, or of the values
that they stand for.
"""

from dataclasses import dataclass, replace
from typing import Literal

from inkrt.engines.interface import Dequantize, Encoding, Part, WeightSource
from inkrt.engines.quantization import SCALE_BLOCK, QuantizedForm, WeightForm
from inkrt.engines.weight_map import RankMap, Spelling
from inkrt.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Piece:
    """Codes or scales of a quantized weight.

    Attributes:
        kind: which of them.
        parameter: the module's name.
        encoding: of their bytes.
        columns: that a byte stands for.
    """

    kind: Literal["codes", "scales"]
    parameter: str
    encoding: Encoding
    columns: int


PIECES: dict[QuantizedForm, tuple[Piece, Piece]] = {
    "nvfp4": (
        Piece("codes", "codes", "e2m1", 2),
        Piece("scales", "scales", "e4m3_scale", SCALE_BLOCK["nvfp4"]),
    ),
    "mxfp8": (
        Piece("codes", "e4m3", "e4m3", 1),
        Piece("scales", "exponents", "e8m0_scale", SCALE_BLOCK["mxfp8"]),
    ),
}


def encoded(source: WeightSource, piece: Piece) -> WeightSource:
    """The same pieces as bytes."""
    parts = tuple(replace(part, encoding=piece.encoding) for part in source.parts)
    return replace(source, parts=parts)


def expert_sources(
    make: RankMap,
    names: tuple[str, str],
    sizes: tuple[int, int, int],
    forms: tuple[QuantizedForm, WeightForm],
    scale_suffix: str,
) -> dict[str, WeightSource]:
    """Sources of `gate_up` and `down` of a layer's quantized experts, but for global scales.

    Args:
        make: of the rank.
        names: of both stored weights; gate and up rows are interleaved.
        sizes: number of experts, hidden size, width of an expert.
        forms: in the checkpoint and in the engine.
        scale_suffix: behind a weight's name, of its scales.
    """
    num_experts, hidden, width = sizes
    stored, wanted = forms
    sources: dict[str, WeightSource] = {}
    codes, scales = PIECES[stored]
    for ours, name in zip(("gate_up", "down"), names, strict=True):
        found: list[WeightSource] = []
        for piece, suffix in ((codes, ""), (scales, scale_suffix)):
            if ours == "gate_up":
                shape = (num_experts, 2 * width, hidden // piece.columns)
                source = make.expert_gate_up(name + suffix, shape, is_interleaved=True)
            else:
                shape = (num_experts, hidden, width // piece.columns)
                source = make.expert_down(name + suffix, shape)
            found.append(encoded(source, piece))
        if wanted == stored:
            sources |= {
                f"{ours}.{piece.parameter}": source
                for piece, source in zip((codes, scales), found, strict=True)
            }
            continue
        place = f"{ours}.matrix" if wanted == "scaled" else ours
        sources[place] = replace(found[0], dequantize=Dequantize(stored, found[1].parts))
    return sources


def quotient(amax: Part, denominator: Part) -> WeightSource:
    """A global scale that is stored as two numbers."""
    parts = (replace(amax, sign="not negative"), replace(denominator, sign="positive"))
    return WeightSource(parts, is_quotient=True)


def check_form(
    names: frozenset[str], marker: str, form: WeightForm, what: str, spelling: Spelling
) -> None:
    """Compare what the configuration says of a weight with the names of the checkpoint.

    Args:
        names: of its tensors.
        marker: the tensor that an NVFP4 weight has and no other.
        form: that the configuration says.
        what: the weight, for messages.
        spelling: of the names.

    Raises:
        CheckpointError: they do not agree, or names are those of transformers, in which this
            version reads plain weights only.
    """
    has_marker = marker in names
    if has_marker != (form == "nvfp4"):
        there = "NVFP4" if has_marker else "no NVFP4"
        raise CheckpointError(
            f"the checkpoint has {there} {what} (by {marker}), which config.json and "
            f"hf_quant_config.json call {form}; take the files of one release"
        )
    if form != "plain" and not spelling.is_publisher:
        raise CheckpointError(
            f"the checkpoint has {form} {what} under the names of transformers, which this "
            f"version reads under the publisher's (model.llm.*) only"
        )
