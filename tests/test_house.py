"""What the repository promises about itself: links, packaging, documents."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import inkrt

ROOT = Path(__file__).parents[1]
PACKAGES = ("builder", "engines", "plugins", "runtime", "server")


def run_python(code: str, *, cwd: Path = ROOT) -> str:
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_links_are_relative() -> None:
    for name in PACKAGES:
        assert (ROOT / "inkrt" / name).readlink() == Path("..") / name


def test_bare_imports_are_refused() -> None:
    """From a checkout the folders are importable; a second copy of the registry must not be."""
    code = (
        f"for name in {PACKAGES}:\n"
        "    try: __import__(name)\n"
        "    except ImportError as error: print(error)"
    )
    assert run_python(code).splitlines() == [
        f"import this package as inkrt.{name}, not as {name}" for name in PACKAGES
    ]


def test_importing_the_runtime_imports_no_torch() -> None:
    code = (
        "import sys, inkrt\n"
        "inkrt.LLM, inkrt.Engine, inkrt.SamplingParams, inkrt.InkError\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    run_python(code)


def test_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == inkrt.__version__


def test_commands_exist_and_are_documented() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    readme = (ROOT / "README.md").read_text()
    for command, entry in scripts.items():
        module, function = entry.split(":")
        path = ROOT / Path(*module.split(".")).with_suffix(".py")
        assert f"def {function}(" in path.read_text()
        assert f"| `{command} " in readme


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_documents_are_short_and_their_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    assert len(text.splitlines()) < 150
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target


def test_tests_that_documents_name_exist() -> None:
    text = (ROOT / "docs" / "speculative.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 29
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name in named if f"\ndef {name}(" not in tests} == set()


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for package in (*PACKAGES, "inkrt/commands", "tests")
        for path in (ROOT / package).rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_ci_script_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    targets = re.findall(r"^make (\w+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(f"\n{target}: " in makefile for target in targets)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packaged files, with a kernel source as plugins will have them."""
    copy = tmp_path_factory.mktemp("house") / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*PACKAGES, "inkrt"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "plugins" / "linear" / "gemv.cu").write_text("// kernel\n")
    return copy


def packaged_files(source: Path) -> set[str]:
    """What a wheel must hold, from the source tree."""
    files = {
        f"inkrt/{path.relative_to(source)}"
        for package in PACKAGES
        for path in (source / package).rglob("*")
        if path.suffix in (".py", ".cu", ".cuh", ".json", ".html", ".css", ".js")
        and "checkpoint" not in path.relative_to(source).parts  # of the repository only
    }
    own = [*(source / "inkrt").glob("*.py"), *(source / "inkrt" / "commands").glob("*.py")]
    return files | {str(path.relative_to(source)) for path in own} | {"inkrt/py.typed"}


def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        assert not any(stat.S_ISLNK(entry.external_attr >> 16) for entry in archive.infolist())
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def build(kind: str, source: Path, out: Path) -> Path:
    out.mkdir(parents=True)
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run_python(code, cwd=source)
    (path,) = out.iterdir()
    return path


def test_wheel_and_sdist_hold_the_linked_packages(source: Path, tmp_path: Path) -> None:
    expected = packaged_files(source)
    assert "inkrt/plugins/linear/gemv.cu" in expected
    sdist = build("sdist", source, tmp_path / "sdist")
    wheel = build("wheel", source, tmp_path / "wheel")
    assert wheel_files(wheel) == expected

    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    from_sdist = build("wheel", unpacked, tmp_path / "again")
    assert wheel_files(from_sdist) == expected

    # The wheel alone is enough to import it all.
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import inkrt.plugins.registry as registry\n"
        f"assert registry.__file__.startswith({str(site)!r}), registry.__file__\n"
        "print(len(registry.plugins()))"
    )
    assert int(run_python(code, cwd=tmp_path)) > 5
