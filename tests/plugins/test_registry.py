"""Every case of every plugin: reference against oracle, fake against reference, schema, opcheck."""

import copy
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracles import ORACLES, to_float64
from oracles_draft import ORACLES_DRAFT
from oracles_flint import ORACLES_FLINT
from oracles_fused import ORACLES_FUSED
from oracles_media import ORACLES_MEDIA
from oracles_quantize import ORACLES_QUANTIZE
from oracles_vision import ORACLES_VISION
from torch import Tensor

from inkrt.errors import BuildError
from inkrt.plugins.registry import Arguments, Case, Plugin, plugins

ALL_ORACLES = (
    ORACLES
    | ORACLES_FUSED
    | ORACLES_FLINT
    | ORACLES_DRAFT
    | ORACLES_QUANTIZE
    | ORACLES_VISION
    | ORACLES_MEDIA
)
DTYPES = (torch.float32, torch.bfloat16)


def _arguments(plugin: Plugin, case: Case, dtype: torch.dtype) -> Arguments:
    # A fixed seed per case: adding a case changes no other.
    seed = zlib.crc32(f"{plugin.name}/{case.name}".encode())
    return case.arguments(dtype, torch.Generator().manual_seed(seed))


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    if outputs is None:
        return ()
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _tensors(arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
    for name, value in arguments.items():
        for i, item in enumerate(value if isinstance(value, list | tuple) else [value]):
            if isinstance(item, Tensor):
                yield f"{name}[{i}]" if isinstance(value, list | tuple) else name, item


def _assert_near(name: str, got: Tensor, expected: Any, rtol: float) -> None:
    expected = torch.as_tensor(expected)
    assert got.shape == expected.shape, name
    if not got.is_floating_point():
        assert torch.equal(got.long(), expected.long()), name
        return
    assert torch.isfinite(got).all() or torch.isinf(expected).any(), name
    is_infinite = torch.isinf(expected)
    assert torch.equal(got[is_infinite].double(), expected[is_infinite].double()), name
    # NaN in the oracle: anything finite is right.
    is_free = torch.isnan(expected) | is_infinite
    expected = expected.masked_fill(is_free, 0.0)
    error = got.double().masked_fill(is_free, 0.0) - expected
    bound = rtol * torch.linalg.vector_norm(expected)
    assert torch.linalg.vector_norm(error) <= bound, (
        f"{name}: relative error "
        f"{torch.linalg.vector_norm(error) / torch.linalg.vector_norm(expected):.3g} > {rtol}"
    )


def _to_meta(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_to_meta(item) for item in value]
    return value.to("meta") if isinstance(value, Tensor) else value


def _strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions where they mean something."""
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in sizes_and_strides if size > 1]


CASES = [
    pytest.param(plugin, case, dtype, id=f"{plugin.name}/{case.name}/{str(dtype)[6:]}")
    for plugin in plugins().values()
    for case in plugin.cases()
    for dtype in DTYPES
]


@pytest.mark.parametrize(("plugin", "case", "dtype"), CASES)
def test_reference_is_near_oracle(plugin: Plugin, case: Case, dtype: torch.dtype):
    arguments = _arguments(plugin, case, dtype)
    before = copy.deepcopy(arguments)
    wide = {name: to_float64(value) for name, value in arguments.items()}
    outputs, mutated = ALL_ORACLES[plugin.name](**wide)
    got = _as_tuple(plugin.op(**arguments))

    assert len(got) == len(outputs)
    for i, (ours, expected) in enumerate(zip(got, outputs, strict=True)):
        _assert_near(f"output {i}", ours, expected, case.rtol[dtype])
    assert set(mutated) == set(plugin.mutates)
    unchanged, written = dict(_tensors(before)), dict(_tensors(mutated))
    for name, value in _tensors(arguments):
        if name.partition("[")[0] in plugin.mutates:
            _assert_near(name, value, written[name], case.rtol[dtype])
            assert not torch.equal(value, unchanged[name]), f"{name} was not written"
        else:
            assert torch.equal(value, unchanged[name]), f"{name} was written"


@pytest.mark.parametrize(("plugin", "case", "dtype"), CASES)
def test_fake_has_the_references_shapes(plugin: Plugin, case: Case, dtype: torch.dtype):
    arguments = _arguments(plugin, case, dtype)
    on_meta = {name: _to_meta(value) for name, value in arguments.items()}
    fakes = _as_tuple(plugin.op(**on_meta))
    outputs = _as_tuple(plugin.op(**arguments))
    assert len(fakes) == len(outputs)
    for fake, output in zip(fakes, outputs, strict=True):
        assert (fake.shape, fake.dtype) == (output.shape, output.dtype)
        assert _strides(fake) == _strides(output)


@pytest.mark.parametrize(("plugin", "case", "dtype"), CASES)
def test_two_runs_have_equal_bits(plugin: Plugin, case: Case, dtype: torch.dtype):
    first, second = _arguments(plugin, case, dtype), _arguments(plugin, case, dtype)
    for a, b in zip(_as_tuple(plugin.op(**first)), _as_tuple(plugin.op(**second)), strict=True):
        assert torch.equal(a, b)
    for (name, a), (_, b) in zip(_tensors(first), _tensors(second), strict=True):
        assert torch.equal(a, b), name


# Of operators that have one of their own; of all others it is the reference.
PLAIN_CASES = [c for c in CASES if c.values[0].plain is not c.values[0].reference]


@pytest.mark.parametrize(("plugin", "case", "dtype"), PLAIN_CASES)
def test_plain_form_is_near_oracle(plugin: Plugin, case: Case, dtype: torch.dtype):
    assert {c.values[0].name for c in PLAIN_CASES} >= {"linear", "bidirectional_attention"}
    arguments = _arguments(plugin, case, dtype)
    wide = {name: to_float64(value) for name, value in arguments.items()}
    outputs, _ = ALL_ORACLES[plugin.name](**wide)
    got = _as_tuple(plugin.plain(**arguments))
    references = _as_tuple(plugin.op(**arguments))
    for ours, reference, expected in zip(got, references, outputs, strict=True):
        _assert_near("plain form", ours, expected, case.rtol[dtype])
        assert ours.dtype == reference.dtype
        assert _strides(ours) == _strides(reference)


PER_PLUGIN = pytest.mark.parametrize("plugin", plugins().values(), ids=plugins().keys())


@PER_PLUGIN
def test_fake_refuses_wrong_shapes_and_dtypes(plugin: Plugin):
    arguments = _arguments(plugin, plugin.cases()[0], torch.bfloat16)
    on_meta = {name: _to_meta(value) for name, value in arguments.items()}
    for name, value in on_meta.items():
        tensors = value if isinstance(value, list) else [value]
        if not tensors or not isinstance(tensors[-1], Tensor):
            continue
        # A norm and a reduction of ranks are right for any number of leading dimensions.
        takes_any_rank = (plugin.name, name) in {("rms_norm", "x"), ("all_reduce", "partial")}
        wrong = [] if takes_any_rank else [tensors[-1].unsqueeze(0)]
        wrong.append(tensors[-1].to(torch.float64))
        for bad in wrong:
            changed = [*value[:-1], bad] if isinstance(value, list) else bad
            with pytest.raises(BuildError, match=f"ink::{plugin.name}: .*expected"):
                plugin.op(**on_meta | {name: changed})


@PER_PLUGIN
def test_halves_of_a_collective_make_the_reference(plugin: Plugin):
    if plugin.collective is None:
        return
    for case in plugin.cases():
        whole, halves = (_arguments(plugin, case, torch.bfloat16) for _ in range(2))
        payload = plugin.collective.payload(**halves)
        combined = _as_tuple(plugin.collective.combine([payload], **halves))
        for a, b in zip(_as_tuple(plugin.op(**whole)), combined, strict=True):
            assert torch.equal(a, b), case.name
        for (name, a), (_, b) in zip(_tensors(whole), _tensors(halves), strict=True):
            assert torch.equal(a, b), f"{case.name}: {name}"


@PER_PLUGIN
def test_opcheck(plugin: Plugin):
    # Cases of one plugin differ in sizes only, so the first stands for all.
    arguments = _arguments(plugin, plugin.cases()[0], torch.bfloat16)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(plugin.op, (), arguments, test_utils=checks)


@PER_PLUGIN
def test_plugin_is_complete(plugin: Plugin):
    cases = plugin.cases()
    assert plugin.name in ALL_ORACLES
    assert len(cases) >= 3
    assert len({case.name for case in cases}) == len(cases)
    assert all(set(case.rtol) == set(DTYPES) for case in cases)
    assert plugin.name == plugin.op.name().split("::")[1]
    written = [
        a.name for a in plugin.op._schema.arguments if a.alias_info and a.alias_info.is_write
    ]
    assert sorted(written) == sorted(plugin.mutates)
