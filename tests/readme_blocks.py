"""What README.md and docs/ ask a reader to type: commands, Python, files, links, quoted messages."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r'^```(\w*)(?: title="(.*?)")?\n(.*?)^```$', re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    kind: str
    title: str
    text: str


def blocks() -> Iterator[Block]:
    """Yield every block of every page in reading order."""
    for page in PAGES:
        for kind, title, text in FENCE.findall(page.read_text()):
            yield Block(page.stem, kind, title, text)


def commands() -> list[str]:
    """Return every command line once: continuations joined, comments cut off, joint commands parted."""
    lines: dict[str, None] = {}
    for block in blocks():
        if block.kind == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.join(shlex.split(line, comments=True))
                lines |= dict.fromkeys(part.strip() for part in words.split("'&&'") if part.strip())
    return list(lines)


def prose(page: Path) -> str:
    """Return a page without its blocks."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs both make them of plain words."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@cache
def literals() -> str:
    """Return every literal text of the package, pieces of one formatted text apart."""
    found = []
    for module in (ROOT / "wamlab").rglob("*.py"):
        nodes = ast.walk(ast.parse(module.read_text()))
        found += [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\n".join(found)


def quoted_messages() -> list[tuple[str, str]]:
    """Return every message that the troubleshooting page quotes, with the line that follows it."""
    return re.findall(r"^> `(.*)`\n\n(.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
