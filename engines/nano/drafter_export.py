"""Drafters in checkpoints: embedded in the target's folder, or in other layouts of their own.

    python -m inkrt.engines.nano.drafter_export CHECKPOINT OUT --head gated
    python -m inkrt.engines.nano.drafter_export CHECKPOINT OUT --head rnn --layout speculators

The first copies the checkpoint with another of its heads; the second writes a drafter folder for
`ink-build --draft-checkpoint`.
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inkrt.engines.nano import export
from inkrt.engines.nano.drafter import HEADS, Drafter, DrafterConfig, Head
from inkrt.engines.nano.export import read_tensors, write_json
from inkrt.engines.nano.model import Nano

Layout = Literal["deepspec", "speculators", "specforge"]
PREFIX = "dspark."
LAYOUTS: tuple[Layout, ...] = ("deepspec", "speculators", "specforge")
# Sizes that config.json has under the names of DrafterConfig.
_SIZES = (
    "block_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "markov_rank",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
)


def head_tensors(drafter: Drafter, kind: Head) -> dict[str, Tensor]:
    """The drafter with one head: DeepSpec's names, bfloat16, on the CPU."""
    tensors = {}
    for name, value in drafter.state_dict().items():
        if name.startswith("heads."):
            _, owner, rest = name.split(".", 2)
            if owner != kind:
                continue
            if rest.startswith("confidence."):
                new = rest.replace("confidence.", "confidence_head.proj.")
            else:
                new = "markov_head." + rest
        elif name.startswith("markov_"):
            new = "markov_head." + name
        else:
            new = name
        tensors[new] = value.detach().to("cpu", torch.bfloat16).contiguous()
    return tensors


def embedded_config(config: DrafterConfig, kind: Head) -> dict[str, Any]:
    """Keys that go into the target's config.json.

    `dspark_block_size`, `dspark_markov_rank`, `dspark_markov_head_type`, `dspark_noise_token_id`
    and `dspark_target_layer_ids` (outputs of these layers) are DeepSeek's; the others describe
    the backbone in the same manner.
    """
    return {
        "dspark_block_size": config.block_size,
        "dspark_markov_rank": config.markov_rank,
        "dspark_markov_head_type": kind,
        "dspark_noise_token_id": config.mask_token_id,
        "dspark_target_layer_ids": list(config.target_layer_ids),
        "dspark_num_hidden_layers": config.num_hidden_layers,
        "dspark_num_attention_heads": config.num_attention_heads,
        "dspark_num_key_value_heads": config.num_key_value_heads,
        "dspark_head_dim": config.head_dim,
        "dspark_intermediate_size": config.intermediate_size,
        "dspark_rms_norm_eps": config.rms_norm_eps,
        "dspark_rope_theta": config.rope_theta,
        "dspark_max_position_embeddings": config.max_position_embeddings,
        "dspark_layer_types": ["full_attention"] * config.num_hidden_layers,
        "dspark_sample_from_anchor": True,
        "dspark_is_causal": False,
        "dspark_tap_point": "layer_output",
        "dspark_applies_embed_norm": False,
        "dspark_softcap_place": "before_bias",
        "dspark_enable_confidence_head": True,
        "dspark_confidence_head_with_markov": True,
    }


def embed_in_checkpoint(folder: Path, drafter: Drafter, kind: Head) -> None:
    """Put the drafter with head `kind` into a checkpoint folder, in place of any other.

    The other heads' own tensors go to `heads/KIND.safetensors`, from which `choose_head` takes
    them.
    """
    tensors = {k: v for k, v in read_tensors(folder).items() if not k.startswith(PREFIX)}
    tensors |= {PREFIX + name: value for name, value in head_tensors(drafter, kind).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values = {k: v for k, v in values.items() if not k.startswith("dspark_")}
    write_json(folder / "config.json", values | embedded_config(drafter.config, kind))
    (folder / "heads").mkdir(exist_ok=True)
    for other in drafter.heads:
        own = {k: v for k, v in head_tensors(drafter, _head(other)).items() if _is_own(k)}
        save_file(own, folder / "heads" / f"{other}.safetensors")


def choose_head(folder: Path, out: Path, kind: Head) -> None:
    """Copy a checkpoint folder with another head embedded."""
    shutil.copytree(folder, out)
    tensors = read_tensors(folder)
    tensors = {k: v for k, v in tensors.items() if not _is_own(k.removeprefix(PREFIX))}
    own = load_file(folder / "heads" / f"{kind}.safetensors")
    tensors |= {PREFIX + name: value for name, value in own.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    write_json(out / "config.json", values | {"dspark_markov_head_type": kind})


def read_drafter(folder: Path, dtype: torch.dtype) -> Drafter:
    """The drafter of a checkpoint folder with all its heads, computing in `dtype`."""
    values = json.loads((folder / "config.json").read_text())
    target = export.read_config(folder)
    config = DrafterConfig(
        vocab_size=target.vocab_size,
        mask_token_id=values["dspark_noise_token_id"],
        target_layer_ids=tuple(values["dspark_target_layer_ids"]),
        hidden_size=target.hidden_size,
        **{name: values[f"dspark_{name}"] for name in _SIZES},
    )
    tensors = {
        name.removeprefix(PREFIX): value.float()
        for name, value in read_tensors(folder).items()
        if name.startswith(PREFIX) and not _is_own(name.removeprefix(PREFIX))
    }
    state = {name.removeprefix("markov_head."): value for name, value in tensors.items()}
    for kind in HEADS:
        for name, value in load_file(folder / "heads" / f"{kind}.safetensors").items():
            own = name.removeprefix("markov_head.")
            own = own.replace("confidence_head.proj.", "confidence.")
            state[f"heads.{kind}.{own}"] = value.float()
    drafter = Drafter(config, HEADS, dtype)
    drafter.load_state_dict(state)
    return drafter


def as_layout(
    drafter: Drafter, kind: Head, target: Nano, layout: Layout
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a drafter folder of its own, in one of three ecosystems' layouts.

    DeepSpec has copies of the target's embedding and projection; the others share them.
    """
    config, tensors = drafter.config, head_tensors(drafter, kind)
    own: dict[str, Any] = asdict(config) | {"target_layer_ids": list(config.target_layer_ids)}
    dspark = {
        name: own.pop(name)
        for name in ("block_size", "mask_token_id", "markov_rank", "target_layer_ids")
    }
    dspark |= {
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tap_point": "layer_output",
        "applies_embed_norm": False,
    }
    layers = config.num_hidden_layers
    backbone = own | {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "final_logit_softcapping": target.config.final_logit_softcapping,
        "layer_types": ["full_attention"] * layers,
    }
    if layout == "deepspec":
        for name, weight in (("embed_tokens", target.embed), ("lm_head", target.unembed)):
            tensors[f"{name}.weight"] = weight.weight.detach().to("cpu", torch.bfloat16)
        many = {"num_target_layers": target.config.num_hidden_layers, "num_anchors": 512}
        return {"architectures": ["Qwen3DSparkModel"], **backbone, **dspark, **many}, tensors
    if layout == "specforge":
        block = {"block_size": dspark.pop("block_size")}
        nested = dspark | {"attention_mode": "gqa", "projector_type": "dspark"}
        nested["confidence_head_alpha"] = 1.0
        block["num_target_layers"] = target.config.num_hidden_layers
        return {
            "architectures": ["DSparkDraftModel"],
            **backbone,
            **block,
            "dflash_config": nested,
        }, tensors
    # This layout names what enters a layer, the others what leaves it.
    entering = [layer + 1 for layer in dspark.pop("target_layer_ids")]
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": backbone,
        "aux_hidden_state_layer_ids": entering,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "sample_from_anchor": True,
        "use_aux_hidden_state": True,
        **dspark,
    }, tensors


def _is_own(name: str) -> bool:
    """Whether a tensor differs between heads."""
    return name.startswith(("confidence_head.", "markov_head.gate_", "markov_head.joint_"))


def _head(name: str) -> Head:
    for kind in HEADS:
        if kind == name:
            return kind
    raise ValueError(f"no head is called {name!r}")


def main() -> None:
    """Write what the command line says."""
    parser = argparse.ArgumentParser(description="Another head or layout of a nano drafter.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--head", choices=HEADS, default="rnn")
    parser.add_argument("--layout", choices=("embedded", *LAYOUTS), default="embedded")
    options = parser.parse_args()
    if options.layout == "embedded":
        choose_head(options.checkpoint, options.out, options.head)
        return
    target = export.read_model(options.checkpoint, torch.float32)
    drafter = read_drafter(options.checkpoint, torch.float32)
    values, tensors = as_layout(drafter, options.head, target, options.layout)
    options.out.mkdir(parents=True)
    save_file(tensors, options.out / "model.safetensors", metadata={"format": "pt"})
    write_json(options.out / "config.json", values)


if __name__ == "__main__":
    main()
