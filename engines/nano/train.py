"""Trains `inkling2-nano` and writes its checkpoint.

    python -m inkrt.engines.nano.train DATA OUT --minutes 8 --compile
    python -m inkrt.engines.nano.train DATA OUT --steps 3 --batch 2 --length 128    (smoke test)

With `--minutes` the learning rate follows the clock; the number of steps it came to is printed, and
`--steps` with that number repeats the run. Data order and weights follow from `--seed`.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from inkrt.engines.nano import corpus, export
from inkrt.engines.nano.corpus import Packed, say
from inkrt.engines.nano.model import Nano, count_parameters
from inkrt.engines.nano.optimizer import Muon, Schedule
from inkrt.engines.nano.parts import NanoConfig, Rows

LOG_EVERY = 50
BALANCE_RATE = 1e-3


def main() -> None:
    """Train as the command line says."""
    options = _options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary = corpus.read_vocabulary(options.data)
    config = NanoConfig(vocabulary.padded_size, vocabulary.size, vocabulary.eos)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Nano(config, dtype).to(device)
    say(f"{count_parameters(model)} parameters, {config}")
    begun = time.perf_counter()
    documents = corpus.read_documents(options.data / "train.npz")
    packed = corpus.pack(documents, options.length, options.seed).to(device)
    filled = (packed.segment >= 0).float().mean().item()
    say(
        f"{len(documents.tokens)} tokens in {len(documents.starts)} documents, "
        f"{len(packed.tokens)} sequences {filled:.1%} filled, "
        f"packed in {time.perf_counter() - begun:.0f} s",
    )
    steps = train(model, packed, options)
    report: dict[str, Any] = {
        "parameters": count_parameters(model),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "seconds": round(time.perf_counter() - begun),
        "steps": steps,
        "batch": options.batch,
        "length": options.length,
        "seed": options.seed,
        "heldout": {},
    }
    model.eval()
    for kind, held in heldout(options.data, options.length).items():
        loss, count = mean_loss(model, held.to(device), options.batch)
        perplexity = round(math.exp(loss), 3)
        say(f"held-out {kind}: loss {loss:.4f}, perplexity {perplexity:.2f}, {count} tokens")
        report["heldout"][kind] = {"perplexity": perplexity, "tokens": count}
    export.write_checkpoint(model, options.out, options.data)
    export.add_report(options.out, "training", report)
    say(f"written {options.out}")


def heldout(data: Path, length: int) -> dict[str, Packed]:
    """Packed held-out documents by kind."""
    vocabulary = corpus.read_vocabulary(data)
    kinds = corpus.split_kinds(corpus.read_documents(data / "heldout.npz"), vocabulary)
    return {kind: corpus.pack(documents, length, 0) for kind, documents in kinds.items()}


def train(model: Nano, packed: Packed, options: argparse.Namespace) -> int:
    """Train in place by `options.minutes` or `options.steps`; gives the number of steps."""
    muon, adam = optimizers(model, options.muon_rate, options.adam_rate)
    schedule = Schedule([muon, adam])
    device = packed.tokens.device
    run = torch.compile(batch_loss, dynamic=False) if options.compile else batch_loss
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.empty(0, dtype=torch.int64)
    model.train()
    begun = logged = time.perf_counter()
    started = begun  # of the clock for the schedule: after the first step, which compiles
    step, progress = 0, 0.0
    losses: list[Tensor] = []
    while progress < 1.0:
        while len(order) < options.batch:
            order = torch.cat([order, torch.randperm(len(packed.tokens), generator=generator)])
        batch = packed.pick(order[: options.batch].to(device))
        order = order[options.batch :]
        schedule.set(progress)
        loss = run(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.balance(BALANCE_RATE * (1 - progress))
        losses.append(loss.detach())
        step += 1
        if step == 1:
            torch.cuda.synchronize() if device.type == "cuda" else None
            started = logged = time.perf_counter()
            say(f"step 1 loss {loss.item():.3f} after {started - begun:.0f} s")
        if step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # the clock must not run ahead of the device
        now = time.perf_counter()
        progress = step / options.steps if options.steps else (now - started) / options.minutes / 60
        if step % LOG_EVERY == 0 or progress >= 1.0:
            mean = torch.stack(losses).mean().item()
            now = time.perf_counter()
            rate = len(losses) * options.batch * options.length / (now - logged)
            worst = max(_imbalance(model))
            say(
                f"step {step} {now - started:.0f} s loss {mean:.4f} {rate / 1e3:.0f} K tokens/s "
                f"busiest expert {worst:.2f}",
            )
            losses, logged = [], now
    say(f"{step} steps, {step * options.batch * options.length / 1e6:.1f} M tokens")
    return step


def _imbalance(model: Nano) -> list[float]:
    """Load of each layer's busiest expert over the mean load."""
    loads = [gate.load for gate in model.gates()]
    return [(load.max() / load.mean().clamp_min(1e-9)).item() for load in loads]


def optimizers(model: Nano, muon_rate: float, adam_rate: float) -> tuple[Muon, torch.optim.AdamW]:
    """Muon on the layers' matrices; AdamW, at higher rates for the embedding, on the rest."""
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if ".attn.w" in name or ".gate_attn." in name or ".experts." in name
    ]
    taken = {id(parameter) for parameter in matrices}
    groups: dict[float, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in taken:
            factor = 3.0 if name == "embed.weight" else 0.7 if name == "unembed.weight" else 1.0
            groups.setdefault(factor, []).append(parameter)
    adam = torch.optim.AdamW(
        [{"params": values, "lr": adam_rate * factor} for factor, values in groups.items()],
        betas=(0.9, 0.95),
        eps=1e-10,
        weight_decay=0.0,
        foreach=True,
    )
    return Muon(matrices, muon_rate, 0.02), adam


def token_losses(model: Nano, batch: Packed) -> tuple[Tensor, Tensor]:
    """Cross entropy [B, S-1] of every next token, and which count."""
    rows = Rows(batch.position, batch.segment)
    logits = model.logits(model(batch.tokens, rows).final[:, :-1])
    target = batch.tokens[:, 1:].long()
    losses = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return losses.view(target.shape), batch.loss[:, 1:]


def batch_loss(model: Nano, batch: Packed) -> Tensor:
    """Mean over the tokens to be predicted."""
    losses, counts = token_losses(model, batch)
    return (losses * counts).sum() / counts.sum().clamp_min(1)


@torch.no_grad()
def mean_loss(model: Nano, packed: Packed, batch_size: int) -> tuple[float, int]:
    """Mean cross entropy in nats per counted token, and their number."""
    total, count = 0.0, 0
    numbers = torch.arange(len(packed.tokens), device=packed.tokens.device)
    for rows in torch.split(numbers, batch_size):
        losses, counts = token_losses(model, packed.pick(rows))
        total += (losses * counts).sum().item()
        count += int(counts.sum())
    return total / max(count, 1), count


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train inkling2-nano.")
    parser.add_argument("data", type=Path, help="folder with train.npz, heldout.npz, tokenizer")
    parser.add_argument("out", type=Path, help="checkpoint folder to write")
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--minutes", type=float, help="by the clock, from the second step on")
    amount.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
