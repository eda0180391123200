"""A world action model as the world: given actions it predicts what is seen next, one call for all episodes.

The chosen actions stand in the network's action stream, clean and at noise level 0, while the video is denoised. The
usual training never shows it such a pair (both streams share a level), and its video then hardly follows the actions;
``fit_world`` teaches it. What it predicts is decoded to frames, which the policy sees and the session observes, as it
would observe real ones. No state is predicted: ``move`` integrates it from the actions.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from safetensors.torch import load, save
from torch import Tensor

from wamlab.data.normalize import Normalizers
from wamlab.data.robot import short_name
from wamlab.data.views import canvas_of, untile
from wamlab.errors import InputError
from wamlab.flow import euler_step, solver_levels
from wamlab.model.kv_cache import History
from wamlab.recipes.build import Workbench
from wamlab.recipes.imagine import decode_block
from wamlab.recipes.session import Session, begin, join, observe_each, start_history
from wamlab.sim.imagined import Imagined, Keyframe
from wamlab.train import autocast

Move = Callable[[np.ndarray, np.ndarray], np.ndarray]  # states [b k], actions [b a j] to states after them
# newest canvases [b h w 3], goal canvases where keyframes have one, first canvases, instructions: scores from 0 to 1
Judge = Callable[[Tensor, Sequence[Tensor | None], Sequence[Tensor], Sequence[str]], Float[Tensor, " b"]]


@dataclass(frozen=True)
class Mind:
    """One imagined episode's past: what the network has seen, and what it is judged by."""

    session: Session  # of one episode
    first: UInt8[Tensor, "h w 3"]  # canvas that it began with
    goal: UInt8[Tensor, "h w 3"] | None


class WamWorld:
    """A frozen network as a ``World``."""

    def __init__(
        self, bench: Workbench, normalizers: Normalizers, judge: Judge, move: Move, *, num_steps: int = 2
    ) -> None:
        """Predict in ``num_steps`` Euler steps; raises InputError for recipes with guidance or robots that crop."""
        if bench.recipe.sampler.guidance_scale != 1:
            raise InputError("an imagined world follows its actions without guidance: give sampler.guidance_scale 1")
        if bench.recipe.robot.crop_fraction != 1:
            raise InputError("predicted frames cannot be cropped again: give a run with robot.crop_fraction 1")
        self.bench, self.normalizers, self.judge, self.move = bench, normalizers, judge, move
        self.levels = solver_levels(num_steps, bench.recipe.noise.shift).tolist()

    def begin(self, starts: Sequence[Keyframe], /) -> list[Mind]:
        """Begin episodes, each alone: its bits do not depend on who begins beside it."""
        return [self._begun(start) for start in starts]

    @torch.no_grad()
    def step(
        self, minds: Sequence[Mind], states: np.ndarray, actions: np.ndarray, keys: Sequence[tuple[int, int]], /
    ) -> Imagined:
        """Imagine one block of every episode; noise is drawn from the episode's seed and its ticks."""
        wanted = self.bench.recipe.model.actions_per_block
        if actions.shape[1] != wanted:
            raise InputError(f"this world steps by {wanted} actions, not {actions.shape[1]}: play chunks of as many")
        session = join([mind.session for mind in minds])
        latents = self._predicted(session, states, actions, keys)
        frames = decode_block(self.bench, session, latents)
        seen = observe_each(self.bench, [mind.session for mind in minds], frames)
        found = [replace(mind, session=own) for mind, own in zip(minds, seen, strict=True)]
        score = self.judge(
            frames[:, -1], [mind.goal for mind in minds], [mind.first for mind in minds], session.instructions
        )
        return Imagined(found, self.move(states, actions), score.double().cpu().numpy())

    def look(self, mind: Mind, /) -> Mapping[str, UInt8[np.ndarray, "h w 3"]]:
        """Return what the cameras show."""
        robot = self.bench.recipe.robot
        views = untile(mind.session.newest.cpu().numpy(), robot.layout, len(robot.cameras))
        return {short_name(name): view[0] for name, view in zip(robot.cameras, views, strict=True)}

    def pack(self, mind: Mind, /) -> dict[str, Any]:
        """Return frames and the cached keys and values as text; the instruction's are computed again."""
        history = mind.session.history
        tensors = {"first": mind.session.first, "newest": mind.session.newest}
        for layer, (key, value) in enumerate(history.past or ()):
            tensors |= {f"key.{layer}": key, f"value.{layer}": value}
        data = save({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()})
        return {"num_frames": history.num_frames, "tensors": base64.b64encode(data).decode()}

    @torch.no_grad()
    def unpack(self, packed: Mapping[str, Any], start: Keyframe, /) -> Mind:
        """Return the mind that ``pack`` made text of, bit for bit."""
        begun, bench = self._begun(start), self.bench
        tensors = {n: t.to(bench.device) for n, t in load(base64.b64decode(packed["tensors"])).items()}
        instructions = begun.session.instructions
        with autocast(bench.device, has_bf16=bench.recipe.train.has_bf16):
            image = bench.encoder.encode_image(tensors["first"])
            history = start_history(bench, bench.encoder.encode_text(instructions), image)
        num_layers = sum(name.startswith("key.") for name in tensors)
        past = tuple((tensors[f"key.{layer}"], tensors[f"value.{layer}"]) for layer in range(num_layers))
        session = Session(
            History(history.cross, past, packed["num_frames"]), instructions, tensors["first"], tensors["newest"]
        )
        return replace(begun, session=session)

    def _begun(self, start: Keyframe) -> Mind:
        canvas, robot = self._canvas(start.frames), self.bench.recipe.robot
        session = begin(self.bench, canvas, [robot.instruct(start.instruction)])
        return Mind(session, canvas[0], None if start.goal is None else self._canvas(start.goal)[0])

    def _canvas(self, frames: Mapping[str, np.ndarray]) -> UInt8[Tensor, "1 h w 3"]:
        robot = self.bench.recipe.robot
        return torch.from_numpy(canvas_of({n: f[None] for n, f in frames.items()}, robot).copy()).to(self.bench.device)

    def _predicted(
        self, session: Session, states: np.ndarray, actions: np.ndarray, keys: Sequence[tuple[int, int]]
    ) -> Float[Tensor, "b t c h w"]:
        """Denoise the next block's video beside clean actions."""
        bench, device = self.bench, self.bench.device
        clean = torch.from_numpy(self.normalizers.actions_to_model(actions.astype(np.float32), states)).to(device)
        state = torch.from_numpy(self.normalizers.state_to_model(states))[:, None].to(device)
        _, condition = bench.encoder.encode_first(session.first, 1 + bench.recipe.window.frames_per_block)
        shape = (
            bench.recipe.model.latents_per_block,
            *bench.encoder.video.latent_shape(1, *session.first.shape[1:3])[1:],
        )
        drawn = [
            np.random.Generator(np.random.Philox(key=list(key))).standard_normal(shape, dtype=np.float32)
            for key in keys
        ]
        latents = torch.from_numpy(np.stack(drawn)).to(device)
        action_level = torch.zeros(len(actions), dtype=torch.float64, device=device)
        with autocast(device, has_bf16=bench.recipe.train.has_bf16):
            for level, following in zip(self.levels, self.levels[1:], strict=False):
                video_level = torch.full_like(action_level, level)
                rest = None if condition is None else condition[:, 1:]
                velocity = bench.net.denoise(session.history, latents, clean, state, video_level, action_level, rest)
                latents = euler_step(latents, velocity.video, level, following)
        return latents
