"""Checkpoint folders of `inkling2-nano`: config.json, model.safetensors, tokenizer, report.json.

The model class is the text-only one (`inkling2_text`); tensors have the publisher's names. Matrices
are bfloat16; what the publisher keeps in float32 (router, residual queries, static convolutions) is
float32.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from inkrt.engines.nano.model import Nano
from inkrt.engines.nano.parts import NanoConfig

PREFIX = "model.llm."
REPORT_NAME = "report.json"
_FLOAT32_ENDS = ("mlp.gate.weight", "mlp.gate.bias", "sconv.weight")
_DATA_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "data.json",
)


def config_values(config: NanoConfig) -> dict[str, Any]:
    """The content of config.json."""
    layers = range(config.num_hidden_layers)
    return {
        "architectures": ["Inkling2ForCausalLM"],
        "model_type": "inkling2_text",
        "dtype": "bfloat16",
        **dataclasses.asdict(config),
        "swa_num_attention_heads": config.num_attention_heads,
        "swa_num_key_value_heads": config.num_key_value_heads,
        "swa_head_dim": config.head_dim,
        "layer_types": ["hybrid" if config.is_full(i) else "hybrid_sliding" for i in layers],
        "scoring_func": "sigmoid",
        "hidden_act": "silu",
        "number_of_conv_states": 4,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def published_tensors(model: Nano, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Every tensor by the publisher's name, on the CPU."""
    tensors = {}
    for name, value in model.state_dict().items():
        is_float32 = name.startswith("attn_res.") or name.endswith(_FLOAT32_ENDS)
        kept = torch.float32 if is_float32 else dtype
        tensors[PREFIX + name] = value.detach().to("cpu", kept).contiguous()
    return tensors


def write_checkpoint(model: Nano, out: Path, data: Path) -> None:
    """Write the folder `out`; tokenizer and sources come from the data folder."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(published_tensors(model), out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", config_values(model.config))
    generation = {"do_sample": True, "temperature": 1.0, "eos_token_id": model.config.eos_token_id}
    write_json(out / "generation_config.json", generation)
    for name in _DATA_FILES:
        if (data / name).exists():
            shutil.copyfile(data / name, out / name)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write `values` as indented JSON."""
    path.write_text(json.dumps(values, indent=2) + "\n")


def add_report(folder: Path, section: str, values: dict[str, Any]) -> None:
    """Put what a script measured into report.json of a checkpoint folder, from which `card` reads.

    A section of the same name is replaced.
    """
    path = folder / REPORT_NAME
    report = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, report | {section: values})


def read_config(folder: Path) -> NanoConfig:
    """The configuration of a folder that `write_checkpoint` wrote."""
    values = json.loads((folder / "config.json").read_text())
    names = [field.name for field in dataclasses.fields(NanoConfig)]
    return NanoConfig(**{name: values[name] for name in names})


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_model(folder: Path, dtype: torch.dtype) -> Nano:
    """The model of a checkpoint folder, computing in `dtype`."""
    model = Nano(read_config(folder), dtype)
    tensors = {
        name.removeprefix(PREFIX): value.float()
        for name, value in read_tensors(folder).items()
        if name.startswith(PREFIX)
    }
    model.load_state_dict(tensors)
    return model
