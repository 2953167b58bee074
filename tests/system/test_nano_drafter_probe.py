"""Settings that no checkpoint can prove: the trained drafter accepts most with those it trained by.

A tap that is off by one, another tap point, normed embeddings or blocks of the other layout crash
nothing and change no token; they are only seen in acceptance. Each variant is an engine of the same
tensors. Drafts are greedy and so is the text, which the engine without a mistake has written. As
long as drafts are those of the text, their rows have the text as context, and the chance that a
draft of temperature 1 is accepted there is what the distributions of both have in common.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling
from inkrt.runtime.sampling import probabilities
from inkrt.runtime.tokenizer import Tokenizer

GREEDY, WARM = Sampling(), Sampling(temperature=1.0)
MAX_SEQ_LEN = 640
NUM_TOKENS = 32  # written behind each prompt at most
# Prompts, what follows them, and the distributions [n, V] behind each of those tokens.
Written = list[tuple[list[int], list[int], NDArray[np.float64]]]

pytestmark = pytest.mark.slow


# Layers by which each tap is shifted; behind the last one's there is none.
SHIFTS = {
    "all taps one layer before": (-1, -1, -1),
    "a tap one layer before": (-1, 0, 0),
    "a tap one layer behind": (1, 0, 0),
}
# With the row of the anchor, which predicts nothing, blocks of as many drafts.
OTHERS: dict[str, dict[str, Any]] = {
    "taps before the convolution": {"dspark_tap_point": "pre_mlp_conv"},
    "normed embeddings": {"dspark_applies_embed_norm": True},
    "fill-in": {"dspark_sample_from_anchor": False, "dspark_block_size": 8},
}


def make_engine(checkpoint: Path, base: Path, changes: dict[str, Any]) -> Path:
    base.mkdir()
    for path in checkpoint.iterdir():
        (base / path.name).symlink_to(path.resolve())
    config = json.loads((checkpoint / "config.json").read_text())
    (base / "config.json").unlink()
    (base / "config.json").write_text(json.dumps(config | changes))
    options = BuildOptions(max_seq_len=MAX_SEQ_LEN, max_verify_tokens=1)
    build_engine(base, base / "engine", options)
    return base / "engine"


def write(folder: Path) -> Written:
    """What the engine says behind the prompts."""
    tokenizer = Tokenizer(folder / "tokenizer.json")
    given = json.loads((Path(__file__).parent / "nano_prompts.json").read_text())
    texts = list(given["texts"].values())
    texts += [prompt["text"] for prompt in given["prompts"] if prompt["kind"] != "text"]
    written = []
    with Engine.open(folder) as engine:
        for text in texts:
            prompt = tokenizer.encode(text, parse_special=True)[:400]
            with engine.session() as session:
                more = [int(session.prefill(prompt, GREEDY).tokens[-1])]
                rows = []
                while len(more) < NUM_TOKENS and more[-1] not in engine.config.model.eos_token_ids:
                    output = session.step(more[-1:], GREEDY)
                    rows.append(probabilities(output.logits[0], WARM))
                    more.append(int(output.tokens[0]))
            written.append((prompt, more, np.array(rows)))
    return written


def acceptance(folder: Path, written: Written) -> tuple[NDArray[np.float64], float]:
    """Expected drafts in a row behind each token of what was written; mean of right ones."""
    expected, right = [], []
    with Engine.open(folder) as engine:
        for prompt, more, rows in written:
            with engine.session() as session:
                session.prefill(prompt, GREEDY, wants_logits=False)
                for place, token in enumerate(more[:-1]):
                    output = session.draft(token, GREEDY, coupled=True, wants_logits=True)
                    common = np.minimum(
                        probabilities(output.logits[: len(rows) - place], WARM),
                        rows[place : place + len(output.tokens)],
                    ).sum(-1)
                    wanted = np.array(more[place + 1 :][: len(common)])
                    same = int((output.tokens[: len(wanted)] == wanted).cumprod().sum())
                    right.append(same)
                    expected.append(common.cumprod()[: same + 1].sum())
                    session.decode(token, GREEDY)
    return np.array(expected), float(np.mean(right))


@pytest.fixture(scope="module")
def trained(
    nano_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Written, tuple[NDArray[np.float64], float]]:
    folder = make_engine(nano_checkpoint, tmp_path_factory.mktemp("nano") / "right", {})
    written = write(folder)
    return written, acceptance(folder, written)


@pytest.mark.parametrize("name", [*SHIFTS, *OTHERS])
def test_a_wrong_setting_accepts_clearly_less(
    nano_checkpoint: Path, trained: Any, tmp_path: Path, name: str
) -> None:
    written, (expected, right) = trained
    config = json.loads((nano_checkpoint / "config.json").read_text())
    assert config["dspark_block_size"] == 7
    taps = config["dspark_target_layer_ids"]
    changes = OTHERS.get(name) or {
        "dspark_target_layer_ids": [a + b for a, b in zip(taps, SHIFTS[name], strict=True)]
    }
    folder = make_engine(nano_checkpoint, tmp_path / "wrong", changes)
    less, fewer = acceptance(folder, written)
    loss = expected - less
    error = loss.std() / len(loss) ** 0.5
    figures = (
        f"{expected.mean():.3f} and {less.mean():.3f} +- {error:.3f}; {right:.2f}, {fewer:.2f}"
    )
    # Every draft layer norms its input, so that normed embeddings change little.
    assert loss.mean() > (2 if name == "normed embeddings" else 4) * error, figures
    assert fewer < right, figures
