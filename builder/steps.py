"""The steps that an engine has plans for."""

from inkrt.builder.options import BuildOptions
from inkrt.runtime.engine_file import StepSpec


def engine_steps(options: BuildOptions) -> list[StepSpec]:
    """`decode` and `verify2`.. with logits for every row, `prefill<N>` with those of the last."""
    widths = range(2, options.max_verify_tokens + 1)
    verify = [StepSpec(f"verify{width}", width, width) for width in widths]
    prefill = StepSpec(f"prefill{options.prefill_chunk}", options.prefill_chunk, 1)
    return [StepSpec("decode", 1, 1), *verify, prefill]
