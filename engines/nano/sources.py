"""Plain text for training, from Debian packages whose text is free to redistribute.

Needs `apt-get` with package lists of Debian 12 and `dpkg-deb`; nothing is installed. What is in the
cache folder is not fetched again.
"""

import gzip
import html.parser
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Source:
    """A package and how to read it.

    Attributes:
        package: name of the binary package with the text.
        licence: of the text, as the package's copyright file says it.
        what: a few words for the model card.
        read: gives the documents of the folder that the packages were unpacked into.
        needs: further packages that reading needs.
    """

    package: str
    licence: str
    what: str
    read: Callable[[Path], Iterator[str]]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """Documents of one source, and the version they are of."""

    source: Source
    version: str
    documents: list[str]


class _Plain(html.parser.HTMLParser):
    """Collects text: blocks become lines, what is for browsers is dropped."""

    BLOCKS = frozenset(
        [
            "p",
            "div",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "h6",
            "li",
            "tr",
            "pre",
            "table",
            "ul",
            "ol",
            "dl",
            "dt",
            "dd",
            "br",
            "blockquote",
            "section",
        ]
    )
    DROPPED = frozenset({"script", "style", "head", "nav", "svg"})

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._dropped = 0
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self._dropped += tag in self.DROPPED
        self._pre += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._dropped -= tag in self.DROPPED and self._dropped > 0
        self._pre -= tag == "pre" and self._pre > 0
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))


def plain_text(page: str) -> str:
    """Text of an HTML page."""
    parser = _Plain()
    parser.feed(page)
    parser.close()
    return "".join(parser.parts)


def tidy(text: str) -> str:
    """No trailing spaces, no control characters, at most one empty line in a row."""
    text = re.sub(r"[^\S\n]+\n", "\n", text.replace("\r\n", "\n"))
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ufffd\ue000-\uf8ff]", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _pages(folder: Path, pattern: str, skip: str = r"(?!)") -> Iterator[str]:
    for path in sorted(folder.glob(pattern)):
        if not path.is_symlink() and not re.search(skip, path.name):
            page = path.read_bytes().decode("utf-8", "replace")
            yield plain_text(re.sub(r'(?s)<div class="nav(?:header|footer)">.*?</div>', "", page))


def _python(root: Path) -> Iterator[str]:
    folder = root / "usr/share/doc/python3.11/html/_sources"
    for path in sorted(folder.rglob("*.rst.txt")):
        text = path.read_text(encoding="utf-8")
        # The licences and the list of all changes are no prose.
        if path.name not in ("license.rst.txt", "changelog.rst.txt"):
            yield re.sub(r":[a-z:]+:`[~!]?([^`<]*?)(?: <[^`]*>)?`", r"`\1`", text)


def _postgresql(root: Path) -> Iterator[str]:
    folder = root / "usr/share/doc/postgresql-doc-15/html"
    yield from _pages(folder, "*.html", r"^(bookindex|features-sql|index|release)")


def _sqlite(root: Path) -> Iterator[str]:
    folder = root / "usr/share/doc/sqlite3"
    skip = r"backlink|crossref|keyword|matrix|requirements|sitemap|toc|changes"
    for pages in (_pages(folder, "*.html", skip), _pages(folder / "c3ref", "*.html")):
        for page in pages:
            menu, end, rest = page.partition("Purchase")
            yield re.sub(r"^[^\n]*\n(?:\s*(?:Search|[A-Z]\w+)?\n)*", "", rest) if end else menu


# Where the text of a page begins, and what follows it: themes of Sphinx and of Node.js.
_MAIN = re.compile(
    r"<(?:div|main|section|article)[^>]*"
    r'(?:role="main"|class="body"|class="bd-article|id="docs-content"|id="bd"|id="apicontent")[^>]*>'
)
_BEHIND = re.compile(
    r'<div class="(?:sphinxsidebar|clearer|footer|related|nav-|prev-next)|<footer|'
    r'<div[^>]*id="(?:sidebar|footer|ft)"'
)
# Lists of names and of changes, and listings of source code.
_NO_PROSE = re.compile(
    r"genindex|modindex|search|whatsnew|changelog|changes|releases?\b|gallery|_modules|/all\.html"
)


def _manual(root: Path) -> Iterator[str]:
    """HTML pages of a manual; only their main part."""
    for path in sorted((root / "usr/share/doc").rglob("*.html")):
        if path.is_symlink() or _NO_PROSE.search(str(path.relative_to(root))):
            continue
        page = path.read_bytes().decode("utf-8", "replace")
        if begin := _MAIN.search(page):
            end = _BEHIND.search(page, begin.end())
            text = plain_text(page[begin.end() : end.start() if end else None])
            yield text.replace("\N{PILCROW SIGN}", "").replace("[source]", "")


def _bible(root: Path) -> Iterator[str]:
    # The text is packed in a way of its own, which the package's reader knows.
    result = subprocess.run(
        [root.absolute() / "usr/bin/bible", "-f", "gen1:1-rev22:21"],
        cwd=root / "usr/lib",
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    chapters: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        place, _, verse = line.partition(" ")
        chapters.setdefault(place.split(":")[0], []).append(verse)
    for verses in chapters.values():
        yield "\n".join(verses)


def _austen(root: Path) -> Iterator[str]:
    data = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    while data:  # a size, then a compressed object, for every novel
        unpack = zlib.decompressobj()
        novel = _r_strings(unpack.decompress(data[4:]))
        data = unpack.unused_data
        yield from re.split(r"\n(?=(?:CHAPTER|Chapter) )", "\n".join(novel))


def _r_strings(data: bytes) -> list[str]:
    """Strings of a serialised character vector of R (format 3, XDR)."""
    start = 14 + 4 + int.from_bytes(data[14:18])  # after the header and the encoding's name
    if data[:2] != b"X\n" or data[start + 3] != 16:
        raise ValueError("the novels are not a character vector of R in format 3")
    count = int.from_bytes(data[start + 4 : start + 8])
    at, lines = start + 8, []
    for _ in range(count):
        size = int.from_bytes(data[at + 4 : at + 8])
        lines.append(data[at + 8 : at + 8 + size].decode("utf-8", "replace"))
        at += 8 + size
    return lines


def _dictionary(name: str) -> Callable[[Path], Iterator[str]]:
    def read(root: Path) -> Iterator[str]:
        path = root / f"usr/share/dictd/{name}.dict.dz"
        text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        entries = re.split(r"\n(?=\S)", text)
        for first in range(0, len(entries), 20):
            yield "\n".join(entries[first : first + 20])

    return read


def _cfi(root: Path) -> Iterator[str]:
    folder = root / "usr/share/doc/cfi-en/html"
    for path in sorted(folder.glob("*web.htm")):
        yield plain_text(path.read_text(encoding="latin-1"))


def _dhammapada(root: Path) -> Iterator[str]:
    path = root / "usr/share/display-dhammapada/dhammapada-english-transl.txt"
    yield path.read_text(encoding="utf-8", errors="replace")


SOURCES = (
    Source("python3.11-doc", "PSF-2.0", "documentation of Python", _python),
    Source("postgresql-doc-15", "PostgreSQL", "documentation of PostgreSQL", _postgresql),
    Source("sqlite3-doc", "public domain", "documentation of SQLite", _sqlite),
    Source("python-django-doc", "BSD-3-Clause", "documentation of Django", _manual),
    Source("python-pandas-doc", "BSD-3-Clause", "documentation of pandas", _manual),
    Source("python-scipy-doc", "BSD-3-Clause", "documentation of SciPy", _manual),
    Source("python-scrapy-doc", "BSD-3-Clause", "documentation of Scrapy", _manual),
    Source("python-sklearn-doc", "BSD-3-Clause", "documentation of scikit-learn", _manual),
    Source("python-sqlalchemy-doc", "MIT", "documentation of SQLAlchemy", _manual),
    Source("python-statsmodels-doc", "BSD-3-Clause", "documentation of statsmodels", _manual),
    Source("python-sympy-doc", "BSD-3-Clause", "documentation of SymPy", _manual),
    Source("python-tornado-doc", "Apache-2.0", "documentation of Tornado", _manual),
    Source("python-werkzeug-doc", "BSD-3-Clause", "documentation of Werkzeug", _manual),
    Source("nodejs-doc", "MIT", "documentation of Node.js", _manual),
    Source("bible-kjv-text", "public domain (1611)", "King James Bible", _bible, ("bible-kjv",)),
    Source(
        "r-cran-janeaustenr", "MIT; novels in the public domain", "Jane Austen, novels", _austen
    ),
    Source("dict-jargon", "public domain", "the Jargon File", _dictionary("jargon")),
    Source(
        "dict-devil", "public domain (1911)", "Bierce, Devil's Dictionary", _dictionary("devil")
    ),
    Source("cfi-en", "public domain", "Walleij, Copyright Does Not Exist", _cfi),
    Source("display-dhammapada", "public domain (text)", "the Dhammapada", _dhammapada),
)


def load(cache: Path) -> list[Text]:
    """Documents of all sources, in a fixed order; missing packages are fetched into the cache.

    Raises:
        FileNotFoundError: apt-get or dpkg-deb is missing.
        RuntimeError: a package cannot be fetched.
    """
    cache.mkdir(parents=True, exist_ok=True)
    texts = []
    for source in SOURCES:
        root = cache / "unpacked" / source.package
        version = ""
        for package in (*source.needs, source.package):
            path = _package(package, cache)
            _need("dpkg-deb")
            root.mkdir(parents=True, exist_ok=True)
            subprocess.run(["dpkg-deb", "-x", path, root], check=True)
            version = path.name.split("_")[1].replace("%3a", ":")
        documents = [text for page in source.read(root) if len(text := tidy(page)) >= 200]
        texts.append(Text(source, version, documents))
    return texts


def _package(package: str, cache: Path) -> Path:
    found = sorted(cache.glob(f"{package}_*.deb"))
    if not found:
        _need("apt-get")
        command = ["apt-get", "download", "-q", package]
        result = subprocess.run(command, cwd=cache, capture_output=True, text=True, check=False)
        found = sorted(cache.glob(f"{package}_*.deb"))
        if result.returncode or not found:
            raise RuntimeError(
                f"cannot fetch the Debian package {package}: {result.stderr.strip()}; run "
                f"`apt-get update` first, or put {package}_*.deb of Debian 12 into {cache}"
            )
    return found[-1]


def _need(program: str) -> None:
    if shutil.which(program) is None:
        raise FileNotFoundError(
            f"{program} is missing; build the data on Debian 12, where the text comes from"
        )
