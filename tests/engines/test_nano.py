"""The training model of inkling2-nano against transformers, and the scripts around it."""

import dataclasses

import pytest
import torch

from inkrt.engines.nano import export
from inkrt.engines.nano.model import Nano, NanoConfig, Rows, shear

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
                parameter += 0.4 * torch.randn(parameter.shape)
        for layer in model.layers:
            layer.mlp.gate.bias.copy_(0.2 * torch.randn(SMALL.n_routed_experts))
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
    trained.logits(trained(tokens).final).square().mean().backward()
    for name, parameter in trained.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
