"""What imagination needs of recorded episodes: keyframes to begin at, ends to learn success from, lessons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from wamlab.codec.clips import ClipEncoder
from wamlab.codec.video import to_frames
from wamlab.data.lerobot import RobotDataset
from wamlab.data.robot import RobotConfig, short_name
from wamlab.data.views import canvas_of
from wamlab.errors import InputError
from wamlab.flow import draw_noise_levels, video_error, with_noise_at
from wamlab.recipes.build import Workbench
from wamlab.recipes.imagined_world import Judge
from wamlab.recipes.policy import WamPolicy
from wamlab.score.success_head import Endings, SuccessHead, mean_text
from wamlab.sim.imagined import Keyframe
from wamlab.train import make_optimizer, step_generator, train
from wamlab.types import FlowExample, LossTerms

OPEN_SHARE = 0.6  # frames before this share of an episode do not yet show it done
NUM_OPEN = 2  # such frames of each episode


def world_bench(policy: WamPolicy) -> Workbench:
    """Return the workbench with a copy of the policy's network, which stays as it is when the policy learns."""
    bench = Workbench(policy.bench.recipe)
    vars(bench)["net"] = deepcopy(policy.bench.net).requires_grad_(False).eval()
    return bench


class Keyframes:
    """Recorded moments by number: ``seed`` decides episode and tick, the same for everyone."""

    def __init__(self, dataset: RobotDataset, episodes: Sequence[int], robot: RobotConfig, until: float) -> None:
        """Take ticks up to the share ``until`` of an episode; 0 begins where the episode did."""
        if not len(episodes) or not 0 <= until < 1:
            raise InputError(f"keyframes need episodes and a share from 0 to below 1, got {len(episodes)} and {until}")
        self.dataset, self.episodes, self.robot, self.until = dataset, tuple(episodes), robot, until
        self._read = lru_cache(maxsize=256)(self._read_one)  # all members of a group begin at the same

    def place(self, seed: int) -> tuple[int, int]:
        """Return the episode and the row of a keyframe."""
        draw = np.random.default_rng((seed, 7))
        episode = self.episodes[int(draw.integers(len(self.episodes)))]
        return episode, int(draw.random() * self.until * int(self.dataset.lengths[episode]))

    def __call__(self, seed: int) -> Keyframe:
        """Read a keyframe, and the end of its episode as the goal."""
        return self._read(seed)

    def _read_one(self, seed: int) -> Keyframe:
        episode, row = self.place(seed)
        last = int(self.dataset.lengths[episode]) - 1
        frames = frames_at(self.dataset, episode, [row, last], self.robot)
        return Keyframe(
            {camera: both[0] for camera, both in frames.items()},
            self.dataset.rows(episode, self.robot.state_column or "observation.state")[row],
            self.dataset.labels(episode)[row],
            {camera: both[1] for camera, both in frames.items()},
        )


def frames_at(dataset: RobotDataset, episode: int, rows: Sequence[int], robot: RobotConfig) -> dict[str, np.ndarray]:
    """Read the frames of some rows by the cameras' short names."""
    return {
        short_name(camera): dataset.frames(episode, dataset.camera_named(camera) or camera, np.array(rows))
        for camera in robot.cameras
    }


def read_endings(
    dataset: RobotDataset, episodes: Sequence[int], robot: RobotConfig, encoder: ClipEncoder, *, seed: int = 0
) -> Endings:
    """Read the ends of recorded episodes, frames before them, and ends beside another episode's instruction.

    Frames pass through the video codec, as predicted ones do. Episodes must end with their task done.
    """
    draw = np.random.default_rng(seed)
    words = {episode: dataset.labels(episode)[0] for episode in episodes}
    if len(set(words.values())) < 2:
        raise InputError("a success head compares instructions: give recordings with at least 2")
    canvases, said, is_done = [], [], []
    for episode in episodes:
        last = int(dataset.lengths[episode]) - 1
        early = (draw.random(NUM_OPEN) * OPEN_SHARE * last).astype(int).tolist()
        canvas = canvas_of(frames_at(dataset, episode, [last, *early], robot), robot)
        other = words[episode]
        while other == words[episode]:
            other = words[episodes[int(draw.integers(len(episodes)))]]
        canvases += [canvas, canvas[:1]]
        said += [words[episode]] * (1 + NUM_OPEN) + [other]
        is_done += [True] + [False] * (NUM_OPEN + 1)
    frames = torch.from_numpy(np.concatenate(canvases))
    passed = torch.cat([_through_codec(encoder, part) for part in frames.split(256)])
    text = mean_text(encoder.encode_text([robot.instruct(task) for task in said]))
    return Endings(passed.cpu(), text.float().cpu(), torch.tensor(is_done))


def head_judge(head: SuccessHead, encoder: ClipEncoder) -> Judge:
    """Judge frames by a success head."""

    def judge(
        newest: Tensor, goals: Sequence[Tensor | None], firsts: Sequence[Tensor], instructions: Sequence[str]
    ) -> Float[Tensor, " b"]:
        return head.score(newest.cpu(), mean_text(encoder.encode_text(instructions)).float().cpu())

    return judge


def goal_judge(encoder: ClipEncoder) -> Judge:
    """Judge frames by how much nearer their latents are to the goal's than the episode's first ones were."""

    def judge(
        newest: Tensor, goals: Sequence[Tensor | None], firsts: Sequence[Tensor], instructions: Sequence[str]
    ) -> Float[Tensor, " b"]:
        if any(goal is None for goal in goals):
            raise InputError('judging by goals needs keyframes that have one: give imagine.judge "head"')
        goal, first = torch.stack([g for g in goals if g is not None]), torch.stack(list(firsts))
        now, end, start = (encoder.video.encode(frames[:, None]).float().flatten(1) for frames in (newest, goal, first))
        left = (now - end).square().mean(1) / (start - end).square().mean(1).clamp(min=1e-6)
        return (1 - left).clamp(0, 1)

    return judge


def fit_world(bench: Workbench, num_steps: int, *, batch_size: int = 16, seed: int = 0) -> list[float]:
    """Teach a network, in place, to predict video from actions that are given clean; return the losses.

    Every sample is a recorded window at a drawn video level beside actions at level 0, and the video's loss alone
    counts. The optimiser is the recipe's, at a third of its rate.
    """
    recipe, reader = bench.recipe, bench.parts[0].training
    bench.net.requires_grad_(True).train()
    config = replace(
        recipe.train, num_steps=num_steps, batch_size=batch_size, num_micro_batches=1, ema_decay=0.0,
        learning_rate=recipe.train.learning_rate / 3, seed=seed, lora=None, frozen=(),
    )  # fmt: skip

    def loss(example: FlowExample) -> LossTerms:
        found = bench.net(example.batch, example.seen)
        error = video_error(found, example.target, example.seen.video_noise_level, recipe.noise).mean()
        return LossTerms(error, error.detach(), torch.zeros_like(error))

    def examples() -> Iterator[FlowExample]:
        draw = np.random.default_rng(seed)
        order = draw.permutation(len(reader.windows))
        for step in range(num_steps):
            samples = np.take(order, np.arange(step * batch_size, (step + 1) * batch_size), mode="wrap").tolist()
            batch = bench.encoder([reader.read(sample, 0) for sample in samples])
            generator = step_generator(seed, step, bench.device)
            sizes = batch.latents.shape[1], batch.state.shape[1], recipe.model.actions_per_block
            video_level, action_level = draw_noise_levels(len(batch), *sizes, generator, recipe.noise)
            yield with_noise_at(batch, video_level, torch.zeros_like(action_level), generator)

    losses = [record.loss for record in train(loss, examples(), make_optimizer(bench.net, config), config)]
    bench.net.requires_grad_(False).eval()
    return losses


def _through_codec(encoder: ClipEncoder, frames: Tensor) -> Tensor:
    """Return frames as predicted ones come: decoded from latents, the first frame of a clip alone."""
    clip = frames[:, None].expand(-1, 5, -1, -1, -1)
    latents = encoder.video.encode(clip.to(encoder.device))
    video = encoder.video.decode_video(latents)
    return to_frames(video)[:, -1]
