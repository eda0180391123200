"""Pages that nobody writes by hand: the command line from its own help, the modules from their docstrings."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "wamlab"
GROUND = ("types", "flow", "tensors", "errors")
ROOMS = ("model", "codec", "data", "speed", "sim", "rl", "score", "serve", "lab", "recipes")
HALLWAY = ("train", "checkpoint", "checkpoint_folder", "sharded_checkpoint", "cli")
TRAINED = "tiny"  # the recipe whose fields stand for those of all


def modules_of(place: str) -> list[Path]:
    """Return the public modules of a room, or the one of a file on the ground or in the hallway."""
    if (PACKAGE / f"{place}.py").exists():
        return [PACKAGE / f"{place}.py"]
    return [path for path in sorted((PACKAGE / place).rglob("*.py")) if not path.name.startswith("_")]


def all_places() -> list[str]:
    """Return every part of the package that has a page, in the order of the floors."""
    return [*GROUND, *ROOMS, *HALLWAY]


def module_name(path: Path) -> str:
    """Return a module's dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def first_sentence(path: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]


def module_page(place: str) -> str:
    """Return the page of a room: each module with what its docstrings say."""
    lines = [f"# {place}", ""]
    for path in modules_of(place):
        name = module_name(path)
        lines += [f"## {name} {{#module-{name.replace('.', '-')}}}", "", f"::: {name}", ""]
    return "\n".join(lines)


def module_index() -> str:
    """Return the list of all modules with their first sentences."""
    lines = ["# Modules", ""]
    for place in all_places():
        lines += [f"## [{place}]({place}.md)", "", "| module | |", "|---|---|"]
        for path in modules_of(place):
            name = module_name(path)
            lines.append(f"| [{name}]({place}.md#module-{name.replace('.', '-')}) | {first_sentence(path)} |")
        lines.append("")
    return "\n".join(lines)


def help_of(words: list[str]) -> str:
    """Return what `wamlab WORDS --help` prints, 100 columns wide and without colours."""
    from wamlab.cli import main

    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()).rstrip()


def commands() -> list[tuple[str, list[str]]]:
    """Return every command with the words that ask for its help."""
    from wamlab.cli import COMMANDS, WITH_RECIPE

    recipes = {"rl": ["rl", "rl_tabletop_grpo"], "submit": ["submit", "slurm", TRAINED]}
    own = {name: recipes.get(name, [name, TRAINED]) for name in WITH_RECIPE}
    return [*own.items(), *((name, name.split()) for name in COMMANDS)]


def command_page() -> str:
    """Return the page of all commands."""
    lines = ["# Command line", "", "What the commands say of themselves.", "", "```text", help_of([]), "```", ""]
    for name, words in commands():
        lines += [f"## wamlab {name}", "", "```text", help_of(words), "```", ""]
    return "\n".join(lines)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path below docs/ and the text of every generated page."""
    yield "cli.md", command_page()
    yield "reference/index.md", module_index()
    for place in all_places():
        yield f"reference/{place}.md", module_page(place)


def on_config(config: Any) -> Any:
    """Put the modules' pages into the navigation (mkdocs calls this)."""
    listed = [{"Modules": ["reference/index.md", *({place: f"reference/{place}.md"} for place in all_places())]}]
    for section in config.nav:
        for name, entries in section.items():
            if name == "Reference":
                section[name] = [entry for entry in entries if entry != "reference/"] + listed
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add the generated pages (mkdocs calls this)."""
    from mkdocs.structure.files import File

    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files
