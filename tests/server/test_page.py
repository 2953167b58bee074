"""The page's files: of their types, open without a key, and nothing is loaded from elsewhere."""

import re

import httpx2
import pytest
from served import SETTINGS, Scripted

from inkrt.server.app import create_app


@pytest.mark.anyio
async def test_files(scripted: Scripted) -> None:
    llm, _ = scripted()
    transport = httpx2.ASGITransport(app=create_app(llm, SETTINGS))
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
        for path, kind in (("/", "html"), ("/page.js", "javascript"), ("/page.css", "css")):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert kind in answer.headers["content-type"]
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; ")
            assert "unsafe" not in policy
            assert (
                re.findall(r"https?://|//[a-z]+\.|innerHTML|insertAdjacentHTML", answer.text) == []
            )
            assert " style=" not in answer.text
            assert re.findall(r" on[a-z]+=", answer.text) == []
        assert (await client.get("/page.txt")).status_code == 401
