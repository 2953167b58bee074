"""Command line of the tiny checkpoint generator; silent when all went well."""

import argparse
import sys
from pathlib import Path

from inkrt.engines.tiny.checkpoint import DTYPES, LAYOUTS, MODELS, write_checkpoint
from inkrt.engines.tiny.drafter import DRAFTER_LAYOUTS, HEAD_KINDS, TinyDrafter
from inkrt.errors import InkError


def main() -> int:
    """Write the checkpoint that the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m inkrt.engines.tiny", description="Write a random tiny checkpoint."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--model", choices=list(MODELS), default="inkling2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument(
        "--layout",
        choices=list(LAYOUTS),
        default="publisher",
        help="tensor names: as published, or as transformers saves the model; dequantized: as "
        "published, with the values that quantized weights stand for",
    )
    parser.add_argument(
        "--format",
        choices=["safetensors", "gguf"],
        default="safetensors",
        help="of the tensors' files; gguf: one file with NVFP4 matrices (flint only)",
    )
    parser.add_argument(
        "--drafter",
        choices=list(DRAFTER_LAYOUTS),
        help="a random DSpark drafter: embedded in the checkpoint, or in OUT/drafter in a layout",
    )
    parser.add_argument(
        "--head", choices=list(HEAD_KINDS), default="rnn", help="sequential head of the drafter"
    )
    parser.add_argument(
        "--trimmed", action="store_true", help="the drafter drafts only some of the tokens"
    )
    options = parser.parse_args()
    try:
        write_checkpoint(
            options.out,
            model=options.model,
            seed=options.seed,
            dtype=options.dtype,
            layout=options.layout,
            format=options.format,
            drafter=TinyDrafter(options.drafter, options.head, options.trimmed)
            if options.drafter
            else None,
        )
    except InkError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
