"""A plan that refers to what is not there is found before anything is opened."""

import msgspec
import pytest

from inkrt.runtime.plan import (
    Kernel,
    KernelParam,
    Launch,
    Plan,
    Ref,
    Refs,
    TableParam,
    TensorParam,
    TensorSpec,
    dangling,
)

SPECS = tuple(TensorSpec(f"t{i}", "float32", (4,), (1,), "arena", "", 16 * i) for i in range(3))


def plan(launch: Launch) -> Plan:
    return Plan("decode", 1, 1, SPECS, (launch,), 48, {}, {})


def launch(*params: KernelParam, cubin: str = "code") -> Launch:
    kernel = Kernel(
        cubin=cubin, entry="run", grid=(1, 1, 1), block=(32, 1, 1), cluster=1, smem_bytes=0,
        pdl=True, cooperative=False, params=params,
    )  # fmt: skip
    args = {"x": Ref(0), "many": Refs((1, 2))}
    return Launch("op", "tactic", args, (2,), module="", bytes=0, kernels=(kernel,))


def test_a_whole_plan_lacks_nothing() -> None:
    sound = launch(TensorParam(2), TableParam((0, 1, 2)))
    assert dangling(plan(sound), {"code"}) is None


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (launch(TensorParam(3)), "no tensor 3 of 3"),
        (launch(TableParam((0, 3, 1))), "no tensor 3 of 3"),
        (launch(TableParam((0, -1, 1))), "no tensor -1 of 3"),
        (msgspec.structs.replace(launch(), args={"x": Ref(7)}), "no tensor 7 of 3"),
        (msgspec.structs.replace(launch(), args={"x": Refs((0, 9))}), "no tensor 9 of 3"),
        (msgspec.structs.replace(launch(), outputs=(-2,)), "no tensor -2 of 3"),
        (launch(cubin="other"), "no code other"),
    ],
)
def test_what_is_missing_is_named(broken: Launch, words: str) -> None:
    assert dangling(plan(broken), {"code"}) == f"step decode, op: {words}"
