"""docs/grafana.json: it asks for metrics and labels that a server has, and leaves none out."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import MESSAGES, Scripted, client_of, say
from test_inkling_answers import END, END_SAMPLING, TEXT
from test_requests import CHAT, METRICS

from inkrt import SpeculativeConfig

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
VARIABLES = {item["name"]: item for item in DASHBOARD["templating"]["list"]}


async def labels_of_samples(scripted: Scripted) -> dict[str, set[str]]:
    """Names that a server with some traffic exposes, and the labels of each."""
    llm, executor = scripted(speculative=SpeculativeConfig(method="ngram"))
    ids = say(
        llm, executor, llm.llm.chat_prompt(MESSAGES), TEXT + "ab cd " * 20 + END + END_SAMPLING
    )
    async with client_of(llm) as client:
        body = {"messages": MESSAGES, "temperature": 0, "stop_token_ids": [ids[-1]]}
        assert (await client.post(CHAT, json=body)).status_code == 200
        assert (await client.post(CHAT, json={})).status_code == 400
        text = (await client.get("/metrics")).text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.anyio
async def test_every_metric_exists(scripted: Scripted) -> None:
    exposed = await labels_of_samples(scripted)
    asked = set()
    for expression in EXPRESSIONS:
        names = re.findall(r'\b(ink_\w+)\{model_name=~"\$model_name"\}', expression)
        assert names == re.findall(r"\bink_\w+", expression)  # each of the chosen model
        assert set(names) <= exposed.keys(), expression
        (grouped,) = set(re.findall(r"sum by \((\w+)\)", expression)) or {"model_name"}
        assert any(grouped in exposed[name] for name in names), expression
        assert ("_bucket{" in expression) == ("histogram_quantile(" in expression)
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing)
        asked |= set(names)
    suffixes = ("", "_total", "_bucket", "_sum")
    missing = {n for n in METRICS if not any(f"ink_{n}{end}" in asked for end in suffixes)}
    assert missing == set()
    query = VARIABLES["model_name"]["query"]["query"]
    (name, label) = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
    assert label in exposed[name]


def test_counters_are_shown_as_rates() -> None:
    """A counter as such only grows; a gauge has no rate."""
    for expression in EXPRESSIONS:
        for name in re.findall(r"\b(ink_\w+)\{", expression):
            grows = name.endswith(("_total", "_bucket", "_sum", "_count"))
            is_counter = grows and name != "ink_kv_pages_total"
            assert (f"rate({name}{{" in expression) == is_counter, expression


def test_legends_and_places() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    sources = {json.dumps(panel["datasource"]) for panel in PANELS}
    assert sources == {json.dumps({"type": "prometheus", "uid": "${datasource}"})}
    assert VARIABLES["datasource"]["query"] == "prometheus"
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"]

    def corners(panel: dict[str, Any]) -> tuple[int, int, int, int]:
        place = panel["gridPos"]
        return place["x"], place["y"], place["x"] + place["w"], place["y"] + place["h"]

    for one, other in itertools.combinations(DASHBOARD["panels"], 2):
        left, top, right, bottom = corners(one)
        left_2, top_2, right_2, bottom_2 = corners(other)
        assert left_2 >= right or left >= right_2 or top_2 >= bottom or top >= bottom_2
        assert max(right, right_2) <= 24
