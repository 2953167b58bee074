"""Headers of a drafter's tensors, tables that may be the target's, tables that name tokens."""

import pytest
import torch
from drafter_layouts import EXPECTED, Edit, drop, put, read

from inkrt.engines.dspark.flavours import SUPPORTED
from inkrt.engines.dspark.weights import check_trimming, draft_tensors, is_copy_of_target
from inkrt.engines.tiny.drafter import DrafterLayout
from inkrt.errors import CheckpointError, InkError

# Name: layout, change of the headers, message.
HEADERS: dict[str, tuple[DrafterLayout, Edit, str]] = {
    "no Markov table": (
        "deepspec",
        drop("markov_head.markov_w2.weight"),
        "FOLDER: the drafter has no tensor markov_head.markov_w2.weight; a shard is missing or its "
        "configuration belongs to another drafter",
    ),
    "no bias of the head": (
        "specforge",
        drop("logit_head.markov_head.joint_proj.bias"),
        "FOLDER: the drafter has no tensor markov_head.joint_proj.bias; a shard is missing or its "
        "configuration belongs to another drafter",
    ),
    "no confidence": (
        "deepspec",
        drop("confidence_head.proj.weight"),
        "FOLDER: the drafter has no tensor confidence_head.proj.weight; a shard is missing or its "
        "configuration belongs to another drafter",
    ),
    "a layer that is missing": (
        "speculators",
        put(**{"model.layers.7000000000.self_attn.q_proj.weight": (60, 60)}),
        "FOLDER/config.json: num_hidden_layers = 3, but there are tensors of 4",
    ),
    "another rank": (
        "embedded",
        put(**{"dspark.markov_head.markov_w1.weight": (512, 13)}),
        "FOLDER: the drafter's tensor dspark.markov_head.markov_w1.weight has shape [512, 13], "
        "[512, 14] expected from its configuration; one of the two belongs to another drafter",
    ),
    "features of two taps": (
        "speculators",
        put(**{"model.fc.weight": (60, 120)}),
        "FOLDER: the drafter's tensor model.fc.weight has shape [60, 120], [60, 180] expected from "
        "its configuration; one of the two belongs to another drafter",
    ),
    "projection of another vocabulary": (
        "deepspec",
        put(**{"lm_head.weight": (300, 60)}),
        "FOLDER: the drafter's tensor lm_head.weight has shape [300, 60], [512, 60] expected from "
        "its configuration; one of the two belongs to another drafter",
    ),
    "a tensor under two names": (
        "deepspec",
        put(**{"draft_model.norm.weight": (60,)}),
        "FOLDER: tensors norm.weight and draft_model.norm.weight are both the drafter's "
        "norm.weight; remove one of them",
    ),
    "a mask embedding": (
        "deepspec",
        put(mask_embedding=(60,)),
        "FOLDER/config.json: tensor mask_embedding is a mask embedding of its own, which is not "
        "supported; rows without a token must have the embedding of mask_token_id",
    ),
    "a bias": (
        "speculators",
        put(**{"model.layers.0.self_attn.q_proj.bias": (60,)}),
        "FOLDER/config.json: tensor layers.0.self_attn.q_proj.bias is not supported; projections "
        "must have no bias",
    ),
    "stages of DeepSeek-V4": (
        "embedded",
        put(**{"dspark.0.main_proj.weight": (60, 180)}),
        "FOLDER/config.json: the drafter is of the DeepSeek-V4 flavour (tensor "
        f"0.main_proj.weight), which is not supported; {SUPPORTED}",
    ),
    "names of Kimi-K3": (
        "specforge",
        put(**{"context_proj.weight": (60, 180)}),
        "FOLDER/config.json: the drafter is of the Kimi-K3 flavour (tensor context_proj.weight), "
        f"which is not supported; {SUPPORTED}",
    ),
    "norms of Gemma4": (
        "deepspec",
        put(**{"layers.0.pre_feedforward_layernorm.weight": (60,)}),
        "FOLDER/config.json: the drafter is of the Gemma4 flavour (tensor "
        f"layers.0.pre_feedforward_layernorm.weight), which is not supported; {SUPPORTED}",
    ),
    "sinks of one layer": (
        "deepspec",
        put(**{"layers.1.self_attn.sinks": (6,)}),
        "FOLDER/config.json: attention_sink_bias is true, but 1 of 3 layers have sinks; all must "
        "have them or none",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name: str) -> None:
    layout, edit, message = HEADERS[name]
    with pytest.raises(InkError) as caught:
        read(layout, edit_shapes=edit)
    assert str(caught.value) == message


def test_trees_of_a_target() -> None:
    """Of several trees one is the drafter's; noise in front of names is dropped, the rest kept."""
    shapes = {
        "model.llm.norm.weight": (60,),
        "mtp.0.norm.weight": (1,),
        "dspark.model.norm.weight": (2,),
        "model.llm.dspark.logit_head.markov_head.markov_w1.weight": (3,),
        "mtp_dspark.norm.weight": (4,),
    }
    tensors = draft_tensors(shapes, "FOLDER", bundled=True)
    assert tensors.shapes == {"norm.weight": (2,), "markov_head.markov_w1.weight": (3,)}
    assert tensors.stored["norm.weight"] == "dspark.model.norm.weight"
    del shapes["dspark.model.norm.weight"]
    del shapes["model.llm.dspark.logit_head.markov_head.markov_w1.weight"]
    assert draft_tensors(shapes, "FOLDER", bundled=True).shapes == {"norm.weight": (4,)}


def trimming(d2t: torch.Tensor, t2d: torch.Tensor | None) -> str | None:
    try:
        check_trimming(EXPECTED, d2t, t2d, "FOLDER", 490)
    except CheckpointError as error:
        return str(error)
    return None


def test_trimmed_vocabularies() -> None:
    tokens = torch.tensor([0, 5, 6, 489])
    d2t = tokens - torch.arange(4)
    t2d = torch.zeros(512, dtype=torch.bool)
    t2d[tokens] = True
    assert trimming(d2t, t2d) is None
    assert trimming(d2t.int(), None) is None
    assert trimming(tokens, None) == (
        "FOLDER: d2t leads from draft token 3 to token 492, the target has 490; the drafter "
        "belongs to another model"
    )
    assert trimming(torch.tensor([0, -1, 4, 5]), None) == (
        "FOLDER: d2t leads to the same token from several draft tokens; it must hold offsets from "
        "a draft token's id to the target's"
    )
    for wrong in ([7], [5], [7, 8]):
        damaged = t2d.clone()
        damaged[wrong] = ~damaged[wrong]
        assert trimming(d2t, damaged) == (
            "FOLDER: t2d must be true exactly at the 4 tokens that d2t leads to; "
            f"{len(wrong)} of its values differ"
        )
    assert trimming(d2t, t2d[:490]) == (
        "FOLDER: t2d has shape [490], [512] expected: a value for every row of the target's "
        "embedding"
    )
    assert trimming(t2d[:4], None) == "FOLDER: d2t must hold offsets, it holds truth values"


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_copies_are_found_piece_by_piece(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Whatever the pieces, one bit anywhere makes the difference; padding rows do not."""
    monkeypatch.setattr("inkrt.engines.dspark.weights._PIECE", 7 * rows)
    table = torch.randn(50, 7).bfloat16()
    assert is_copy_of_target(table.clone(), table)
    assert is_copy_of_target(table[:41], table)
    assert not is_copy_of_target(table.float(), table)
    assert not is_copy_of_target(table[:, :6], table)
    for row in (0, 2, 3, 49):
        damaged = table.clone()
        damaged.view(torch.int16)[row, 6] ^= 1
        assert not is_copy_of_target(damaged, table)
