"""Launches of several ranks touch nothing but the table of peers before they wait.

As in `test_before_wait`; no other engine of the tests has such launches.
"""

import pytest
import torch

from inkrt.plugins.all_gather.tactics import gather
from inkrt.plugins.all_reduce.tactics import find_tactics as all_reduce
from inkrt.plugins.tactic import CallArgs, Output, Peers, Pointer, TensorArg

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC through cuda.bindings is not installed")

from ptx import compile_ptx, touched_before_wait


def test_launches_of_several_ranks_touch_the_table_of_peers_only() -> None:
    args: CallArgs = {"x": TensorArg((8, 256), torch.float32), "dtype": torch.bfloat16}
    (reduce,) = all_reduce("sm_90a", {**args, "tp_size": 4})
    x, out = Pointer("x"), Output(0)
    best = (Output(1), Output(2))
    for kernel in (
        *reduce.kernels,
        gather(4, 8, 64, 250, x=x, out=out, best=best),
        gather(4, 512, 7, 28, x=x, out=out),
    ):
        touched = touched_before_wait(compile_ptx(kernel.source, kernel.defines), kernel.entry)
        assert [kernel.params[number] for number in touched] == [
            param for param in kernel.params if isinstance(param, Peers)
        ]
