"""Policy sessions: cached streaming equals training, windows slide or restart, guidance doubles the streams."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.model.sampler import SamplerConfig
from wamlab.model.wam import WorldActionModel
from wamlab.recipes import session
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import Recipe, small_model, tiny
from wamlab.recipes.evaluate import predict_window, read_held_out
from wamlab.sim.experts import play_episodes
from wamlab.train import step_generator


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("session") / "reach"
    write_dataset(play_episodes(("reach",), 6, seed=0, size=32), root, robot_type="tabletop")
    return root


def recipe_of(root: Path, **sampler: object) -> Recipe:
    """Return a small recipe of three blocks."""
    recipe = tiny()
    model = replace(small_model(actions_per_block=4, max_action_dim=4, max_state_dim=5), dim=48, heads=3, ffn_dim=64)
    return replace(
        recipe,
        data=replace(recipe.data, root=root),
        robot=replace(recipe.robot, view_height_px=32, view_width_px=32),
        window=replace(recipe.window, max_blocks=3),
        model=replace(model, max_blocks=3, layers=2),
        sampler=SamplerConfig(num_steps=2, **sampler),  # pyright: ignore[reportArgumentType]
        evaluation=replace(recipe.evaluation, num_clips=2),
        train=replace(recipe.train, has_bf16=False),  # equal to 2e-5 in float32
    )


def opened(bench: Workbench) -> Workbench:
    """Give the bench a network none of whose parameters is zero; few steps of training would do the same."""
    torch.manual_seed(0)
    net = WorldActionModel(bench.recipe.model).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.05 * torch.randn_like(p))
    bench.__dict__["net"] = net
    return bench


def streamed(bench: Workbench, frames: Tensor, instruction: str, num_blocks: int) -> list[session.Session]:
    """Begin with frame 0 of frames [t h w 3] and observe block after block."""
    size = bench.recipe.window.frames_per_block
    sessions = [session.begin(bench, frames[None, 0], [instruction])]
    for block in range(num_blocks):
        span = slice(1 + block * size, 1 + (block + 1) * size)
        sessions.append(session.observe(bench, sessions[-1], frames[None, span]))
    return sessions


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@torch.no_grad()
def test_a_streamed_session_plans_what_a_whole_window_does(root: Path, guidance_scale: float) -> None:
    bench = opened(Workbench(recipe_of(root, guidance_scale=guidance_scale)))
    held_out = read_held_out(bench)
    clip, batch = held_out.clips[0], held_out.batches[0]
    sessions = streamed(bench, torch.from_numpy(clip.frames), clip.instruction, 2)
    one = batch[:1]
    wanted_latents, wanted_actions = predict_window(bench, one, seed=0)
    generator = step_generator(20_260_401, 0)
    for block, seen in enumerate(sessions):
        latents, actions = session.plan(bench, seen, torch.from_numpy(clip.state[None, block]), generator)
        assert torch.allclose(latents[:, 0], wanted_latents[:, 1 + block], atol=2e-5)
        assert torch.allclose(actions, wanted_actions[:, 4 * block : 4 * block + 4], atol=2e-5)


@torch.no_grad()
def test_a_full_window_slides_or_restarts(root: Path) -> None:
    frames = torch.randint(0, 255, (1 + 4 * 6, 32, 64, 3), dtype=torch.uint8)
    sizes = {}
    for choice in ("slide", "restart"):
        bench = opened(Workbench(recipe_of(root, when_full=choice)))
        sessions = streamed(bench, frames, "go to the red circle", 6)
        sizes[choice] = [seen.history.num_frames for seen in sessions]
        assert torch.equal(sessions[-1].first, frames[None, 0] if choice == "slide" else sessions[-1].first)
    assert sizes["slide"] == [1, 2, 3, 3, 3, 3, 3]  # no saw-tooth: memory stays as it is
    assert sizes["restart"] == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@torch.no_grad()
def test_sessions_of_any_length_and_text_go_on_together_as_alone(root: Path, guidance_scale: float) -> None:
    """Four sessions, 0 to 4 blocks old (the oldest has slid), take in a block and plan in one call each."""
    bench = opened(Workbench(recipe_of(root, guidance_scale=guidance_scale)))
    texts = ["go", "reach the red circle", "go to the blue square now", "go"]
    frames = torch.randint(0, 255, (4, 1 + 4 * 5, 32, 64, 3), dtype=torch.uint8)
    ages = (0, 1, 2, 4)
    old = [streamed(bench, frames[i], texts[i], age)[-1] for i, age in enumerate(ages)]
    newest = torch.stack([frames[i, 1 + 4 * age : 5 + 4 * age] for i, age in enumerate(ages)])
    alone = [session.observe(bench, seen, newest[i : i + 1]) for i, seen in enumerate(old)]
    together = session.observe_each(bench, old, newest)
    assert [seen.history.num_frames for seen in together] == [2, 3, 3, 3]
    noise = session.draw_noise(bench, frames[:, 0], torch.Generator().manual_seed(0))
    state = torch.randn(4, 5)
    found = session.plan_from(bench, session.join(together), state, noise)
    for i, seen in enumerate(alone):
        wanted = session.plan_from(bench, seen, state[i : i + 1], (noise[0][i : i + 1], noise[1][i : i + 1]))
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.allclose(ours[i], theirs[0], atol=2e-5)
    assert (found[1][0] - found[1][1]).abs().max() > 1e-2  # they do differ


@torch.no_grad()
def test_what_is_joined_parts_into_the_same_bits_in_memory_of_its_own(root: Path) -> None:
    bench = opened(Workbench(recipe_of(root)))
    frames = torch.randint(0, 255, (2, 5, 32, 64, 3), dtype=torch.uint8)
    old = [streamed(bench, frames[i], text, i)[-1] for i, text in enumerate(("go", "reach the red circle"))]
    together = session.join(old)
    for before, after in zip(old, session.part(together), strict=True):
        assert before.history.past is not None and after.history.past is not None
        for ours, theirs in zip(sum(after.history.past, ()), sum(before.history.past, ()), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.untyped_storage().nbytes() == ours.nbytes
    with pytest.raises(InputError, match="observe_each takes them"):
        session.observe(bench, together, frames[:, :4])


def test_wrong_sessions_are_refused(root: Path) -> None:
    bench = opened(Workbench(recipe_of(root)))
    seen = session.begin(bench, torch.zeros(1, 32, 64, 3, dtype=torch.uint8), ["reach"])
    with pytest.raises(InputError, match="a block has 4 frames, not 3"):
        session.observe(bench, seen, torch.zeros(1, 3, 32, 64, 3, dtype=torch.uint8))
    with pytest.raises(InputError, match="give slide or restart"):
        SamplerConfig(when_full="jump")
