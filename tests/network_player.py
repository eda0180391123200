"""The real network at a tiny size as a policy; its weights are random."""

from dataclasses import replace

import numpy as np
import torch
from players import NUM_TICKS

from wamlab.data.views import canvas_of
from wamlab.model.sampler import SamplerConfig
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import small_model, tiny
from wamlab.recipes.session import begin, plan_from
from wamlab.rl.segments import Asked, Planned, noise_generator


class NetworkHands:
    """Plans from pictures, with noise by counters."""

    def __init__(self) -> None:
        recipe = tiny()
        model = replace(small_model(actions_per_block=4, max_action_dim=4, max_state_dim=5), dim=48, heads=3)
        recipe = replace(
            recipe,
            robot=replace(recipe.robot, view_height_px=32, view_width_px=32),
            model=replace(model, layers=2, ffn_dim=64),
            sampler=SamplerConfig(num_steps=2),
            device="cpu",
        )
        self.bench = Workbench(recipe)
        torch.manual_seed(0)
        for p in self.bench.net.parameters():
            p.data.add_(0.05 * torch.randn_like(p))

    @torch.no_grad()
    def __call__(self, asked: Asked) -> Planned:
        seen, recipe = asked.observation, self.bench.recipe
        canvas = torch.from_numpy(canvas_of(seen.frames, recipe.robot))
        session = begin(self.bench, canvas, seen.instructions)
        _, *shape = self.bench.encoder.video.latent_shape(1, *canvas.shape[1:3])
        video = (recipe.model.latents_per_block, *shape)
        drawn = [noise_generator(key).standard_normal(NUM_TICKS * 4 + int(np.prod(video))) for key in asked.keys]
        noise = torch.from_numpy(np.stack(drawn)).float()
        start = noise[:, NUM_TICKS * 4 :].unflatten(1, video), noise[:, : NUM_TICKS * 4].unflatten(1, (NUM_TICKS, 4))
        latents, actions = plan_from(self.bench, session, torch.from_numpy(seen.state), start)
        return Planned(actions.clamp(-1, 1).numpy(), {"latents": latents.numpy()})
