"""A run folder, served: clients get the bits that the policy gives in-process, alone and many at once."""

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest

pytest.importorskip("msgpack", reason="pip install 'wamlab[serve]'")
pytest.importorskip("websockets", reason="pip install 'wamlab[serve]'")

from wamlab.data.write import write_dataset
from wamlab.lab.run import Run, open_run
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import tiny
from wamlab.recipes.fit import fit, start_run
from wamlab.recipes.policy import load_policy
from wamlab.recipes.serve import load_session_policy, warm_up
from wamlab.serve.server import PolicyServer, ServeConfig, served
from wamlab.serve.sessions import Memory
from wamlab.sim.experts import play_episodes
from wamlab.sim.vector import TabletopVector
from wamlab.types import Observation, Policy

INSTALL = (
    "pip install msgpack websockets typing_extensions dm-tree absl-py wrapt && pip install --no-deps openpi-client"
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:connect\\(\\) must be used:DeprecationWarning"
)  # of openpi-client 0.1.2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("served")
    root = write_dataset(play_episodes(("reach",), 4, seed=0, size=32), folder / "reach")
    recipe = tiny()
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=root, held_out_fraction=0.25, is_apart=False),
        robot=replace(recipe.robot, view_height_px=32, view_width_px=32),
        model=replace(recipe.model, dim=32, layers=1, heads=2, ffn_dim=64, mlp_dim=32),
        train=replace(recipe.train, num_steps=2, batch_size=2),
        evaluation=replace(recipe.evaluation, every=2, num_clips=2, noise_levels=(0.5,)),
        checkpoint_every=2,
    )
    bench = Workbench(recipe)
    with start_run(bench, folder / "runs") as started:
        for _ in fit(bench, started):
            pass
    return open_run(started.folder)


def play(policy: Callable[[Observation], np.ndarray], seeds: Sequence[int], session: int = 0) -> list[np.ndarray]:
    """Play episodes one after the other, as one session; return every chunk."""
    env = TabletopVector(1, "reach", size=32)
    chunks = []
    for seed in seeds:
        env.reset(seed=[seed])
        for _ in range(100):
            chunks.append(policy(replace(env.observation(), session=np.array([session]))))
            env.chunk_step(chunks[-1])
            if env.is_done.all():
                break
    return chunks


@contextmanager
def openpi(server: PolicyServer) -> Iterator[Policy]:
    """Yield the unmodified openpi client as a policy."""
    module = pytest.importorskip("openpi_client.websocket_client_policy", reason=INSTALL)
    client = module.WebsocketClientPolicy("127.0.0.1", server.port)
    assert client.get_server_metadata()["image_resolution"] == [32, 32]

    def infer(observation: Observation) -> np.ndarray:
        frames = {f"observation/{camera}": views[0] for camera, views in observation.frames.items()}
        sent = {**frames, "observation/state": observation.state[0], "prompt": observation.instructions[0]}
        return client.infer(sent)["actions"][None]

    try:
        yield infer
    finally:
        client._ws.close()


def assert_same_bits(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_openpi_client_gets_the_bits_of_the_policy_in_process(run: Run) -> None:
    """12 episodes through the unmodified package; the same seed, observations and order give the same actions."""
    policy = load_session_policy(run, seed=3)
    with served(PolicyServer(policy, policy.contract, ServeConfig(port=0))) as server, openpi(server) as client:
        found = play(client, range(12))
    assert_same_bits(found, play(load_policy(run, seed=3), range(12)))
    assert any(not np.array_equal(found[0], later) for later in found[1:])


def test_sessions_served_together_get_what_each_would_alone(run: Run) -> None:
    """To the bit one by one, to rounding in batches; each session has noise of its own."""
    alone = load_session_policy(run)
    wanted = [play(alone, range(4), session) for session in range(4)]
    assert not np.array_equal(wanted[0][0], wanted[1][0])
    for max_batch in (1, 8):
        policy = load_session_policy(run)
        warm_up(policy)
        config = ServeConfig(port=0, max_batch=max_batch, deadline_ms=50.0)
        with served(PolicyServer(policy, policy.contract, config)) as server:
            found = play_together(server, 4)
        for ours, theirs in zip(found, wanted, strict=True):
            if max_batch == 1:
                assert_same_bits(ours, theirs)
            else:
                np.testing.assert_allclose(ours[0], theirs[0], atol=1e-5)


def play_together(server: PolicyServer, num_clients: int) -> list[list[np.ndarray]]:
    """Play four episodes a client at once; clients speak first in turn, which gives them their session numbers."""
    turns = [Event() for _ in range(num_clients + 1)]
    turns[0].set()

    def one(number: int) -> list[np.ndarray]:
        with openpi(server) as client:

            def in_turn(observation: Observation) -> np.ndarray:
                assert turns[number].wait(30)
                chunk = client(observation)
                turns[number + 1].set()
                return chunk

            return play(in_turn, range(4))

    with ThreadPoolExecutor(num_clients) as pool:
        return list(pool.map(one, range(num_clients)))


def test_openpi_clients_outlive_keep_alives_and_are_answered_by_a_server_that_ends(run: Run) -> None:
    """Three unmodified clients wait for calls of a second each, one after the other, pinged every 0.2 s; the server
    ends as soon as all have asked. All get the bits that they would have got."""
    policy = load_session_policy(run)
    env = TabletopVector(1, "reach", size=32)
    env.reset(seed=0)
    seen = env.observation()
    wanted = [load_session_policy(run)(replace(seen, session=np.array([number]))) for number in range(3)]
    plan = policy.plan

    def slow(
        observation: Observation, memories: Sequence[Memory | None], num_blocks: int = 1
    ) -> tuple[np.ndarray, Sequence[Memory]]:
        time.sleep(1.0)
        return plan(observation, memories, num_blocks)

    policy.plan = slow
    config = ServeConfig(port=0, ping_s=0.2, max_batch=1)
    with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        with served(PolicyServer(policy, policy.contract, config)) as server:
            clients = [stack.enter_context(openpi(server)) for _ in range(3)]
            answers = []
            for number, client in enumerate(clients):
                answers.append(pool.submit(client, seen))
                while server._num_at_work <= number and not answers[0].done():
                    time.sleep(0.01)
            assert not answers[0].done() and server._num_at_work == 3
        for answer, theirs in zip(answers, wanted, strict=True):
            np.testing.assert_array_equal(answer.result(10), theirs)


def test_the_command_serves_a_run_and_ends_when_told(run: Run) -> None:
    command = [sys.executable, "-m", "wamlab.cli", "serve", "--root", str(run.folder.parent), "--port", "0"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    try:
        line = job.stdout.readline()
        assert line.startswith(f"{run.name} at ws://127.0.0.1:")
        address = line.split(" at ws://")[1].split(" ")[0]
        assert "keep no history" in job.stdout.readline()
        assert urllib.request.urlopen(f"http://{address}/healthz", timeout=10).read() == b"OK\n"
        job.send_signal(signal.SIGTERM)
        assert job.wait(20) == 0
    finally:
        job.kill()
        job.stdout.close()


def test_the_base_install_says_what_serving_needs(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['websockets'] = None; sys.modules['msgpack'] = None\n"
        "from wamlab.cli import main; sys.exit(main(['serve', '--root', sys.argv[1]]))"
    )
    job = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert job.returncode == 2
    assert "pip install 'wamlab[serve]'" in job.stderr and len(job.stderr.strip().splitlines()) == 1
