"""What SECURITY.md promises: hostile words, paths, links, files and pages do nothing but show themselves."""

import json
import re
import tarfile
from pathlib import Path

import nbformat
import numpy as np
import pytest
from recordings import edit_json, single_camera_episode

from wamlab.cli import main
from wamlab.data.lerobot import open_dataset
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.chart import text_at
from wamlab.lab.comparison import Comparison, write_comparison
from wamlab.lab.dataset_browser import DatasetBrowser
from wamlab.lab.environment import without_secrets
from wamlab.lab.launch import Launched
from wamlab.lab.report import report_html
from wamlab.lab.run import Run, create_run, open_run
from wamlab.lab.score_page import _film
from wamlab.lab.table import Table
from wamlab.recipes.notebook import check_parameters, notebook_html

HOSTILE = "<img src=x onerror=alert(1)>"
PNG = b"\x89PNG\r\n\x1a\nhidden"
PACKAGE = Path(__file__).parents[1] / "wamlab"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run whose every text is a piece of HTML."""
    config = {"name": HOSTILE, HOSTILE: [HOSTILE], "train": {"num_steps": 3}}
    with create_run(tmp_path / "runs", "hostile", config) as made:
        made.log({"step": 1, "loss": 1.0, "samples_per_s": 1.0, "split_s": {HOSTILE: 1.0}, "instruction": HOSTILE})
        made.log_evaluation({"step": 1, "held_out_loss": 1.0, HOSTILE: 1.0, "instruction": HOSTILE})
        made.finish("failed", {HOSTILE: HOSTILE}, error=HOSTILE)
    return open_run(made.folder)


def test_pages_show_hostile_text_as_text(run: Run, tmp_path: Path) -> None:
    with create_run(tmp_path / "runs", "other", {"name": "other", HOSTILE: 1}) as other:
        other.log({"step": 1, "loss": 1.0})
    compared = Comparison((run, open_run(other.folder)))
    episode = {"episode": 0, "task": HOSTILE, "seconds": 1.0, "frames": 10, HOSTILE: HOSTILE}
    browser = DatasetBrowser([episode])
    pages = {
        "report": report_html(run),
        "comparison": write_comparison(compared, tmp_path / "page.html").read_text(),
        "shown comparison": compared._repr_html_(),
        "card": run.chart().svg,
        "table": Table([{HOSTILE: HOSTILE}])._repr_html_(),
        "chart": text_at(0, 0, HOSTILE, "title"),
        "launched": Launched(Path(HOSTILE), None, run)._repr_html_(),
        "browser": browser._describe(0) + browser.index,
        "film": _film({"is_success": True, "file": "a.mp4", "instruction": HOSTILE, "seed": 1, "ticks": 1}, films(run)),
    }
    for name, page in pages.items():
        assert "<img src=x" not in page, name
    for name in ("report", "comparison", "table", "browser", "film"):
        assert "&lt;img src=x" in pages[name], f"{name} does not show the words at all"


def films(run: Run) -> Path:
    """Return the run's folder with a film in it."""
    (run.folder / "a.mp4").write_bytes(b"film")
    return run.folder


@pytest.mark.parametrize("name", ["../out.mp4", "/etc/hostname", "link.mp4"])
def test_pages_put_in_no_file_from_outside_the_run(run: Run, name: str) -> None:
    secret = run.folder.parent / "out.mp4"
    secret.write_bytes(b"secret")
    (run.folder / "link.mp4").symlink_to(secret)
    film = {"is_success": True, "file": name, "instruction": "go", "seed": 1, "ticks": 1}
    with pytest.raises(ValueError, match="is no film of the run"):
        _film(film, run.folder)


def test_reports_put_in_no_picture_from_outside_the_run(run: Run) -> None:
    (run.folder.parent / "secret.png").write_bytes(PNG)
    (run.pictures / "own.png").write_bytes(PNG)
    (run.pictures / "stolen.png").symlink_to(run.folder.parent / "secret.png")
    page = report_html(run)
    assert "own" in page and "stolen" not in page and page.count("data:image/png") == 1


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x", "..", "", ".hidden", "a\0b"])
def test_names_of_runs_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(InputError):
        create_run(tmp_path / "runs", name, {})
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "runs"]


def test_an_archive_of_a_run_holds_its_own_files_under_its_own_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (run.folder / "link").symlink_to(tmp_path / "secret")
    (run.folder / "linked").symlink_to(tmp_path)
    packed = tmp_path / "packed.tar.gz"
    assert main(["runs", "export", run.name, "--root", str(run.folder.parent), "--out", str(packed)]) == 0
    with tarfile.open(packed) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    assert all(Path(m.name).parts[0] == run.name and ".." not in Path(m.name).parts for m in members)


@pytest.mark.parametrize(
    "template",
    [
        "../../{episode_index:06d}.parquet", "/etc/{episode_index}", "{episode_index.__class__}",
        "{episode_index!r}", "{episode_index:0999999999d}", "{video_key[0]}", "a\0{episode_index}",
    ],
)  # fmt: skip
def test_templates_of_datasets_stay_inside_and_look_at_nothing(tmp_path: Path, template: str) -> None:
    root = write_dataset([single_camera_episode(0, 6)], tmp_path / "set", version="v2.1")
    for key in ("data_path", "video_path"):
        edit_json(root / "meta/info.json", lambda info, key=key: info.update({key: template}))
    opened = open_dataset(root)
    with pytest.raises(InputError, match="template"):
        opened.rows(0, "action")
    with pytest.raises(InputError, match="template"):
        opened.video_span(0, "observation.images.top")


def test_cameras_whose_names_are_paths_stay_inside(tmp_path: Path) -> None:
    root = write_dataset([single_camera_episode(0, 6)], tmp_path / "set", version="v3.0")
    edit_json(root / "meta/info.json", lambda info: info["features"].update({"/etc": {"dtype": "video"}}))
    edit_json(root / "meta/info.json", lambda info: info["features"].update({"../../up": {"dtype": "video"}}))
    opened = open_dataset(root)
    for camera in ("/etc", "../../up"):
        with pytest.raises(InputError):
            opened.frames(0, camera, np.array([0]))


def test_a_cache_folder_that_names_a_path_opens_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/meta").mkdir(parents=True)
    (tmp_path / "hub/snapshots").mkdir(parents=True)
    (tmp_path / "hub/refs").mkdir()
    (tmp_path / "hub/refs/main").write_text("../../elsewhere")
    with pytest.raises(InputError, match="names none of them"):
        open_dataset(tmp_path / "hub")


def test_no_secret_reaches_a_run_folder(tmp_path: Path) -> None:
    token, address = "hf_abcdefghijklmnopqrst", "https://me:s3cret@example.org/data"
    shown = without_secrets(["train", "--data.root", address, token, f"--note={token}", "hf_short"])
    assert "s3cret" not in str(shown) and token not in str(shown) and "hf_short" in shown
    for name in ("hf_token", "API_KEY", "password"):
        with pytest.raises(InputError, match="environment variables"):
            check_parameters({}, {name: "x"})
    with pytest.raises(InputError, match="has no parameter"):
        check_parameters({}, {"num_tokens": 3})


def test_a_notebook_page_asks_no_other_host_for_anything(tmp_path: Path) -> None:
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1")]), tmp_path / "a.ipynb")
    asked = re.findall(r'(?:src|href)="(https?:[^"]+)"', notebook_html(tmp_path / "a.ipynb"))
    assert not asked


def test_messages_send_a_terminal_nothing_that_it_obeys(tmp_path: Path) -> None:
    said = str(InputError("camera \x1b[2J\x07\n\u202eevil"))
    assert said.isprintable() and "\\x1b" in said and "\\n" in said


def test_a_page_in_a_browser_cannot_talk_to_the_server() -> None:
    pytest.importorskip("msgpack")
    client = pytest.importorskip("websockets.sync.client")
    from test_serve_hostile import LIMITS, Chained
    from websockets.exceptions import InvalidStatus

    from wamlab.serve.protocol import Contract
    from wamlab.serve.server import PolicyServer, served

    with served(PolicyServer(Chained(), Contract(("top",), 2, 2), LIMITS)) as server:
        address = f"ws://127.0.0.1:{server.port}"
        with client.connect(address) as program:
            program.recv(timeout=20)
        with pytest.raises(InvalidStatus, match="403"), client.connect(address, origin="https://evil.example"):
            pass


def test_nothing_in_the_package_unpickles_evaluates_or_starts_a_shell() -> None:
    unsafe = re.compile(
        r"pickle\.loads?\(|allow_pickle=True|weights_only=False|(?<!\.)\beval\(|(?<!\.)\bexec\(|shell=True|os\.system"
        r"|extractall\(|yaml\.(unsafe_load|full_load)|marshal\.load|shelve\.open|joblib\.load"
    )
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in PACKAGE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if unsafe.search(line)
    ]
    assert not found
    loads = [line for path in PACKAGE.rglob("*.py") for line in path.read_text().splitlines() if "torch.load(" in line]
    assert loads and all("weights_only=True" in line for line in loads)


def test_hostile_instructions_come_back_as_they_were_recorded(tmp_path: Path) -> None:
    from dataclasses import replace

    episode = replace(single_camera_episode(0, 6), instruction=HOSTILE)
    opened = open_dataset(write_dataset([episode], tmp_path / "set"))
    assert opened.labels(0)[0] == HOSTILE
    assert json.loads(json.dumps(opened.tasks_of(0))) == [HOSTILE]
