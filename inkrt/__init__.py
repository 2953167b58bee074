"""InkRT: ahead-of-time engines for Inkling, Inkling-2 and Flint, and the runtime that drives them.

Importing this package imports neither torch nor a GPU library; the public names load on first use.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inkrt.errors import InkError
    from inkrt.runtime.async_llm import AsyncLLM
    from inkrt.runtime.engine import Engine
    from inkrt.runtime.llm import LLM
    from inkrt.runtime.sampling_params import SamplingParams
    from inkrt.runtime.spec.config import SpeculativeConfig

__version__ = "0.1.0.dev0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Engine",
    "InkError",
    "SamplingParams",
    "SpeculativeConfig",
    "__version__",
]

_HOMES = {
    "LLM": "inkrt.runtime.llm",
    "AsyncLLM": "inkrt.runtime.async_llm",
    "Engine": "inkrt.runtime.engine",
    "InkError": "inkrt.errors",
    "SamplingParams": "inkrt.runtime.sampling_params",
    "SpeculativeConfig": "inkrt.runtime.spec.config",
}

logging.getLogger("inkrt").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'inkrt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
