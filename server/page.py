"""The page at `/`: a chat in the browser, of three files that load nothing from anywhere else."""

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

router = APIRouter(include_in_schema=False)
_FOLDER = Path(__file__).parent / "page"
PATHS = ("/", "/page.js", "/page.css")
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def index() -> FileResponse:
    """The page."""
    return FileResponse(_FOLDER / "index.html", headers=_HEADERS)


async def script() -> FileResponse:
    """What it does."""
    return FileResponse(_FOLDER / "page.js", headers=_HEADERS)


async def style() -> FileResponse:
    """How it looks."""
    return FileResponse(_FOLDER / "page.css", headers=_HEADERS)


for _path, _answer in zip(PATHS, (index, script, style), strict=True):
    router.get(_path)(_answer)
