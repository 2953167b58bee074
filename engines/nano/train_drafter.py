"""Trains the DSpark drafters of a trained `inkling2-nano` and puts them into its checkpoint.

    python -m inkrt.engines.nano.train_drafter DATA CHECKPOINT --minutes 5

All heads train at once on one backbone, from one forward of the frozen target: teacher forcing,
0.1 cross entropy + 0.9 L1 distance + binary cross entropy of the confidence, rows weighted
exp(-k/4). Reports acceptance on held-out documents at temperature 1 along their own tokens.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from inkrt.engines.nano import corpus, export
from inkrt.engines.nano.corpus import Packed, say
from inkrt.engines.nano.drafter import (
    HEADS,
    Blocks,
    Drafter,
    Head,
    drafter_config,
)
from inkrt.engines.nano.drafter_export import embed_in_checkpoint
from inkrt.engines.nano.model import Nano
from inkrt.engines.nano.optimizer import Muon, Schedule
from inkrt.engines.nano.parts import Rows
from inkrt.engines.nano.train import heldout

LOG_EVERY = 100
NUM_BINS = 10  # of the calibration error


def main() -> None:
    """Train as the command line says."""
    options = _options()
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = export.read_model(options.checkpoint, dtype).to(device).eval().requires_grad_(False)
    heads: tuple[Head, ...] = tuple(options.heads)
    drafter = Drafter(drafter_config(target), heads, dtype).to(device)
    size = sum(parameter.numel() for parameter in drafter.parameters())
    say(f"{size} parameters, {drafter.config}")
    documents = corpus.read_documents(options.data / "train.npz")
    packed = corpus.pack(documents, options.length, options.seed + 1).to(device)
    begun = time.perf_counter()
    steps = train(target, drafter, packed, options)
    measured: dict[str, Any] = {
        "parameters": size,
        "seconds": round(time.perf_counter() - begun),
        "steps": steps,
        "batch": options.batch,
        "anchors": options.anchors,
        "length": options.length,
        "seed": options.seed,
        "heldout": {
            kind: report(target, drafter, held.to(device), kind, options)
            for kind, held in heldout(options.data, options.length).items()
        },
    }
    embed_in_checkpoint(options.checkpoint, drafter, options.embed)
    export.add_report(options.checkpoint, "drafter", measured)
    say(f"head {options.embed} is in {options.checkpoint}")


def sample_blocks(batch: Packed, block: int, num: int, generator: torch.Generator) -> Blocks:
    """Random anchors: supervised tokens followed by another one.

    A sequence with fewer of them than `num` repeats some; one with none has blocks that do not
    count.
    """
    same = batch.segment[:, 1:] == batch.segment[:, :-1]
    predicted = functional.pad(batch.loss[:, 1:] & same, (0, 1))
    usable = predicted & (batch.loss | (batch.position == 0))
    weight = usable.float() + 1e-9
    anchor = torch.multinomial(weight, num, replacement=True, generator=generator)
    steps = torch.arange(block, device=anchor.device)
    places = anchor[..., None] + steps
    inside = places < batch.tokens.shape[1] - 1
    places = places.clamp_max(batch.tokens.shape[1] - 1)
    rows = torch.arange(len(anchor), device=anchor.device)[:, None, None]
    counts = (predicted[rows, places] & inside).cumprod(-1).bool()
    return Blocks(anchor, counts & usable.gather(1, anchor)[..., None])


class Step:
    """The target's part of one batch: taps, and its logits at the rows of the blocks."""

    def __init__(self, target: Nano, drafter: Drafter, batch: Packed, blocks: Blocks) -> None:
        last = batch.tokens.shape[1] - 1
        steps = torch.arange(drafter.config.block_size, device=batch.tokens.device)
        places = (blocks.anchor[..., None] + steps).clamp_max(last)
        rows = torch.arange(len(places), device=places.device)[:, None, None]
        with torch.no_grad():
            where = Rows(batch.position, batch.segment)
            output = target(batch.tokens, where, drafter.config.target_layer_ids)
            self.target_probs = target.logits(output.final[rows, places]).softmax(-1)
        self.taps = output.taps
        self.previous = batch.tokens[rows, places].long()
        self.next = batch.tokens[rows, (places + 1).clamp_max(last)].long()
        self.hidden = drafter(
            target, self.taps, batch.tokens.long(), batch.position, batch.segment, blocks.anchor
        )


def head_losses(
    target: Nano, drafter: Drafter, step: Step, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of every row [B, A, G], the chance to accept it, and the confidence's logit."""
    logits, confidence = drafter.draft(kind, target, step.hidden, step.previous)
    log_q = logits.log_softmax(-1)
    distance = (log_q.exp() - step.target_probs).abs().sum(-1)
    entropy = -log_q.gather(-1, step.next[..., None]).squeeze(-1)
    accept = (1 - 0.5 * distance).clamp(0, 1)
    binary = functional.binary_cross_entropy_with_logits(
        confidence, accept.detach(), reduction="none"
    )
    return 0.1 * entropy + 0.9 * distance + binary, accept, confidence


def train(target: Nano, drafter: Drafter, packed: Packed, options: argparse.Namespace) -> int:
    """Train in place by `options.minutes` or `options.steps`; gives the number of steps."""
    device = packed.tokens.device
    named = list(drafter.named_parameters())
    matrices = [p for name, p in named if name.startswith("layers.") and p.ndim == 2]
    matrices.append(drafter.fc.weight)
    taken = {id(parameter) for parameter in matrices}
    rest = [parameter for _, parameter in named if id(parameter) not in taken]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, options.muon_rate, 0.01),
        torch.optim.AdamW(
            rest, lr=options.adam_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        ),
    ]
    schedule = Schedule(optimizers)
    draws = torch.Generator(device).manual_seed(options.seed)
    decay = torch.exp(-torch.arange(drafter.config.block_size, device=device) / 4)
    order = torch.empty(0, dtype=torch.int64, device=device)
    started = logged = time.perf_counter()
    step, progress = 0, 0.0
    while progress < 1.0:
        while len(order) < options.batch:
            more = torch.randperm(len(packed.tokens), generator=draws, device=device)
            order = torch.cat([order, more])
        batch = packed.pick(order[: options.batch])
        order = order[options.batch :]
        blocks = sample_blocks(batch, drafter.config.block_size, options.anchors, draws)
        schedule.set(progress)
        weight = blocks.counts * decay
        data = Step(target, drafter, batch, blocks)
        total = torch.zeros((), device=device)
        means = {}
        for kind in drafter.heads:
            losses, accept, _ = head_losses(target, drafter, data, kind)
            total = total + (losses * weight).sum() / weight.sum().clamp_min(1e-6)
            mean = (accept.detach() * blocks.counts).sum((0, 1)) / blocks.counts.sum((0, 1))
            means[kind] = 1 + mean.cumprod(0).sum()
        torch.autograd.backward(total)
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # the clock must not run ahead of the device
        now = time.perf_counter()
        progress = step / options.steps if options.steps else (now - started) / options.minutes / 60
        if step % LOG_EVERY == 0 or step == 1 or progress >= 1.0:
            lengths = " ".join(f"{kind} {length.item():.2f}" for kind, length in means.items())
            say(
                f"step {step} {now - started:.0f} s loss {total.item():.4f} "
                f"about accepted: {lengths} ({now - logged:.1f} s)",
            )
            logged = now
    return step


@torch.no_grad()
def report(
    target: Nano, drafter: Drafter, held: Packed, name: str, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Print and return acceptance by position and calibration of every head.

    Only blocks with all rows inside supervised text count. The chance to accept row k given the
    rows before is 1 - TV of draft and target after the document's own tokens; survival is the
    product along a block; the length is 1 plus the mean of its sum.
    """
    draws = torch.Generator(held.tokens.device).manual_seed(1)
    accepts: dict[str, list[Tensor]] = {kind: [] for kind in drafter.heads}
    confidences: dict[str, list[Tensor]] = {kind: [] for kind in drafter.heads}
    numbers = torch.arange(len(held.tokens), device=held.tokens.device)
    for rows in torch.split(numbers, options.batch):
        batch = held.pick(rows)
        blocks = sample_blocks(batch, drafter.config.block_size, options.anchors, draws)
        whole = blocks.counts.all(-1)
        data = Step(target, drafter, batch, blocks)
        for kind in drafter.heads:
            _, accept, confidence = head_losses(target, drafter, data, kind)
            accepts[kind].append(accept[whole])
            confidences[kind].append(confidence[whole])
    measured: dict[str, dict[str, Any]] = {}
    for kind in drafter.heads:
        accept, logits = torch.cat(accepts[kind]), torch.cat(confidences[kind])
        survival = accept.cumprod(-1)
        binary = functional.binary_cross_entropy_with_logits(logits, accept).item()
        measured[kind] = {
            "blocks": len(accept),
            "length": round((1 + survival.sum(-1)).mean().item(), 3),
            "conditional": _rounded(accept.mean(0)),
            "unconditional": _rounded(survival.mean(0)),
            "conditional_given_survival": _rounded(_given_survival(accept, survival)),
            "confidence_bce": round(binary, 4),
            "confidence_ece": round(calibration_error(logits.sigmoid(), accept), 4),
        }
        say(f"held-out {name}, head {kind}: {measured[kind]}")
    return measured


def calibration_error(predicted: Tensor, truth: Tensor) -> float:
    """Expected distance of prediction and truth over bins of the prediction."""
    predicted, truth = predicted.flatten(), truth.flatten()
    bins = (predicted * NUM_BINS).long().clamp_max(NUM_BINS - 1)
    gaps = torch.zeros(NUM_BINS, device=predicted.device, dtype=predicted.dtype)
    gaps.index_add_(0, bins, predicted - truth)
    return (gaps.abs().sum() / len(predicted)).item()


def _given_survival(accept: Tensor, survival: Tensor) -> Tensor:
    reached = functional.pad(survival[:, :-1], (1, 0), value=1.0)
    return (accept * reached).sum(0) / reached.sum(0)


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the drafters of inkling2-nano.")
    parser.add_argument("data", type=Path, help="the folder the target was trained on")
    parser.add_argument("checkpoint", type=Path, help="the target's folder; it is changed")
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--minutes", type=float)
    amount.add_argument("--steps", type=int)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--embed", choices=HEADS, default="rnn", help="the checkpoint's own head")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--anchors", type=int, default=128, help="blocks a sequence")
    parser.add_argument("--length", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
