"""README.md and docs/ are true: commands parse and run, Python runs, links lead somewhere, quoted messages exist.

By default what is quick runs; WAMLAB_ALL_COMMANDS=1 runs the slower commands too and builds the documentation.
"""

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import tyro
from readme_blocks import PAGES, ROOT, anchors, blocks, commands, literals, prose, quoted_messages

from wamlab import cli

HAS_ALL = os.environ.get("WAMLAB_ALL_COMMANDS") == "1"
SHORT = "--train.num-steps 2 --train.batch-size 2 --evaluation.num-clips 2 --data.is-apart False"
pytestmark = [pytest.mark.timeout(900 if HAS_ALL else 300), pytest.mark.filterwarnings("default")]

# What is added to a command so that it runs at a tiny size; a later option goes before an earlier one.
QUICK = {
    "wamlab data info datasets/mine": "",
    "wamlab data check datasets/mine": "",
    "wamlab data check datasets/arm": "",
    "wamlab data stats datasets/mine --write": "",
    "wamlab data convert datasets/mine datasets/mine_v3 --version v3.0": "",
    "wamlab robot my_robot.toml --data datasets/mine": "2",  # the status: this robot is not that of the dataset
    "wamlab robot arm.toml --data datasets/arm": "",
    "wamlab runs ls --where train.learning_rate=1e-3": "",
    "wamlab runs compare tiny-a tiny-b": "",
    "wamlab runs export tiny-a": "",
    "wamlab show": "",
    "wamlab submit slurm tiny --nodes 2 --gpus 8": "",
    "wamlab simulate --lengths LIBERO-40-mix --workers 8": "--groups 2 --group-size 2 --seeds 1",
    "wamlab play --episodes 100": "--episodes 2",
}
SLOW = {  # with WAMLAB_ALL_COMMANDS=1 only
    "wamlab data make datasets/mixed --families reach push pick_place stack --episodes 400": "--episodes 8",
    "wamlab data make datasets/reach --families reach --episodes 6000 --tail-ticks 2": "--episodes 4",
    "wamlab train tiny --data.root datasets/mixed --model.layers 6 --train.num-steps 3000": SHORT,
    "wamlab train tiny --data.root datasets/mixed --model.layers 6 --train.num-steps 3000 --resume": (
        SHORT.replace("steps 2", "steps 3")
    ),
    "wamlab train tiny --data.root datasets/mixed --train.num-steps 3000": SHORT,
    "wamlab train tiny_long --data.root datasets/reach": SHORT,
    "wamlab play --episodes 200": "--episodes 2",
    "wamlab train tiny --data.num-threads None": SHORT,
    "wamlab train tiny --data.pool 8": SHORT,
    "wamlab train tiny --data.store-gib 50": SHORT + " --data.store-gib 0.1",
    "wamlab train tiny --data.cache-gib 8": SHORT,
    "wamlab train tiny --data.is-apart True": SHORT.removesuffix(" --data.is-apart False"),
    "wamlab train tiny --data.augment-on device": SHORT,
    "wamlab train tiny --data.on-error skip": SHORT,
    "wamlab train tiny --data.roots datasets/mine datasets/yours --data.weights 1 2": SHORT,
    "wamlab train tiny --robot-file arm.toml --data.root datasets/arm --train.num-steps 500": SHORT,
    "wamlab train tiny --speed.recompute tuned --speed.budget-gib 2": SHORT,
    "wamlab train tiny --speed.recompute '2 full, 2 keep'": SHORT,
    "wamlab encode tiny --features.num-variants 4 --robot.has-color-jitter --processes 2": (
        "--features.num-variants 1 --processes 1"
    ),
    "wamlab train tiny --features.num-variants 4 --robot.has-color-jitter --features.mode cached": (
        SHORT + " --features.num-variants 1"
    ),
    "wamlab score long --closed-loop": "--clips 4 --episodes 2 --videos 0",
}
PARSED = {  # and why they are not run
    "wamlab serve --port 8000": "serves until it is stopped; tests/test_serve_run.py does it",
    "wamlab data import-videos datasets/droid_clip --video exterior_image_1_left=a.mp4 "
    "--video exterior_image_2_left=b.mp4 --video wrist_image_left=c.mp4 --instruction 'pick up the cup'": (
        "needs a user's videos; tests/test_lerobot.py and others import some"
    ),
    "wamlab train tiny_video --data.root datasets/droid_clip": "needs these videos",
    "wamlab train tiny --data.roots datasets/mine datasets/yours --robot-file mine.toml,yours.toml": (
        "needs two users' robots; tests/test_mixed_recipe.py has some"
    ),
    "wamlab run notebooks/00_first_run.ipynb -p num_steps 3000 -f params.yaml": "minutes; tests/test_runs.py runs one",
    "wamlab sweep rates.yaml": "starts many processes; tests/test_runs.py runs some",
    "wamlab runs stop tiny-a": "needs a run that runs; tests/test_launch.py stops some",
    "wamlab train libero_5b_8gpu --data.root datasets/mine --processes 8": "needs 8 GPUs and published weights",
    "wamlab train tiny --processes 2 --train.batch-size 8": "minutes of starting; tests/test_shard.py trains so",
    "wamlab train tiny --train.batch-size 16 --resume": "goes on with what the command before it began",
    "wamlab ablate small_5b --rounds 2": "half an hour; tests/test_ablate.py runs a small one",
    "wamlab ablate tiny --data.root datasets/mixed --tricks 'compiled blocks' 'asynchronous loading'": (
        "compiles for minutes; tests/test_ablate.py runs a small one"
    ),
    "wamlab tune libero_5b_8gpu --budget 70GiB --devices 8xH100": "a minute; tests/test_tune_recipe.py tunes",
    "wamlab rl rl_tabletop_grpo --start long": "minutes; tests/test_rl_recipe.py post-trains",
    "wamlab rl rl_tabletop_grpo --start long --is-exact": "minutes; tests/test_rl_crash.py kills and goes on",
    "wamlab rl rl_tabletop_grpo --resume --is-exact": "minutes; tests/test_rl_crash.py kills and goes on",
    "wamlab score arm --closed-loop --env metaworld:reach-v3": (
        "needs the simulator and a run of its robot; tests/test_environments.py scores one on PushT"
    ),
    "wamlab parity a1,a2,a3 b1,b2,b3": "needs six trained runs; tests/test_parity.py compares some",
    "wamlab train droid_5b_lora_1gpu --robot-file my_robot.toml --data.root datasets/mine": "needs a GPU and weights",
    "wamlab weights inspect weights/DreamZero-DROID": "needs published weights; tests/test_weights.py makes small ones",
    "wamlab weights convert weights/DreamZero-DROID out --layout diffusers --dtype bfloat16": "needs published weights",
    "make demo": "minutes; the demo of every release is measured, see docs/training.md",
    "make test": "this suite",
    "make lab": "serves until it is stopped; tests/test_browser.py runs notebooks in a real JupyterLab",
}
NOT_RUN = {'captured(step, device="cuda"': "a CUDA graph needs a GPU; tests/gpu/run.sh captures"}
SMALLER = {  # a live chart needs a notebook
    "watch(run)": "print(run.folder)",
    "num_steps=1000": "num_steps=1",
    "num_steps=200": "num_steps=1",
    "tiny()": "short(tiny())",
}


class Parsed(BaseException):
    """The real command line understood the words."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make what the commands find in a user's folder: datasets, robot files, runs with the names that pages use."""
    folder = tmp_path_factory.mktemp("reader")
    for block in blocks():
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.kind == "toml":
            (folder / "my_robot.toml").write_text(block.text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["data", "make", "datasets/mine", "--episodes", "8", "--version", "v2.1"]) == 0
        for name in ("yours", "tabletop"):
            shutil.copytree("datasets/mine", f"datasets/{name}")
        shutil.copy(ROOT / "wamlab/data/robots/tabletop.toml", "mine.toml")
        shutil.copy("mine.toml", "yours.toml")
        words = shlex.split(
            f"train tiny --name long --model.layers 1 {SHORT} --train.num-steps 1 --data.held-out-fraction 0.5"
        )
        assert cli.main(words) == 0
        (run,) = Path("runs").iterdir()
        for name in ("tiny-a", "tiny-b"):
            shutil.copytree(run, f"runs/2026-01-01-{name}-000000")
    return folder


def run_python(page: str, folder: Path) -> None:
    """Run a page's Python, block after block in one namespace, at a tiny size."""
    names: dict[str, Any] = {"__name__": page, "short": shortened}
    for block in blocks():
        if block.page == page and block.kind == "python":
            text = block.text
            if any(sign in text for sign in NOT_RUN):
                text = "\n".join(line for line in text.splitlines() if line.startswith(("from ", "import ")))
            for long, short in SMALLER.items():
                text = re.sub(rf"(?<![\w.]){re.escape(long)}", short, text)
            exec(compile(text, f"{folder}/{page}.py", "exec"), names)


def shortened(recipe: Any) -> Any:
    """Return a recipe that takes a step of two samples."""
    from dataclasses import replace

    data = replace(recipe.data, is_apart=False)
    train = replace(recipe.train, num_steps=1, batch_size=2)
    model = replace(recipe.model, layers=1)
    return replace(recipe, data=data, train=train, model=model, evaluation=replace(recipe.evaluation, num_clips=2))


def test_every_command_is_run_or_says_why_not() -> None:
    found, known = set(commands()), [*QUICK, *SLOW, *PARSED]
    assert not found - set(known), "run it, or say why it is only parsed"
    assert not set(known) - found, "no page has it any more"
    assert len(known) == len(set(known))


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("wamlab")])
def test_the_command_line_understands(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tyro.cli

    def only_parsed(what: Any, **options: Any) -> NoReturn:
        is_function = not isinstance(what, type)
        real(functools.wraps(what)(lambda *_, **__: None) if is_function else what, **options)
        raise Parsed

    monkeypatch.chdir(place)
    monkeypatch.setattr(tyro, "cli", only_parsed)
    with pytest.raises(Parsed):
        cli.main(shlex.split(command)[1:])


@pytest.mark.parametrize("command", [c for c in commands() if c in QUICK or (HAS_ALL and c in SLOW)])
def test_the_command_runs(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    if "arm" in command and not Path("datasets/arm").exists():
        run_python("add_dataset", place)
    added = (QUICK | SLOW)[command].split()
    status = int(added.pop()) if added[-1:] == ["2"] and len(added) == 1 else 0
    assert cli.main([*shlex.split(command)[1:], *added]) == status


@pytest.mark.parametrize("page", sorted({block.page for block in blocks() if block.kind == "python"}))
def test_the_python_of_a_page_runs(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    shutil.rmtree("datasets/arm", ignore_errors=True)
    run_python(page, place)


def test_installing_and_making_name_what_there_is() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"wamlab\[(\w+)\]", text)) <= extras.keys()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([a-z]+)", text)) <= set(targets)
    for path in re.findall(r"`((?:tests|notebooks|experiments|wamlab)/[\w./-]+\.\w+)", text):
        assert (ROOT / path).exists(), path


def test_commands_within_sentences_exist() -> None:
    known = {name.split()[0] for name in (*cli.COMMANDS, *cli.WITH_RECIPE)}
    for page in PAGES:
        for word in re.findall(r"`wamlab ([a-z]+)", prose(page)):
            assert word in known, f"{page.name}: wamlab {word}"


def generator() -> ModuleType:
    """Return what writes the generated pages."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    made = {"cli.md", "reference/index.md", *(f"reference/{name}.md" for name in generator().all_places())}
    made = {ROOT / "docs" / name for name in made}
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose(page)):
        path, _, anchor = "".join(target).partition("#")
        if path.startswith("http"):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists() or file in made, f"{page.name}: {path}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {path}#{anchor}"


def test_every_module_and_command_has_its_place_in_the_reference() -> None:
    made = generator()
    listed = {path for place in made.all_places() for path in made.modules_of(place)}
    assert {p for p in (ROOT / "wamlab").rglob("*.py") if not p.name.startswith("_")} <= listed
    assert {name for name, _ in made.commands()} == {*cli.COMMANDS, *cli.WITH_RECIPE}


FOREIGN = {"cannot find video stream with wanted index: -1": ("decord", "libdecord.so", 30)}


@pytest.mark.parametrize(("message", "after"), quoted_messages())
def test_quoted_messages_exist(message: str, after: str) -> None:
    if message in FOREIGN:
        package, file, length = FOREIGN[message]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            pytest.skip(f"{package} is not installed")
        assert message[:length].encode() in (Path(spec.origin).parent / file).read_bytes()
    elif message.startswith("DevToolsActivePort"):
        driver = shutil.which("chromedriver")
        if driver is None:
            pytest.skip("chromedriver is not installed")
        assert message.encode() in Path(driver).read_bytes()
    elif "not checked here" not in after:
        pieces = [piece.strip() for piece in re.split("…", message) if len(piece.strip()) > 3]
        assert pieces and all(piece in literals() for piece in pieces), message


@pytest.mark.skipif(not HAS_ALL, reason="half a minute")
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    assert (tmp_path / "reference" / "types.html").exists()
