"""Runs a GPU plan kernel by kernel on the CPU: what `DeviceMemory` and the CUDA executor do."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from emulator import Emulator
from numpy.typing import NDArray
from w4a16_backend import Buffer

from inkrt.builder.build import Prepared
from inkrt.plugins.tactic import KernelLaunch
from inkrt.runtime.plan import DTYPE_BYTES, KernelParam, Plan, TableParam, TensorParam, TensorSpec

Bytes = NDArray[np.uint8]


class Recorder:
    """Stands in for the builder's compiler: keeps what it is asked to compile.

    Attributes:
        kernels: by the name that a plan has for the code.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.cubins: dict[str, bytes] = {}
        self.kernels: dict[str, KernelLaunch] = {}

    def start(self, kernels: Sequence[KernelLaunch]) -> None:
        """Nothing takes long enough to begin early."""

    def stop(self) -> None:
        """Nothing has begun."""

    def compile(self, kernel: KernelLaunch) -> str:
        name = hashlib.sha256(repr((kernel.source, kernel.defines)).encode()).hexdigest()[:16]
        self.kernels[name] = kernel
        self.cubins[name] = b""
        return name


class PlanRunner:
    """One plan with memory of its own, which stays from run to run."""

    def __init__(
        self, emulator: Emulator, prepared: Prepared, recorder: Recorder, step: str
    ) -> None:
        self._emulator = emulator
        self._kernels = recorder.kernels
        self.plan: Plan = prepared.plans[step]
        code = prepared.code
        self._weights = {
            tensor.name: _filled(tensor.num_bytes, code.templates[code.template_of[tensor.name]])
            for tensor in prepared.tensors
        }
        # NaN in what nobody has written yet.
        self.state = {
            spec.name: _filled(math.prod(spec.shape) * DTYPE_BYTES[spec.dtype], b"\xff")
            for spec in prepared.state.buffers
        }
        self._arena = _filled(self.plan.arena_bytes, b"\xff")
        self._scratch = _filled(max(self.plan.scratch_bytes, 16), b"\0")
        for fill in self.plan.fills:
            self._scratch[fill.offset : fill.offset + fill.size] = fill.value
        self._inputs = {
            name: _filled(_size(self.plan.tensors[index]), b"\0")
            for name, index in self.plan.inputs.items()
        }

    def run(self, values: Mapping[str, Sequence[int] | Sequence[float]]) -> NDArray[np.float32]:
        """The step's logits [rows, vocabulary]; inputs that are not given are zero."""
        for name, memory in self._inputs.items():
            memory[:] = 0
            dtype = getattr(torch, self.plan.tensors[self.plan.inputs[name]].dtype)
            data = torch.tensor(list(values.get(name, [])), dtype=dtype).numpy().view(np.uint8)
            memory[: data.size] = data
        for launch in self.plan.launches:
            for kernel in launch.kernels:
                params = [self._value(param) for param in kernel.params]
                # One code may stand for launches of several sizes.
                source = replace(
                    self._kernels[kernel.cubin], grid=kernel.grid, smem_bytes=kernel.smem_bytes
                )
                self._emulator.launch(source, params, [])
        spec = self.plan.tensors[self.plan.outputs["logits"]]
        logits = self._bytes(spec)[: _size(spec)].view(np.float32).reshape(spec.shape)
        return logits.copy()

    def _value(self, param: KernelParam) -> Buffer | int | float:
        if isinstance(param, TensorParam):
            spec = self.plan.tensors[param.tensor]
            memory = self._bytes(spec)
            return Buffer(memory.ctypes.data, _size(spec), memory)
        assert not isinstance(param, TableParam), "a launch of many layers needs a GPU"
        return param.value

    def _bytes(self, spec: TensorSpec) -> Bytes:
        spaces: dict[str, Bytes] = {"arena": self._arena, "scratch": self._scratch}
        named = {"weight": self._weights, "state": self.state, "input": self._inputs}
        memory = spaces[spec.space] if spec.space in spaces else named[spec.space][spec.storage]
        return memory[spec.offset :]


def _size(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def _filled(num_bytes: int, pattern: bytes) -> Bytes:
    """Aligned memory with a pattern over and over."""
    raw = np.empty(num_bytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    memory = raw[start : start + num_bytes]
    memory[:] = np.resize(np.frombuffer(pattern, np.uint8), num_bytes)
    return memory
