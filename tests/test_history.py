"""Policies with history: episodes go on from real frames, served or in-process, alone or beside sessions of any age."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("msgpack", reason="pip install 'wamlab[serve]'")
pytest.importorskip("websockets", reason="pip install 'wamlab[serve]'")

from websockets.sync.client import ClientConnection, connect

from wamlab.data.views import canvas_of
from wamlab.data.write import write_dataset
from wamlab.lab.run import Run, open_run
from wamlab.model.sampler import SamplerConfig
from wamlab.recipes import session
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import small_model, tiny
from wamlab.recipes.environments import make_env
from wamlab.recipes.fit import fit, start_run
from wamlab.recipes.history import BYTES_A_SESSION, SEEDS_APART, HistoryPolicy, even_places
from wamlab.recipes.imagine import decode_block
from wamlab.recipes.look_ahead import LookAhead
from wamlab.recipes.playing import going_on, play_task
from wamlab.recipes.policy import WamPolicy
from wamlab.recipes.serve import SessionPolicy, load_session_policy
from wamlab.score.closed_loop import play_closed_loop
from wamlab.score.success import measure_success
from wamlab.serve.arrays import decode, encode
from wamlab.serve.server import PolicyServer, ServeConfig, served
from wamlab.sim.experts import play_episodes
from wamlab.sim.vector import TabletopVector
from wamlab.train import step_generator
from wamlab.types import Observation

NUM_CALLS = 6  # of an episode: the window of three blocks is full after two


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a network of three blocks for two steps and return its finished run."""
    folder = tmp_path_factory.mktemp("history")
    root = write_dataset(play_episodes(("push",), 4, seed=0, size=32), folder / "push")
    recipe = tiny()
    model = replace(small_model(actions_per_block=8, max_action_dim=4, max_state_dim=5), dim=48, heads=3, ffn_dim=64)
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=root, held_out_fraction=0.25, is_apart=False),
        robot=replace(recipe.robot, view_height_px=32, view_width_px=32),
        window=replace(recipe.window, max_blocks=3, frame_stride=2, actions_per_block=8),
        model=replace(model, layers=2, max_blocks=3),
        sampler=SamplerConfig(num_steps=2, guidance_scale=2.0),
        train=replace(recipe.train, num_steps=2, batch_size=2),
        evaluation=replace(recipe.evaluation, every=2, num_clips=2, noise_levels=(0.5,)),
        checkpoint_every=2,
    )
    bench = Workbench(recipe)
    with start_run(bench, folder / "runs") as started:
        for _ in fit(bench, started):
            pass
    return open_run(started.folder)


@pytest.fixture
def policy(run: Run) -> SessionPolicy:
    """Return its policy, every weight moved a little: zero heads would answer alike whatever was seen."""
    found = load_session_policy(run, seed=5)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in found.bench.net.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return found


def observations(seed: int, num_calls: int, session: int = 0) -> list[Observation]:
    """Return what an episode of random actions shows at each call; a film from the second call on."""
    env = TabletopVector(1, "push", size=32, has_films=True)
    env.reset(seed=[seed])
    rng = np.random.default_rng(seed)
    found, films = [], ()
    for _ in range(num_calls):
        found.append(replace(env.observation(), session=np.array([session]), films=films))
        films = env.chunk_step(0.3 * rng.uniform(-1, 1, (1, 8, 4)).astype(np.float32))[-1]["films"]
    return found


def sent(observation: Observation, **more: Any) -> bytes:
    film = observation.films[0] if observation.films else {c: f[0] for c, f in observation.frames.items()}
    frames = {f"observation/{camera}": views for camera, views in film.items()}
    rest = {"observation/state": observation.state[0], "prompt": observation.instructions[0]}
    return encode({**frames, **rest, **more}, "openpi")


def ask(client: ClientConnection, message: bytes) -> np.ndarray:
    client.send(message)
    reply = client.recv(timeout=60)
    assert isinstance(reply, bytes), reply
    return decode(reply)[0]["actions"][None]


@contextmanager
def open_client(server: PolicyServer) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{server.port}", compression=None, max_size=None) as client:
        client.recv()
        yield client


def rolled_out(policy: HistoryPolicy, seen: Sequence[Observation]) -> list[np.ndarray]:
    """Plan an episode as session 0 by the session functions alone: the oracle of everything else here."""
    bench, robot = policy.bench, policy.bench.recipe.robot
    chunks, now = [], None
    for call, observation in enumerate(seen):
        if now is None:
            canvas = torch.from_numpy(canvas_of(observation.frames, robot))
            now = session.begin(bench, canvas, [robot.instruct(observation.instructions[0])])
        else:
            block = {camera: film[1::2] for camera, film in observation.films[0].items()}  # stride 2 of 8 ticks
            now = session.observe(bench, now, torch.from_numpy(canvas_of(block, robot))[None])
        noise = session.draw_noise(bench, now.first, step_generator(policy.seed, call))
        state = torch.from_numpy(policy.normalizers.state_to_model(observation.state))
        _, actions = session.plan_from(bench, now, state, noise)
        chunks.append(policy.normalizers.actions_to_robot(actions.numpy(), observation.state))
    return chunks


def test_a_served_episode_has_the_bits_of_an_in_process_one_with_history(policy: SessionPolicy) -> None:
    seen = observations(3, NUM_CALLS)
    wanted = rolled_out(policy, seen)
    in_process = [policy(observation) for observation in seen]
    with served(PolicyServer(policy, policy.contract, ServeConfig(port=0))) as server, open_client(server) as client:
        found = [ask(client, sent(observation)) for observation in seen]
        forgetful = ask(client, sent(replace(seen[-1], films=())))  # a single frame begins anew
    for ours, mine, theirs in zip(found, in_process, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(mine, theirs)
    assert np.abs(forgetful - found[-1]).max() > 1e-3


def test_sessions_of_different_age_are_planned_together_as_each_would_be_alone(policy: SessionPolicy) -> None:
    """Three sessions with 3, 1 and no blocks behind them; equal to 1e-4 of actions within -1..1, as sums round."""
    ages = (3, 1, 0)
    seen = [observations(10 + number, 6, number) for number in range(3)]
    wanted = [[policy(observation) for observation in episode] for episode in seen]
    policy = SessionPolicy(policy.bench, policy.normalizers, seed=policy.seed)
    config = ServeConfig(port=0, deadline_ms=5000.0)
    with served(PolicyServer(policy, policy.contract, config)) as server:

        def play(number: int, calls: range, start: Barrier) -> None:
            with open_client(server) as client:
                for call in calls:
                    start.wait(60)
                    found = ask(client, sent(seen[number][call], session_id=f"session {number}"))
                    np.testing.assert_allclose(found, wanted[number][call], atol=1e-4)

        for number, age in enumerate(ages):
            play(number, range(age), Barrier(1))
            while server._num_open:
                time.sleep(0.01)
        num_calls, barrier = server.num_calls, Barrier(3)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda number: play(number, range(ages[number], ages[number] + 3), barrier), range(3)))
        assert server.num_calls - num_calls == 3  # one for all three sessions, three times


def test_memory_of_histories_is_counted_bounded_and_given_back(policy: SessionPolicy) -> None:
    seen = observations(3, 4)
    with served(PolicyServer(policy, policy.contract, ServeConfig(port=0))) as server, open_client(server) as client:
        sizes = []
        for observation in seen:
            ask(client, sent(observation, endpoint="infer", session_id="a"))
            sizes.append(server.sessions.num_bytes)
        assert 20_000 < sizes[0] < sizes[1] < sizes[2] == sizes[3]  # grows up to the window, then slides
        client.send(encode({"endpoint": "reset", "session_id": "a"}, "openpi"))
        assert client.recv(timeout=20) == "reset successful" and server.sessions.num_bytes == 0
        anew = ask(client, sent(seen[3], endpoint="infer", session_id="a"))  # the film of another episode: not used
        assert server.sessions.num_bytes == sizes[0]
        np.testing.assert_array_equal(anew, policy(replace(seen[3], films=(), session=np.array([1]))))
    most = sizes[0] + sizes[1] - 1
    budget = ServeConfig(port=0, memory_gib=most / 2**30)
    with served(PolicyServer(policy, policy.contract, budget)) as server, open_client(server) as client:
        for number in range(8):
            ask(client, sent(seen[0], session_id=str(number)))
            assert server.sessions.num_bytes <= most
        assert len(server.sessions) == 2 and server.sessions.num_evicted == 6
        ask(client, sent(seen[1], session_id="7"))  # it grows, and the one used least recently makes room
        assert len(server.sessions) == 1 and server.sessions.num_bytes == sizes[1]


def test_molmospaces_frames_between_plans_become_the_film(policy: SessionPolicy) -> None:
    """One frame a tick: the next plan sees the block of them, as if it had come as a stack."""
    seen = observations(3, 2)
    wanted = [policy(observation) for observation in seen]
    film = seen[1].films[0]
    frames = [{camera: views[0] for camera, views in seen[0].frames.items()}]
    frames += [{camera: views[tick] for camera, views in film.items()} for tick in range(8)]
    found = []
    with served(PolicyServer(policy, policy.contract, ServeConfig(port=0))) as server, open_client(server) as client:
        for tick, views in enumerate(frames):
            observation = seen[tick // 8]
            state = {"observation/state": observation.state[0], "task": observation.instructions[0]}
            client.send(encode({**views, **state}, "msgpack-numpy"))
            reply = client.recv(timeout=60)
            assert isinstance(reply, bytes), reply
            answer = decode(reply)[0]
            found.append(np.concatenate([answer["arm"], answer["gripper"]]))
    np.testing.assert_array_equal(found[:8], wanted[0][0])
    np.testing.assert_array_equal(found[8], wanted[1][0, 0])


def test_another_instruction_begins_anew_and_memories_are_values(policy: SessionPolicy) -> None:
    first, second = observations(3, 2)
    _, memories = policy.plan(first, [None])
    going_on, _ = policy.plan(second, memories)
    again, _ = policy.plan(second, memories)  # a call that failed is made again: nothing has changed
    np.testing.assert_array_equal(going_on, again)
    other = replace(second, instructions=["reach the red circle"])
    np.testing.assert_array_equal(policy.plan(other, memories)[0], policy.plan(replace(other, films=()), memories)[0])


def test_films_of_any_length_become_a_block_that_ends_with_the_newest_frame() -> None:
    assert even_places(24, 8).tolist() == [2, 5, 8, 11, 14, 17, 20, 23]  # a frame a tick, stride 3
    assert even_places(8, 8).tolist() == list(range(8))
    assert even_places(9, 8).tolist() == list(range(1, 9))  # with the frame before the block
    assert even_places(4, 8).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]  # as the reference repeats its clients' four


def noted(policy: Any, asked: list[tuple[Observation, np.ndarray]]) -> Any:
    """Return the policy, which then keeps what it was asked and what it answered."""

    def answer(observation: Observation) -> np.ndarray:
        asked.append((observation, policy(observation)))
        return asked[-1][1]

    return answer


def test_closed_loop_actions_have_the_bits_of_served_sessions(policy: SessionPolicy) -> None:
    asked: list[tuple[Observation, np.ndarray]] = []
    play_closed_loop(make_env(policy, "reach", 1), noted(policy, asked), [0, 1])
    episodes = [[pair for pair in asked if pair[0].session[0] == number] for number in (0, 1)]
    with served(PolicyServer(policy, policy.contract, ServeConfig(port=0))) as server:
        for episode in episodes:
            assert len(episode) == 5 and all(len(seen.films[0]["top"]) == 8 for seen, _ in episode[1:])
            with open_client(server) as client:
                for seen, actions in episode:
                    np.testing.assert_array_equal(ask(client, sent(seen)), actions)
    forgetful = HistoryPolicy(policy.bench, policy.normalizers, seed=policy.seed)
    without = [forgetful(replace(seen, films=())) for seen, _ in episodes[0]]
    np.testing.assert_array_equal(without[0], episodes[0][0][1])
    assert np.abs(without[4] - episodes[0][4][1]).max() > 1e-3


def test_planning_ahead_replaces_predicted_frames_by_real_ones_and_carries_none_on(policy: SessionPolicy) -> None:
    asked: list[tuple[Observation, np.ndarray]] = []
    played = play_closed_loop(make_env(policy, "reach", 1), policy, [3], ahead=noted(LookAhead(policy), asked))
    assert played.is_asynchronous and len(asked) == 5
    bench, robot = policy.bench, policy.bench.recipe.robot
    now: Any = None
    for call, (seen, found) in enumerate(asked):
        if now is None:
            canvas = torch.from_numpy(canvas_of(seen.frames, robot))
            now = session.begin(bench, canvas, [robot.instruct(seen.instructions[0])])
        else:
            block = {camera: film[1::2] for camera, film in seen.films[0].items()}
            now = session.observe(bench, now, torch.from_numpy(canvas_of(block, robot))[None])
        generator = step_generator(policy.seed + 3 * SEEDS_APART, 1 + call)  # the first chunk was planned alone
        state = torch.from_numpy(policy.normalizers.state_to_model(seen.state))
        latents, _ = session.plan(bench, now, state, generator)
        predicted = session.observe(bench, now, decode_block(bench, now, latents))
        _, actions = session.plan(bench, predicted, state, generator)
        np.testing.assert_array_equal(found, policy.normalizers.actions_to_robot(actions.numpy(), seen.state))


def test_memory_in_process_is_bounded_and_never_that_of_an_episode_being_played(policy: SessionPolicy) -> None:
    def played(memory_gib: float) -> tuple[HistoryPolicy, list[np.ndarray]]:
        player = HistoryPolicy(policy.bench, policy.normalizers, seed=5, memory_gib=memory_gib)
        asked: list[tuple[Observation, np.ndarray]] = []
        play_closed_loop(make_env(player, "reach", 2), noted(player, asked), range(4))
        return player, [actions for _, actions in asked]

    (holding, first), (forgetting, again) = played(2.0), played(0.0)
    assert len(holding._memories) == 4 and set(forgetting._memories) <= {2, 3}
    for ours, theirs in zip(first, again, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_play_goes_on_with_episodes_where_the_recipe_has_a_history(policy: SessionPolicy) -> None:
    loaded = WamPolicy(policy.bench, policy.normalizers, seed=5)
    found = [play_task(player, "push", [0, 1], num_envs=2) for player in (loaded, policy)]
    assert found[0].episodes == found[1].episodes
    asked: list[tuple[Observation, np.ndarray]] = []
    measure_success(make_env(policy, "push", 1), noted(going_on(loaded), asked), [0])
    player = HistoryPolicy(policy.bench, policy.normalizers, seed=5)
    assert asked[-1][0].films
    for seen, actions in asked:
        np.testing.assert_array_equal(actions, player(seen))


def test_a_recipe_of_one_block_keeps_no_history_and_says_so(policy: SessionPolicy) -> None:
    bench = Workbench(tiny())
    short = SessionPolicy(bench, policy.normalizers)
    assert not short.has_history and "keep no history" in short.history_sentence
    assert short.contract.film_frames == 1 and policy.contract.film_frames == 4
    seen = TabletopVector(1, "reach", size=64)
    seen.reset(seed=0)
    _, memories = short.plan(seen.observation(), [None])
    assert [memory.num_bytes for memory in memories] == [BYTES_A_SESSION]
