"""The training model of inkling2-nano against transformers, and the scripts around it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from inkrt.engines.dspark.config import DraftLayerConfig
from inkrt.engines.dspark.layouts import read_bundled, read_folder
from inkrt.engines.dspark.weights import draft_tensors
from inkrt.engines.inkling2.config import draft_target, parse_config
from inkrt.engines.inkling2.weights import weight_sources
from inkrt.engines.interface import Sharding
from inkrt.engines.nano import export
from inkrt.engines.nano.card import render
from inkrt.engines.nano.corpus import Documents, pack
from inkrt.engines.nano.drafter import HEADS, Drafter, Head, drafter_config
from inkrt.engines.nano.drafter_export import (
    Layout,
    as_layout,
    choose_head,
    embed_in_checkpoint,
    head_tensors,
    read_drafter,
)
from inkrt.engines.nano.evaluate import solved
from inkrt.engines.nano.model import Nano
from inkrt.engines.nano.parts import NanoConfig, Rows, plain_rows, shear

SMALL = NanoConfig(
    vocab_size=96,
    unpadded_vocab_size=90,
    eos_token_id=7,
    hidden_size=48,
    num_hidden_layers=13,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    sliding_window_size=9,
    d_rel=4,
    rel_extent=14,
    log_scaling_n_floor=11,
    moe_intermediate_size=20,
    n_routed_experts=8,
    num_experts_per_tok=3,
    qk_l2_clip_threshold=2.5,
    rel_l2_clip_threshold=0.7,
)


@pytest.fixture(scope="module")
def model() -> Nano:
    """A small model with every parameter away from its neutral value."""
    torch.manual_seed(3)
    model = Nano(SMALL)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "attn_res" in name or "sink" in name or "rel_logits" in name:
                parameter.add_(0.4 * torch.randn(parameter.shape))
        for gate in model.gates():
            gate.bias.copy_(0.2 * torch.randn(SMALL.n_routed_experts))
    return model.eval()


@pytest.mark.parametrize(("queries", "keys", "first", "extent"), [(7, 7, 0, 3), (5, 10, 5, 5)])
def test_shear_moves_distances_to_keys(queries: int, keys: int, first: int, extent: int) -> None:
    """Against the definition, element by element."""
    rel = torch.randn(2, queries, extent)
    bias = shear(rel, keys, first)
    for query in range(queries):
        for key in range(keys):
            distance = query + first - key
            expected = rel[:, query, distance] if 0 <= distance < extent else torch.zeros(2)
            assert torch.equal(bias[:, query, key], expected)


@pytest.mark.parametrize("length", [1, 9, 41])
def test_exported_model_is_the_same_in_transformers(
    model: Nano, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Float32 logits, up to lengths beyond window, extent and the start of log scaling."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("nano")
    export.write_checkpoint(model, folder, folder)
    reference = transformers.Inkling2ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    rounded = export.read_model(folder, torch.float32).eval()
    tokens = torch.randint(0, SMALL.unpadded_vocab_size, (2, length))
    with torch.no_grad():
        expected = reference(tokens).logits
        logits = rounded.logits(rounded(tokens).final)
    assert logits.shape == expected.shape
    error = (logits - expected).norm() / expected.norm()
    assert error < 1e-4, f"relative error {error:.1e}"


def test_packed_documents_do_not_see_each_other(model: Nano) -> None:
    """Two documents in one sequence give what each gives alone."""
    first, second = torch.randint(0, 90, (1, 17)), torch.randint(0, 90, (1, 23))
    both = torch.cat([first, second], dim=1)
    position = torch.cat([torch.arange(17), torch.arange(23)])[None]
    segment = torch.cat([torch.zeros(17), torch.ones(23)])[None].int()
    with torch.no_grad():
        packed = model(both, Rows(position, segment)).final
        alone = torch.cat([model(first).final, model(second).final], dim=1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)


def test_every_parameter_learns(model: Nano) -> None:
    """A loss reaches all parameters but the unused rows of the embedding."""
    trained = Nano(dataclasses.replace(SMALL, num_hidden_layers=7))
    trained.load_state_dict(model.state_dict(), strict=False)
    tokens = torch.randint(0, 90, (2, 30))
    torch.autograd.backward(trained.logits(trained(tokens).final).square().mean())
    for name, parameter in trained.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_every_tensor_has_a_place_in_our_engine(model: Nano) -> None:
    """The engine's weight map finds what it reads under the names that are exported."""
    tensors = export.published_tensors(model)
    config = parse_config(export.config_values(SMALL))
    sources = weight_sources(config, frozenset(tensors), 0, Sharding(1, "width"))
    read = {part.name for source in sources.values() for part in source.parts}
    assert read == set(tensors)


@pytest.fixture(scope="module")
def drafter(model: Nano) -> Drafter:
    """Untrained drafter of the small model, its second Markov table not zero."""
    torch.manual_seed(5)
    drafter = Drafter(drafter_config(model), HEADS).eval()
    torch.nn.init.normal_(drafter.markov_w2.weight, std=0.3)
    return drafter.requires_grad_(False)


def test_blocks_depend_on_nothing_behind_the_anchor(model: Nano, drafter: Drafter) -> None:
    """All blocks of a sequence at once give what one block with its own context gives."""
    tokens = torch.randint(0, 90, (1, 40))
    rows = plain_rows(tokens)
    anchors = torch.tensor([[0, 1, 13, 30]])
    with torch.no_grad():
        taps = model(tokens, taps=drafter.config.target_layer_ids).taps
    hidden = drafter(model, taps, tokens, rows.position, rows.segment, anchors)
    for number, anchor in enumerate(anchors[0].tolist()):
        short = slice(0, anchor + 1)
        alone = drafter(
            model,
            [tap[:, short] for tap in taps],
            tokens[:, short],
            rows.position[:, short],
            rows.segment[:, short],
            anchors[:, number : number + 1],
        )
        torch.testing.assert_close(alone[:, 0], hidden[:, number])
        spoiled = [tap.clone() for tap in taps]
        for tap in spoiled:
            tap[:, anchor:] = 100.0
        same = drafter(
            model, spoiled, tokens, rows.position, rows.segment, anchors[:, number : number + 1]
        )
        torch.testing.assert_close(same[:, 0], hidden[:, number])


def test_rnn_head_is_the_recurrence_of_its_exported_tensors(model: Nano, drafter: Drafter) -> None:
    """Logits and confidence, recomputed from a drafter folder's tensors for one block."""
    tensors = {name: value.double() for name, value in head_tensors(drafter, "rnn").items()}
    rounded = Drafter(drafter.config, ("rnn",))
    names = {"markov_head.joint_proj": "heads.rnn.joint_proj"}
    names |= {"confidence_head.proj": "heads.rnn.confidence", "markov_head.markov": "markov"}
    state = {}
    for name, value in tensors.items():
        new = name
        for old, replacement in names.items():
            new = new.replace(old, replacement)
        state[new] = value.float()
    rounded.load_state_dict(state)
    hidden, previous = torch.randn(7, 48), torch.randint(0, 90, (7,))
    logits, confidence = rounded.draft("rnn", model, hidden, previous)
    base = 30 * torch.tanh(hidden.double() @ model.unembed.weight[:90].double().T / 30)
    joint, bias = (tensors[f"markov_head.joint_proj.{x}"] for x in ("weight", "bias"))
    rank = drafter.config.markov_rank
    memory = torch.zeros(rank).double()
    for row in range(7):
        e, h = tensors["markov_head.markov_w1.weight"][previous[row]], hidden[row].double()
        u = joint @ torch.cat([memory, e, h]) + bias
        gate = u[:rank].sigmoid()
        memory = gate * memory + (1 - gate) * u[rank : 2 * rank].tanh()
        expected = base[row] + tensors["markov_head.markov_w2.weight"][:90] @ u[2 * rank :].tanh()
        torch.testing.assert_close(logits[row].double(), expected, atol=1e-4, rtol=1e-4)
        weight, offset = (tensors[f"confidence_head.proj.{x}"] for x in ("weight", "bias"))
        sure = (weight @ torch.cat([h, e]) + offset)[0]
        torch.testing.assert_close(confidence[row].double(), sure, atol=1e-4, rtol=1e-4)


def test_heads_of_a_checkpoint_can_be_exchanged(
    model: Nano, drafter: Drafter, tmp_path: Path
) -> None:
    """Each head comes back whole; the target's tensors stay."""
    folder = tmp_path / "rnn"
    export.write_checkpoint(model, folder, tmp_path)
    embed_in_checkpoint(folder, drafter, "rnn")
    for kind in HEADS:
        choose_head(folder, tmp_path / f"as-{kind}", kind)
        tensors = export.read_tensors(tmp_path / f"as-{kind}")
        expected = {f"dspark.{k}": v for k, v in head_tensors(drafter, kind).items()}
        expected |= export.published_tensors(model)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("embedded", HEADS)
def test_a_drafter_is_read_back_with_all_heads(
    model: Nano, drafter: Drafter, embedded: Head, tmp_path: Path
) -> None:
    """Whichever head the checkpoint has; so other layouts can be written from it."""
    export.write_checkpoint(model, tmp_path, tmp_path)
    embed_in_checkpoint(tmp_path, drafter, embedded)
    again = read_drafter(tmp_path, torch.float32)
    assert again.config == drafter.config
    for kind in HEADS:
        ours, theirs = head_tensors(again, kind), head_tensors(drafter, kind)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_card_tells_what_was_measured(model: Nano, drafter: Drafter, tmp_path: Path) -> None:
    """Every script's section of the report; a section measured again replaces the old one."""
    (tmp_path / "data.json").write_text(
        json.dumps(
            {
                "vocab_size": 90,
                "train_chat_tokens": 1234567,
                "sources": [
                    {
                        "what": "a book",
                        "package": "book",
                        "version": "1",
                        "licence": "MIT",
                        "train_tokens": 5678,
                    }
                ],
            }
        )
    )
    folder = tmp_path / "checkpoint"
    export.write_checkpoint(model, folder, tmp_path)
    embed_in_checkpoint(folder, drafter, "gated")
    run = {"seconds": 30, "steps": 500, "batch": 8, "length": 1000, "device": "an H200"}
    heldout = {"text": {"perplexity": 7.891, "tokens": 4321}}
    export.add_report(folder, "training", {**run, "parameters": 10_200_000, "heldout": {}})
    export.add_report(folder, "training", {**run, "parameters": 10_300_000, "heldout": heldout})
    head = {"length": 3.21, "conditional": [0.75] * 7}
    sizes = {"parameters": 1_800_000, "anchors": 64}
    export.add_report(folder, "drafter", {**run, **sizes, "heldout": {"chat": {"rnn": head}}})
    export.add_report(folder, "tasks", {"passkey at 64": [15, 16]})
    files = (folder / name for name in ("config.json", "data.json", "report.json"))
    text = render(*(json.loads(file.read_text()) for file in files))
    for line in (
        "| perplexity, text | 7.89 over 4,321 tokens |",
        "| solved: passkey at 64 | 15 of 16 |",
        "| chat | rnn | 3.21 | 0.75 | 0.75 | 0.75 | 0.75 | 0.75 | 0.75 | 0.75 |",
        "| a book | `book` 1 | MIT | 5,678 |",
    ):
        assert line in text.splitlines()
    for words in ("10.3 M", "1.8 M", "4 M tokens", "0.3 M blocks", "1,234,567", "`gated`"):
        assert words in " ".join(text.split())


def test_layouts_name_the_same_taps(model: Nano, drafter: Drafter) -> None:
    """Outputs of layers in two layouts, what enters the next layer in the third."""
    deepspec, _ = as_layout(drafter, "gated", model, "deepspec")
    specforge, _ = as_layout(drafter, "gated", model, "specforge")
    speculators, _ = as_layout(drafter, "gated", model, "speculators")
    assert deepspec["target_layer_ids"] == [5, 11, 12]
    assert specforge["dflash_config"]["target_layer_ids"] == [5, 11, 12]
    assert speculators["aux_hidden_state_layer_ids"] == [6, 12, 13]


@pytest.mark.parametrize("kind", HEADS)
def test_layouts_are_read_as_the_same_drafter(
    model: Nano, drafter: Drafter, kind: Head, tmp_path: Path
) -> None:
    """Settings and tensors of all four come to what was trained."""
    folder = tmp_path / "embedded"
    export.write_checkpoint(model, folder, tmp_path)
    embed_in_checkpoint(folder, drafter, kind)
    values = json.loads((folder / "config.json").read_text())
    target = draft_target(parse_config(values))
    shapes = {k: tuple(v.shape) for k, v in export.read_tensors(folder).items()}
    embedded = read_bundled(values, draft_tensors(shapes, "", bundled=True), target, "")
    config = embedded.config
    assert config.layers == (DraftLayerConfig(is_causal=False, window=None),) * 3
    assert (config.taps, config.tap_point) == ((5, 11, 12), "layer_output")
    assert (config.softcap_place, config.applies_embed_norm) == ("before_bias", False)
    assert (config.head, config.markov_rank, config.mask_token_id) == (kind, 64, 90)
    assert (config.anchor_first, config.block_size) == (True, 7)
    # Nothing but the way of counting had to be told: the keys say it all.
    assert len(embedded.decisions) == 1
    layouts: tuple[Layout, ...] = ("deepspec", "speculators", "specforge")
    for layout in layouts:
        values, tensors = as_layout(drafter, kind, model, layout)
        shapes = {k: tuple(v.shape) for k, v in tensors.items()}
        found = read_folder(values, draft_tensors(shapes, "", bundled=False), target, "")
        has_copies = layout == "deepspec"
        assert found.layout == layout
        assert found.config == dataclasses.replace(
            config, has_own_embedding=has_copies, has_own_unembed=has_copies
        )


def test_packing_keeps_every_token_once() -> None:
    """Documents shorter and longer than a sequence; no first token is to be predicted."""
    sizes = [3, 16, 1, 40, 7, 9, 12]
    starts = np.append(0, np.cumsum(sizes))[:-1]
    tokens = np.arange(sum(sizes), dtype=np.uint16)
    packed = pack(Documents(tokens, np.ones(len(tokens), np.uint8), starts), 16, 1)
    used = packed.segment >= 0
    assert sorted(packed.tokens[used].tolist()) == tokens.tolist()
    assert not packed.loss[packed.position == 0].any()
    assert not packed.loss[~used].any()


def test_a_task_is_solved_only_if_all_of_its_reply_is(model: Nano) -> None:
    """Against decoding token by token."""
    prompt = [5, 17, 3, 80]
    text = list(prompt)
    with torch.no_grad():
        for _ in range(6):
            text.append(int(model.logits(model(torch.tensor([text])).final)[0, -1].argmax()))
    right = {"prompt": prompt, "reply": text[4:]}
    wrong = {"prompt": prompt, "reply": [*text[4:-1], (text[-1] + 1) % 90]}
    longer = {"prompt": [9] * 30, "reply": [1]}
    assert solved(model, [right, wrong, longer], 3)[:2] == [True, False]
