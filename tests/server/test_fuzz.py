"""Bodies made from the server's own description of its API: every answer is one that it promises.

Whatever the body, the status is documented and not an error of ours, errors have their one form,
events can be read, and nothing is left running. Objects that the description leaves open are made
of words that mean something to the server. INK_FUZZ_EXAMPLES=N makes N other bodies a route.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import HEADERS, SETTINGS, Scripted
from starlette.testclient import TestClient

from inkrt.server.app import create_app

NUM_EXAMPLES = int(os.environ.get("INK_FUZZ_EXAMPLES", "30"))
KINDS = [
    "message", "function_call", "function_call_output", "reasoning", "item_reference", "function",
    "text", "input_text", "output_text", "input_image", "image_url", "input_audio",
    "reasoning_text",
    "json_object", "json_schema", "object", "string",
]  # fmt: skip
ROLES = ["user", "assistant", "system", "developer", "tool"]
WORDS = [
    "auto", "none", "required", "low", "m", "f", "[a-z]+", "{}", '{"a": 1}', "\ud800",
    "<|end_message|>", "start: /a+/", "hello", "",
]  # fmt: skip
KEYS = ["id", "name", "status", "json", "regex", "choice", "grammar", "strict", "0", "7", "summary"]
TEXTS = st.one_of(st.sampled_from([*WORDS, *KINDS, *ROLES]), st.text(max_size=8))
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), TEXTS
)
ANY = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=4)), inner, max_size=4),
    ),
    max_leaves=8,
)


def mostly(likely: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly values of that kind, of others once in a while."""
    return st.one_of(likely, likely, likely, likely, likely, ANY)


KIND, NAME = mostly(st.sampled_from(KINDS)), mostly(st.sampled_from(["f", "g", "c"]))
SCHEMA = mostly(st.fixed_dictionaries({"type": KIND}, optional={"properties": ANY}))
JSON = mostly(st.sampled_from(["{}", '{"a": 1}', "{", "[]"]))
FUNCTION = mostly(
    st.fixed_dictionaries({"name": NAME}, optional={"parameters": SCHEMA, "arguments": JSON})
)
CALL = mostly(st.fixed_dictionaries({"id": NAME, "type": KIND, "function": FUNCTION}))
PART = mostly(
    st.fixed_dictionaries(
        {"type": KIND, "text": mostly(TEXTS)}, optional={"image_url": ANY, "input_audio": ANY}
    )
)
CONTENT = mostly(st.one_of(TEXTS, st.lists(PART, max_size=3)))
# What messages, items, tools, formats and grammars have, in any mixture.
OBJECTS = st.one_of(
    st.fixed_dictionaries(
        {"role": mostly(st.sampled_from(ROLES)), "content": CONTENT},
        optional={
            "tool_calls": mostly(st.lists(CALL, max_size=2)),
            "tool_call_id": NAME,
            "reasoning_content": mostly(TEXTS),
            "type": KIND,
        },
    ),
    st.fixed_dictionaries(
        {"type": KIND},
        optional={
            "call_id": NAME, "name": NAME, "arguments": JSON, "output": CONTENT,
            "content": CONTENT, "function": FUNCTION, "parameters": SCHEMA, "schema": SCHEMA,
            "json_schema": SCHEMA, "encrypted_content": ANY,
        },
    ),
    st.dictionaries(st.sampled_from(KEYS), ANY, max_size=2),
)  # fmt: skip
# Enough of each route to get past the first checks; fields of a made body win.
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # of length


def values_of(  # noqa: PLR0911
    schema: Mapping[str, Any], named: Mapping[str, Any]
) -> st.SearchStrategy[Any]:
    """Values that a schema of pydantic's allows."""
    if "$ref" in schema:
        return values_of(named[schema["$ref"].rsplit("/", 1)[1]], named)
    if "anyOf" in schema:
        return st.one_of([values_of(each, named) for each in schema["anyOf"]])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.one_of(st.integers(-2, 40), st.integers())
        case "number":
            return st.one_of(st.integers(-2, 3), st.floats(-2, 3), st.floats())
        case "string":
            return TEXTS
        case "array":
            return st.lists(values_of(schema["items"], named), max_size=4)
        case "object" if "properties" in schema:
            fields = {key: values_of(each, named) for key, each in schema["properties"].items()}
            return st.fixed_dictionaries({}, optional=fields)
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            inner = values_of(schema["additionalProperties"], named)
            return st.dictionaries(st.one_of(st.sampled_from(KEYS), TEXTS), inner, max_size=3)
        case "object":
            return OBJECTS
    raise AssertionError(f"the description has a schema that is not known here: {schema}")


def bodies_of(schema: Mapping[str, Any], named: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Some fields of a body, few enough that not every body has something wrong."""
    properties = named[schema["$ref"].rsplit("/", 1)[1]]["properties"]
    fields = {key: values_of(each, named) for key, each in properties.items()}
    # Those that hold objects have most that can go wrong.
    deep = [key for key, each in properties.items() if re.search("object|[$]ref", str(each))]
    right = st.lists(
        st.sampled_from([*fields, *deep * (1 + len(fields) // 4)]), max_size=3, unique=True
    ).flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))
    wrong = st.dictionaries(st.sampled_from(sorted(fields)), ANY, max_size=2)
    return st.one_of(right, right, right, wrong)


def dumped(body: Any) -> bytes:
    return json.dumps(body).encode()  # NaN too, which JSON does not have


@pytest.fixture
def client(scripted: Scripted) -> Iterator[tuple[TestClient, Any]]:
    llm, _ = scripted()
    app = create_app(llm, SETTINGS)
    with TestClient(app, headers=HEADERS, raise_server_exceptions=False) as made:
        yield made, llm


@pytest.mark.parametrize("path", VALID)
def test_any_body_gets_an_answer_that_is_described(
    client: tuple[TestClient, Any], path: str
) -> None:
    http, llm = client
    described = http.get("/openapi.json").json()
    assert {
        route for route, operations in described["paths"].items() if "post" in operations
    } == VALID.keys()
    operation = described["paths"][path]["post"]
    named = described["components"]["schemas"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    seen: set[int] = set()

    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="INK_FUZZ_EXAMPLES" not in os.environ,
        database=None,
    )
    @given(bodies_of(schema, named))
    def check(made: dict[str, Any]) -> None:
        body = {**VALID[path], **{name: 2 for name in LIMITS if name in named}, **made}
        if path.startswith("/v1/"):
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            body.setdefault(limit, 2)
        for name in LIMITS:
            if isinstance(body.get(name), int) and body[name] > 3:
                body[name] = 3
        answer = http.post(path, content=dumped(body), headers={"content-type": "application/json"})
        seen.add(answer.status_code)
        assert str(answer.status_code) in operation["responses"], body
        assert answer.status_code < 500, body
        if answer.status_code >= 400:
            (error,) = answer.json().values()
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["message"]
            assert str(llm.llm.engine.folder) not in answer.text
        elif answer.headers["content-type"].startswith("text/event-stream"):
            blocks = answer.text.split("\n\n")
            told = [json.loads(block.split("data: ", 1)[1]) for block in blocks[:-1]
                    if not block.endswith("[DONE]")]  # fmt: skip
            assert not any(event.get("error") for event in told), body
        else:
            answer.json()
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0), body

    check()
    assert {200, 400} <= seen
