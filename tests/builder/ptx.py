"""What the PTX of a kernel touches before it waits for the kernels that it depends on."""

import re
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from inkrt.builder.compile import PLUGIN_FOLDER

_ACCESS = re.compile(r"(ld|st|atom|red|cp|prefetch|discard|multimem)\b")
_REGISTER = re.compile(r"%\w+")


def compile_ptx(source: Path, defines: tuple[tuple[str, object], ...]) -> str:
    """PTX of a kernel's source for Hopper, by NVRTC, which needs no driver for that.

    Without a dry pass, which stores nothing because of values that PTX does not tell; that is seen
    where such kernels run on the CPU (tests/plugins/cuda_on_cpu).
    """
    program = _check(nvrtc.nvrtcCreateProgram(source.read_bytes(), b"kernel.cu", 0, [], []))
    options = ["-arch=compute_90a", "-std=c++17", f"-I{source.parent}", f"-I{PLUGIN_FOLDER}"]
    options += [f"-D{name}={value}" for name, value in defines if name != "DRY_PASS"]
    _check(nvrtc.nvrtcCompileProgram(program, len(options), [x.encode() for x in options]))
    code = b" " * _check(nvrtc.nvrtcGetPTXSize(program))
    _check(nvrtc.nvrtcGetPTX(program, code))
    return code.rstrip(b"\0").decode()


def _check(result: Any) -> Any:
    status, *values = result
    assert not status, status
    return values[0] if values else None


def touched_before_wait(ptx: str, entry: str) -> set[int]:
    """Numbers of the parameters that are part of addresses a kernel may touch before it waits.

    Handing an address to a function counts. All branches are taken to be possible.
    """
    statements = _statements(ptx, entry)
    origins = _origins(statements, entry)
    touched: set[int] = set()
    for index in _before_wait(statements):
        operation, operands = _parse(statements[index])
        if operation.startswith("st.param"):
            addresses = operands[1:]
        elif _ACCESS.match(operation):
            addresses = [operand for operand in operands if operand.startswith("[")]
        else:
            continue
        touched |= _origin_of(addresses, origins)
    return touched


def triggers_before_wait(ptx: str, entry: str) -> bool:
    """Whether a thread may release the next kernel before it has waited for earlier ones."""
    statements = _statements(ptx, entry)
    early = (_parse(statements[index])[0] for index in _before_wait(statements))
    return "griddepcontrol.launch_dependents" in early


def _statements(ptx: str, entry: str) -> list[str]:
    found = re.search(rf"\.entry {entry}\(.*?^\{{(.*?)^\}}", ptx, re.DOTALL | re.MULTILINE)
    assert found, f"no kernel {entry}"
    code = re.sub(r"//.*", "", found[1])
    return [text for part in re.split(r"[;\n]", code) if (text := part.strip())]


def _parse(statement: str) -> tuple[str, list[str]]:
    """Operation and operands, without the predicate."""
    operation, *rest = re.sub(r"^@\S+\s+", "", statement).split(maxsplit=1)
    pieces = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", "".join(rest))
    return operation, [piece.strip() for piece in pieces]


def _origin_of(operands: list[str], origins: dict[str, set[int]]) -> set[int]:
    names = [name for operand in operands for name in _REGISTER.findall(operand)]
    return set().union(*(origins.get(name, set()) for name in names))


def _origins(statements: list[str], entry: str) -> dict[str, set[int]]:
    """Parameters that every register is computed from; what is loaded from memory is not."""
    origins: dict[str, set[int]] = {}
    is_changed = True
    while is_changed:
        is_changed = False
        for statement in statements:
            operation, operands = _parse(statement)
            if number := re.search(rf"\[{entry}_param_(\d+)", statement):
                origin = {int(number[1])}
            elif _ACCESS.match(operation):
                continue
            else:
                origin = _origin_of(operands[1:], origins)
            for name in _REGISTER.findall(operands[0]) if operands else ():
                if not origin <= origins.setdefault(name, set()):
                    origins[name] |= origin
                    is_changed = True
    return origins


def _before_wait(statements: list[str]) -> set[int]:
    """Statements that a thread may come to before griddepcontrol.wait."""
    labels = {text[:-1]: index for index, text in enumerate(statements) if text.endswith(":")}
    todo, seen = [0], set()
    while todo:
        index = todo.pop()
        while index < len(statements) and index not in seen:
            seen.add(index)
            operation, operands = _parse(statements[index])
            is_sure = not statements[index].startswith("@")
            assert not operation.startswith("brx")
            if operation.startswith("bra"):
                todo.append(labels[operands[0]])
            ends = operation.startswith(("bra", "ret", "exit")) and is_sure
            if ends or operation == "griddepcontrol.wait":
                break
            index += 1
    return seen
