"""ink-bench engine --costs and --acceptance on a whole engine."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from inkrt.commands import bench, build
from inkrt.commands.bench_speculation import PROMPTS, figures, measure_costs, plot
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import read_config
from inkrt.runtime.llm import LLM
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import MAX_AHEAD, Session
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.costs import CostTable
from inkrt.runtime.spec.stats import SpeculationStats
from inkrt.runtime.spec.width import CostAware, FixedWidth


@pytest.fixture(scope="module")
def folder(make_engine: Any) -> Path:
    return make_engine("float32", num_layers=1)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(bench.make_app(), ["engine", *map(str, arguments)])


def test_costs_are_measured_and_used(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    result = invoke(folder, "--costs", "--runs", 2, "--contexts", "100,9,4000", "--json", out)
    assert result.exit_code == 0, result.output
    assert result.stderr == f"written: {folder / 'costs.json'}\n"
    table = CostTable.read(folder, read_config(folder))
    assert table is not None
    assert out.read_bytes() == (folder / "costs.json").read_bytes()
    assert table.contexts == (9, 100)  # 4000 does not fit
    assert [len(row) for row in table.verify_s] == [8, 8]
    assert table.draft_s is None
    line = result.stdout.splitlines()[1].split()
    assert int(line[0]) == 9
    assert float(line[1]) == pytest.approx(1e3 * table.decode_s[0], abs=1e-3)
    times = [1e3 * seconds for seconds in table.verify_s[0]]
    assert [float(cell) for cell in line[2:]] == pytest.approx(times, abs=1e-3)

    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompt = [5, 6, 7] * 10
    with LLM(folder) as llm:
        plain = llm.generate([prompt], params)[0].outputs
    with LLM(folder, speculative=SpeculativeConfig("ngram", width="cost")) as llm:
        assert llm.generate([prompt], params)[0].outputs == plain


def test_auto_goes_by_costs_where_they_were_measured(tmp_path: Path) -> None:
    """`ink-build --costs` measures at once; without a table all drafts are read."""
    write_checkpoint(tmp_path / "checkpoint", model="flint")
    options = ["--max-seq-len", "64", "--max-verify-tokens", "2", "--prefill-chunk", "16"]
    built = tmp_path / "built"
    arguments = [str(tmp_path / "checkpoint"), "-o", str(built), *options, "--costs", "--quiet"]
    result = CliRunner().invoke(build.make_app(), arguments)
    assert result.exit_code == 0, result.output
    for policy in (CostAware, FixedWidth):
        resolved = SpeculativeConfig("ngram").resolve(built, read_config(built))
        assert resolved is not None
        assert isinstance(resolved.make_policy(), policy)
        (built / "costs.json").unlink(missing_ok=True)


def test_contexts_near_each_other_and_near_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is measured behind as many tokens as the table says; the last has no room to spare."""
    ran: list[int] = []
    step = Session.step

    def watched(self: Session, *given: Any, **options: Any) -> Any:
        ran.append(self.length)
        return step(self, *given, **options)

    monkeypatch.setattr(Session, "step", watched)
    last = read_config(folder).max_seq_len - 4 - 1 - MAX_AHEAD
    contexts = (9, 10, last - 1, last)
    with Engine.open(folder) as engine:
        table = measure_costs(engine, contexts, 1)
    assert table.contexts == contexts
    assert sorted(set(ran)) == list(contexts)


def test_contexts_that_do_not_fit(folder: Path) -> None:
    result = invoke(folder, "--costs", "--runs", 2, "--contexts", "4000")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: no context fits: 10 positions behind it are measured in, of the engine's 250; give "
        "shorter --contexts or fewer --runs\n"
    )


def test_acceptance_of_prompts(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b a b a b\n\nthe same, the same, the same\n")
    out = tmp_path / "acceptance.json"
    options = ["--spec", "ngram", "--max-tokens", 20, "--temperature", 0, "--draft-tokens", 3]
    result = invoke(folder, "--acceptance", "--prompts", prompts, *options, "--json", out)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert (report["method"], report["accept"], report["width"]) == ("ngram", "coupled", "auto")
    assert [row["prompt"] for row in report["prompts"]] == prompts.read_text().split("\n")[0:3:2]
    for name in ("emitted", "rounds", "plain_steps", "drafted", "accepted", "cut"):
        assert sum(row[name] for row in report["prompts"]) == report["all"][name]
    with LLM(folder, speculative=SpeculativeConfig("ngram", 3)) as llm:
        for row in report["prompts"]:
            params = SamplingParams(temperature=0.0, max_tokens=20)
            output = llm.chat([{"role": "user", "content": row["prompt"]}], params)
            assert row == {"prompt": row["prompt"], **figures(output.speculation)}
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["prompt", "a", "the", "all"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--costs", "--acceptance"], "are two measurements; run one after the other"),
        (["--prompts", "x"], "only --acceptance has a use for it; add that or"),
        (["--plot", "x.png"], "only --acceptance has a use for it; add that or"),
        (["--spec", "ngram"], "--spec: only --acceptance and --rounds have a use for it"),
        (["--costs", "--width", "cost"], "--width: of no use with --costs; leave"),
        (["--costs", "--temperature", 0], "--temperature: of no use with --costs; leave"),
        (["--costs", "--steps", "decode"], "--steps: of no use with --costs; leave"),
        (["--acceptance", "--profile"], "--profile: of no use with --acceptance; leave"),
        (["--acceptance", "--contexts", "9"], "--contexts: of no use with --acceptance"),
        (["--acceptance", "--runs", 3], "--runs: of no use with --acceptance"),
        (["--acceptance", "--prompts", "none.txt"], "cannot read none.txt"),
        (["--acceptance", "--plot", "no/x.png"], "cannot write no/x.png; name a file in a folder"),
        (["--acceptance"], "has no drafter of its own; add --spec ngram"),
        (["--acceptance", "--spec", "none"], "nobody drafts with --spec none; leave it out"),
        (["--acceptance", "--spec", "dspark"], "no drafter of its own; choose --spec=ngram"),
    ],
)
def test_wrong_usage(folder: Path, options: list[str], message: str) -> None:
    result = invoke(folder, *options)
    failures = ("cannot read", "cannot write", "no drafter of its own; choose")
    assert result.exit_code == (1 if message.startswith(failures) else 2)
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def test_a_file_without_prompts(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    result = invoke(folder, "--acceptance", "--prompts", empty, "--spec", "ngram")
    assert result.stderr == f"error: {empty} has no prompts; write one into each line\n"
    assert len(set(PROMPTS)) == len(PROMPTS)


def test_a_plot_needs_matplotlib(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    result = invoke(folder, "--acceptance", "--spec", "ngram", "--plot", tmp_path / "x.png")
    assert result.stderr == (
        "error: a plot needs matplotlib, which is not installed; install it with: "
        "pip install 'inkrt[plot]', or leave --plot out\n"
    )
    assert result.stdout == ""


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stats = SpeculationStats()
    for accepted in (0, 3, 1):
        stats.count(3, accepted, accepted + 1)
    report = {
        "method": "ngram", "accept": "coupled", "width": "fixed", "temperature": 1.0,
        "all": figures(stats),
    }  # fmt: skip
    plot(report, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
