"""`wamlab run`: a notebook as a batch job, into a run folder: the executed notebook, its parameters, an HTML page."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from wamlab.errors import InputError
from wamlab.lab.records import write_whole
from wamlab.lab.run import Run, create_run
from wamlab.lab.search import value_of

# YAML 1.1, which PyYAML reads, takes 1e-4 for a text; this is the number of YAML 1.2.
SECRET_NAME = re.compile(r"(^|_)(api_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
YAML_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


@dataclass(frozen=True)
class Parameter:
    """A name that a notebook's cell tagged ``parameters`` gives a value."""

    name: str
    kind: str  # of its annotation, "" without one
    default: str  # as it is written

    def read(self, value: Any) -> Any:
        """Return a value as this parameter has it; a text is read first. Raises InputError for another kind."""
        found = value_of(value) if isinstance(value, str) and self.kind not in ("str", "") else value
        kind = KINDS.get(self.kind)
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            found = float(found)
        if kind is not None and (not isinstance(found, kind) or (kind is not bool and isinstance(found, bool))):
            raise InputError(f"parameter {self.name} is {value!r}, the notebook wants {self.kind}: give one")
        return found


def run_command(
    notebook: Positional[Path],
    p: Annotated[UseAppendAction[tuple[tuple[str, str], ...]], arg(name="parameter", aliases=["-p"])] = (),
    file: Annotated[Path | None, arg(aliases=["-f"])] = None,
    runs: Path = Path("runs"),
    name: str = "",
    kernel: str = "",
    cell_timeout_s: int | None = None,
    is_listed: Annotated[bool, arg(name="list")] = False,
) -> int:
    """Run a notebook as a batch job into a run folder of its own; where it works is this folder.

    Args:
        notebook: to run; it needs a cell tagged "parameters" for -p and -f
        p: a parameter and its value; several times for several
        file: YAML of parameters; -p goes before it
        runs: folder of the runs
        name: of the run; the notebook's if not given
        kernel: to run it in; the one that the notebook names if not given
        cell_timeout_s: after which a cell is given up
        is_listed: print the parameters and run nothing
    """
    known = read_parameters(notebook)
    if is_listed:
        for parameter in known.values():
            print(f"{parameter.name}: {parameter.kind or 'any'} = {parameter.default}")
        return 0
    given = check_parameters(known, (_read_yaml(file) if file else {}) | dict(p))
    run, error = run_notebook(notebook, given, runs, name=name, kernel=kernel, cell_timeout_s=cell_timeout_s)
    print(f"{run.folder}: {run.state}\nreport: {(run.folder / 'notebook.html').resolve()}")
    if error:
        print(error)
    return 1 if error else 0


def read_parameters(notebook: Path) -> dict[str, Parameter]:
    """Return the parameters of a notebook; InputError for a file that is none."""
    import nbformat

    if not notebook.is_file():
        raise InputError(f"{notebook} is no file: give a notebook")
    try:
        cells = nbformat.read(notebook, as_version=4).cells
    except (ValueError, AttributeError) as error:  # of nbformat: not JSON, or no notebook
        raise InputError(f"{notebook} is no notebook ({str(error).splitlines()[0][:80]})") from error
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    found: dict[str, Parameter] = {}
    source = re.sub(r"^[%!].*$", "", tagged[0].source if tagged else "", flags=re.MULTILINE)  # of IPython
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        where = f"line {error.lineno} of the cell tagged parameters in {notebook}"
        raise InputError(f"{where} is no Python ({error.msg}): mend it") from error
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = ast.unparse(node.value) if node.value else ""
            found[node.target.id] = Parameter(node.target.id, ast.unparse(node.annotation), default)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = Parameter(node.targets[0].id, "", ast.unparse(node.value))
    return found


def check_kernel(notebook: Path, kernel: str = "") -> None:
    """Refuse a kernel that is not installed, before there is a run; without a name, that of the notebook."""
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager

    told = nbformat.read(notebook, as_version=4).metadata.get("kernelspec", {}).get("name", "")
    installed = KernelSpecManager().find_kernel_specs()
    if (kernel or told) not in installed:
        wrong = f'there is no kernel "{kernel or told}"' if kernel or told else f"{notebook} names no kernel"
        raise InputError(f"{wrong}: give one with --kernel, of {', '.join(sorted(installed)) or 'those you install'}")


def check_parameters(known: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was given in the kinds that the notebook wants; InputError for a name that it has not."""
    for name in given:
        if SECRET_NAME.search(name):
            raise InputError(f'"{name}" would be kept in the run folder: give secrets in environment variables')
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f'did you mean "{near[0]}"?' if near else f"it has {', '.join(known) or 'none'}"
            raise InputError(f'the notebook has no parameter "{name}": {hint}')
    return {name: known[name].read(value) for name, value in given.items()}


def run_notebook(
    notebook: Path,
    parameters: Mapping[str, Any],
    root: Path = Path("runs"),
    *,
    name: str = "",
    kernel: str = "",
    cell_timeout_s: int | None = None,
) -> tuple[Run, str]:
    """Execute a notebook into ``notebook.ipynb`` and ``notebook.html`` of a new run; return it and a cell's error.

    The error is "" if all went well; the files are written in any case, also after an interrupt, which is raised.
    """
    check_kernel(notebook, kernel)
    if cell_timeout_s is not None and cell_timeout_s < 1:
        raise InputError(f"--cell-timeout-s is {cell_timeout_s}: give at least 1")
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    run = create_run(root, name or notebook.stem, {"notebook": str(notebook), "parameters": dict(parameters)})
    target, error = run.folder / "notebook.ipynb", ""
    options: dict[str, Any] = {"kernel_name": kernel} if kernel else {}
    with run:
        try:
            papermill.execute_notebook(
                str(notebook), str(target), dict(parameters), progress_bar=False, store_widget_state=False,
                execution_timeout=cell_timeout_s, report_mode=False, **options,
            )  # fmt: skip
        except PapermillExecutionError as failure:
            trace = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(failure.traceback))
            error = f"cell {failure.exec_count} failed: {failure.ename}: {failure.evalue}"
            run.finish("failed", error=error.splitlines()[0])
            error = f"{trace}\n{error}"
        except (DeadKernelError, CellTimeoutError) as failure:
            is_dead = isinstance(failure, DeadKernelError)
            error = "the kernel died in a cell" if is_dead else f"a cell took more than {cell_timeout_s} s"
            error += f"; {target} shows how far it came"
            run.finish("failed", error=error)
        finally:
            if target.exists():
                write_whole(run.folder / "notebook.html", notebook_html(target))
    return run, error


def notebook_html(notebook: Path) -> str:
    """Return a notebook as one page that asks no other host for anything."""
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter(embed_images=True, mathjax_url="", require_js_url="").from_filename(str(notebook))
    return page


def _read_yaml(path: Path) -> dict[str, Any]:
    values = read_yaml(path)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"{path} holds no names with values: write lines such as num_steps: 100")
    return values


def read_yaml(path: Path) -> Any:
    """Return what a YAML file says, with 1e-4 as a number; InputError with the line of what is no YAML."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads floats as YAML 1.2 does."""

    Loader.yaml_implicit_resolvers = {key: [*pairs] for key, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", YAML_FLOAT, [*"-+.0123456789"])
    try:
        return yaml.load(path.read_text("utf-8"), Loader)  # nosec B506  # a SafeLoader with one more form of number
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # e.g. a number of thousands of digits
        raise InputError(f"{path} is no YAML: {' '.join(str(error).split())[:200]}") from error
