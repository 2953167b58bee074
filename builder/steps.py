"""The steps that an engine has plans for."""

from inkrt.builder.options import BuildOptions
from inkrt.runtime.engine_file import StepSpec


def engine_steps(options: BuildOptions) -> list[StepSpec]:
    """`decode` and `verify2`.. with logits for every row, `prefill<N>` with those of the last.

    Args:
        options: with 0 replaced by what it stands for.
    """
    widths = range(2, options.max_verify_tokens + 1)
    verify = [StepSpec(f"verify{width}", width, width) for width in widths]
    chunk = options.prefill_chunk
    return [StepSpec("decode", 1, 1), *verify, StepSpec(f"prefill{chunk}", chunk, 1)]
