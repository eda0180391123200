"""The public names and signatures of the package, read from its source; as a script it takes the picture anew.

    python tests/public_api.py    # after a line in CHANGELOG.md that says what changed

A name without a leading underscore, in a module without one, is public: functions, classes, their methods and fields.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = Path("tests/public_api.txt")
HEAD = "# CHANGELOG.md when this was taken: "
ADVICE = (
    "the public names of the package changed: write a line in CHANGELOG.md that says so, then run "
    "`python tests/public_api.py`"
)


def list_names(package: Path) -> list[str]:
    """Return a line for each public function, class, method and field below a package folder, sorted."""
    lines = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if not any(part.startswith("_") and part != "__init__" for part in parts):
            module = ".".join(part for part in parts if part != "__init__")
            lines += _names_in(ast.parse(path.read_text("utf-8")), module)
    return sorted(lines)


def _names_in(node: ast.Module | ast.ClassDef, place: str) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(item.name):
            yield f"{place}.{item.name}({ast.unparse(item.args)})"
        elif isinstance(item, ast.ClassDef) and _is_public(item.name):
            yield f"{place}.{item.name}({', '.join(map(ast.unparse, item.bases))})"
            yield from _names_in(item, f"{place}.{item.name}")
        elif isinstance(node, ast.ClassDef) and isinstance(item, ast.AnnAssign):
            name = ast.unparse(item.target)
            if _is_public(name):
                yield f"{place}.{name}: {ast.unparse(item.annotation)}"


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__init__"


def digest(root: Path) -> str:
    """Return a fingerprint of the changelog."""
    return hashlib.sha256((root / "CHANGELOG.md").read_bytes()).hexdigest()[:16]


def differences(root: Path) -> list[str]:
    """Return what the package has and the picture has not (+), and the other way round (-)."""
    kept = set((root / SNAPSHOT).read_text("utf-8").splitlines()[1:])
    names = set(list_names(root / "wamlab"))
    return [f"+ {name}" for name in sorted(names - kept)] + [f"- {name}" for name in sorted(kept - names)]


def write(root: Path) -> str:
    """Take the picture anew; return why not, where names changed and the changelog did not."""
    path = root / SNAPSHOT
    if path.exists() and differences(root) and path.read_text("utf-8").startswith(HEAD + digest(root) + "\n"):
        return "names changed and CHANGELOG.md did not: write a line in it first"
    path.write_text("\n".join([HEAD + digest(root), *list_names(root / "wamlab")]) + "\n", "utf-8")
    return ""


if __name__ == "__main__":
    sys.exit(write(ROOT) or None)
