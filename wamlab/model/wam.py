"""The world action model: noised latents and actions, state and text in; their velocity out.

Parameter names and shapes are those of the published DreamZero and Wan checkpoints (spec 8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from wamlab.errors import InputError, check_range
from wamlab.model.attention import Layout
from wamlab.model.block import Block, Context, RmsNorm, Runs
from wamlab.model.kv_cache import History
from wamlab.model.positions import place_code, window_rotation
from wamlab.model.tokens import (
    ActionEncoder,
    CategoryLinear,
    CategoryMlp,
    ImageEmbedding,
    VideoHead,
    patches,
    preconditioned,
    time_sinusoid,
    unpatch,
)
from wamlab.types import Batch, Noised, Velocity

PATCH_PX = 2  # latent pixels along each side of a token
MASK_CHANNELS = 4  # of the first-frame mask in the condition


@dataclass(frozen=True)
class WAMConfig:
    """Sizes of a world action model; ``model/presets.py`` has the published ones."""

    dim: int
    layers: int
    heads: int
    ffn_dim: int
    latent_channels: int
    text_dim: int
    text_len: int  # text is padded with zeros to this many tokens, all of them attended
    freq_dim: int = 256  # of the noise level's sinusoid
    has_condition: bool = False  # first-frame mask and latents joined to the channels (Wan image-to-video)
    has_image: bool = False  # image tokens in cross-attention
    image_dim: int = 1280
    latents_per_block: int = 2
    actions_per_block: int = 24
    states_per_block: int = 1
    max_blocks: int = 4
    max_action_dim: int = 32
    max_state_dim: int = 64
    mlp_dim: int = 1024  # hidden width of the state encoder and the action decoder
    num_categories: int = 1
    video_spread: float = 0.0  # standard deviation the latents are preconditioned for; 0: not, as published
    drops_noisy_first: bool = False  # do not train on frame 0, which is given at inference: fewer tokens
    position_scale: float = 0.0  # of a fixed code of each patch's place added to its token; published models have none
    eps: float = 1e-6

    def __post_init__(self) -> None:
        sizes = (
            "dim", "layers", "heads", "ffn_dim", "latent_channels", "text_dim", "text_len", "image_dim", "mlp_dim",
            "latents_per_block", "actions_per_block", "max_blocks", "max_action_dim", "max_state_dim",
            "num_categories",
        )  # fmt: skip
        check_range("model", self, 1, math.inf, *sizes)
        check_range("model", self, 2, math.inf, "freq_dim")
        check_range("model", self, 1, 1, "states_per_block")
        check_range("model", self, 0, 1e6, "position_scale", "eps", "video_spread")
        if self.freq_dim % 2:
            raise InputError(f"model.freq_dim is {self.freq_dim}: give an even number")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise InputError(
                f"model.dim {self.dim} split over model.heads {self.heads} must give whole, even heads: change either"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def in_channels(self) -> int:
        condition = MASK_CHANNELS + self.latent_channels if self.has_condition else 0
        return self.latent_channels + condition


class WorldActionModel(nn.Module):
    """One transformer that denoises the next video latents and the actions that lead there."""

    block_type = Block

    def __init__(self, config: WAMConfig) -> None:
        super().__init__()
        c, dim = config, config.dim
        self.config = config
        self.patch_embedding = nn.Conv3d(c.in_channels, dim, (1, PATCH_PX, PATCH_PX), (1, PATCH_PX, PATCH_PX))
        self.text_embedding = nn.Sequential(
            nn.Linear(c.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(c.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(
            self.block_type(dim, c.heads, c.ffn_dim, c.eps, has_image=c.has_image) for _ in range(c.layers)
        )
        self.head = VideoHead(dim, PATCH_PX**2 * c.latent_channels, c.eps)
        if c.has_image:
            self.img_emb = ImageEmbedding(c.image_dim, dim)
        self.state_encoder = CategoryMlp(c.num_categories, c.max_state_dim, c.mlp_dim, dim)
        self.action_encoder = ActionEncoder(c.num_categories, c.max_action_dim, dim)
        self.action_decoder = CategoryMlp(c.num_categories, dim, c.mlp_dim, c.max_action_dim)
        self.init_weights()

    @property
    def layers(self) -> list[Block]:
        """Return the blocks, typed."""
        return cast(list[Block], list(self.blocks))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise for training from scratch; also after ``to_empty`` of a network made on the meta device.

        The last maps of both heads are zero, so training starts from the loss of predicting no velocity.
        The reference draws text, time, state and action maps with a spread of 0.02, which is about
        1 / sqrt(inputs) at its widths; here spreads follow the number of inputs, so that small networks hear their
        actions and their text from the first step (0.02 at width 128 cost 700 steps to learn to copy an action).
        Gates start at one, so that the residual stream is open for the few thousand steps of a small run.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv3d):
                nn.init.xavier_uniform_(module.weight.flatten(1))
                assert module.bias is not None
                nn.init.zeros_(module.bias)
            elif isinstance(module, CategoryLinear):
                nn.init.normal_(module.W, std=module.W.shape[1] ** -0.5)
                nn.init.zeros_(module.b)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, RmsNorm):
                nn.init.ones_(module.weight)
        nn.init.zeros_(self.action_decoder.layer2.W)
        for block in self.layers:
            nn.init.normal_(block.modulation, std=self.config.dim**-0.5)
            block.modulation[:, [2, 5]] += 1
        nn.init.normal_(self.head.modulation, std=self.config.dim**-0.5)
        nn.init.zeros_(self.head.head.weight)

    def forward(self, batch: Batch, noised: Noised) -> Velocity:
        """Predict every noised block of a window from the clean blocks before it (teacher forcing)."""
        c = self.config
        num_blocks, num_frames = batch.state.shape[1], batch.latents.shape[1]
        height, width = (length // PATCH_PX for length in batch.latents.shape[-2:])
        layout = Layout(
            num_blocks,
            height * width,
            c.latents_per_block,
            noised.actions.shape[1] // num_blocks,
            c.states_per_block,
            has_last_clean=False,
            has_first_noisy=not c.drops_noisy_first,
        )
        if layout.num_frames != num_frames:
            raise InputError(
                f"a window of {num_blocks} blocks of {c.latents_per_block} latents has {layout.num_frames} latent "
                f"frames, but this batch has {num_frames}: set model.latents_per_block and window alike"
            )
        num_clean, num_noisy = layout.num_clean, layout.num_noisy
        latents = torch.cat([batch.latents[:, :num_clean], noised.latents[:, -num_noisy:]], dim=1)
        condition = batch.condition
        if condition is not None:
            condition = torch.cat([condition[:, :num_clean], condition[:, -num_noisy:]], dim=1)
        video = self._video_tokens(latents, condition)
        tokens = [video.flatten(1, 2), self.state_encoder(batch.state)]
        levels = [noised.video_noise_level[:, -num_noisy:]]
        runs = [(1, num_clean * layout.frame_tokens), (num_noisy, layout.frame_tokens)]
        state_level = noised.video_noise_level[:, 1 :: c.latents_per_block]
        if layout.actions_per_block:
            tokens.insert(1, self.action_encoder(noised.actions, noised.action_noise_level))
            state_level = noised.action_noise_level[:, :: layout.actions_per_block]
            levels.append(state_level)
            runs.append((num_blocks, layout.actions_per_block))
        levels.append(state_level)
        runs.append((num_blocks, c.states_per_block))
        time, slots = self._time(torch.cat([torch.zeros_like(levels[0][:, :1]), *levels], dim=1))
        rotation = window_rotation(layout, height, width, c.head_dim, video.device)
        context = self._context(batch.text, batch.image)
        hidden = torch.cat(tokens, dim=1).type_as(slots)  # as blocks return it: one compilation fits all
        for index, block in enumerate(self.layers, 1):
            is_last = index == len(self.layers)
            hidden = block(hidden, slots, rotation, context, layout, tuple(runs), is_last=is_last)
        noisy, actions = hidden.split(layout.sizes[1:3], dim=1)
        noisy = noisy.unflatten(1, (num_noisy, layout.frame_tokens))
        found = unpatch(self.head(noisy, time[:, 1 : 1 + num_noisy]), height, width, PATCH_PX)
        velocity = self._preconditioned(found, noised.latents[:, -num_noisy:], noised.video_noise_level[:, -num_noisy:])
        return Velocity(video=velocity.float(), actions=self.action_decoder(actions).float())

    def start(self, text: Float[Tensor, "b n d"], image: Tensor | None = None) -> History:
        """Begin sessions: project the instruction (and first image) once for all that follows."""
        context = self._context(text, image)
        return History(tuple(block.cross_keys(context) for block in self.layers))

    def observe(
        self, history: History, latents: Float[Tensor, "b t c h w"], condition: Tensor | None = None
    ) -> History:
        """Append clean frames: frame 0 alone first, then one block at a time (spec 1.9, steps 1 and 2).

        Of a history with several streams of a session, one after another, latents may come once for all of them.
        """
        num_frames = latents.shape[1]
        wanted = self.config.latents_per_block if history.num_frames else 1
        if num_frames != wanted:
            raise InputError(f"a history of {history.num_frames} frames grows by {wanted}, not {num_frames} frames")
        video = self._video_tokens(latents, condition)
        _, slots = self._time(torch.zeros(len(latents), 1, dtype=torch.float64, device=latents.device))
        _, rotation = self._rotations(history, latents)
        tokens = video.flatten(1, 2)
        num_streams, bias = history.num_streams(len(tokens)), history.past_bias
        past = []
        for index, block in enumerate(self.layers):
            held = history.past[index] if history.past else None
            runs = ((1, tokens.shape[1]),)
            is_last = index == len(self.layers) - 1
            own = held if num_streams == 1 or held is None else (held[0][: len(tokens)], held[1][: len(tokens)])
            tokens, new = block.step(
                tokens, slots, rotation, history.cross[index], own, 0, runs,
                is_last=is_last, num_streams=num_streams, past_bias=bias,
            )  # fmt: skip
            if num_streams > 1:  # from here on they differ
                new = (new[0].repeat(num_streams, 1, 1, 1), new[1].repeat(num_streams, 1, 1, 1))
                rotation, bias = history.spread(rotation, num_streams)
                slots, num_streams = slots.repeat(num_streams, 1, 1, 1), 1
            past.append(new if held is None else (torch.cat((held[0], new[0]), 2), torch.cat((held[1], new[1]), 2)))
        return history.grown(tuple(past), num_frames)

    def denoise(
        self,
        history: History,
        latents: Float[Tensor, "b t c h w"],
        actions: Float[Tensor, "b a j"],
        state: Float[Tensor, "b s k"],
        video_noise_level: Float[Tensor, " b"],
        action_noise_level: Float[Tensor, " b"],
        condition: Tensor | None = None,
    ) -> Velocity:
        """Predict the velocity of the next block's latents and actions; the history stays as it is.

        Of a history with several streams of a session, one after another, everything comes once for all of them; the
        velocity has a part for each.
        """
        if not history.num_frames:
            raise InputError("a session must observe its first frame before it can denoise a block")
        video = self._video_tokens(latents, condition)
        num_frames, frame_tokens, num_actions = video.shape[1], video.shape[2], actions.shape[1]
        per_action = action_noise_level[:, None].expand(-1, num_actions)
        tokens = torch.cat(
            [video.flatten(1, 2), self.action_encoder(actions, per_action), self.state_encoder(state)], dim=1
        )
        levels = torch.stack([video_noise_level, action_noise_level, action_noise_level], dim=1)
        time, slots = self._time(levels)
        runs: Runs = ((1, num_frames * frame_tokens), (1, num_actions), (1, state.shape[1]))
        rotation, _ = self._rotations(history, latents)
        num_streams, bias = history.num_streams(len(tokens)), history.past_bias
        for block, cross, past in zip(self.layers, history.cross, history.past or (), strict=True):
            own = past if num_streams == 1 else (past[0][: len(tokens)], past[1][: len(tokens)])
            tokens, _ = block.step(
                tokens, slots, rotation, cross, own, state.shape[1], runs, num_streams=num_streams, past_bias=bias
            )
            if num_streams > 1:  # from here on they differ
                rotation, bias = history.spread(rotation, num_streams)
                slots, time = slots.repeat(num_streams, 1, 1, 1), time.repeat(num_streams, 1, 1)
                latents = latents.repeat(num_streams, 1, 1, 1, 1)
                video_noise_level = video_noise_level.repeat(num_streams)
                num_streams = 1
        noisy = tokens[:, : num_frames * frame_tokens].unflatten(1, (num_frames, frame_tokens))
        height, width = (length // PATCH_PX for length in latents.shape[-2:])
        video_velocity = unpatch(self.head(noisy, time[:, :1].expand(-1, num_frames, -1)), height, width, PATCH_PX)
        video_velocity = self._preconditioned(video_velocity, latents, video_noise_level[:, None])
        found = tokens[:, num_frames * frame_tokens :][:, :num_actions]
        return Velocity(video=video_velocity.float(), actions=self.action_decoder(found).float())

    def _preconditioned(self, found: Tensor, noised: Tensor, level: Tensor) -> Tensor:
        spread = self.config.video_spread
        return preconditioned(found, noised, level, spread) if spread else found

    def _video_tokens(self, latents: Tensor, condition: Tensor | None) -> Tensor:
        if (condition is not None) != self.config.has_condition:
            raise InputError(
                f"this network was built with has_condition={self.config.has_condition}: "
                f"the batch {'lacks' if condition is None else 'must not have'} condition latents"
            )
        joined = latents if condition is None else torch.cat([latents, condition], dim=2)
        tokens = F.linear(patches(joined, PATCH_PX), self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        if self.config.position_scale:
            height, width = (length // PATCH_PX for length in latents.shape[-2:])
            code = place_code(height, width, self.config.dim, tokens.device)
            tokens = tokens + (self.config.position_scale * code).type_as(tokens)
        return tokens

    def _context(self, text: Tensor, image: Tensor | None) -> Context:
        """Bring text and image to network width; the zeros that pad the text share one token (spec 1.2)."""
        num_pads = self.config.text_len - text.shape[1]
        if num_pads < 0:
            raise InputError(f"text has {text.shape[1]} tokens but model.text_len is {self.config.text_len}")
        bias = None
        if num_pads:
            text = F.pad(text, (0, 0, 0, 1))
            bias = F.pad(text.new_zeros(text.shape[1] - 1), (0, 1), value=math.log(num_pads))
        is_seen = image is not None and self.config.has_image
        return Context(self.text_embedding(text), self.img_emb(image) if is_seen else None, bias)

    def _time(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Embed noise levels (b, slots), in float32: the embedding (b, slots, d) and modulation (b, slots, 6, d)."""
        with torch.autocast(levels.device.type, enabled=False):
            dtype = next(self.time_embedding.parameters()).dtype
            time = self.time_embedding(time_sinusoid(levels, self.config.freq_dim).to(dtype))
            return time, self.time_projection(time).unflatten(-1, (6, -1))

    def _rotations(self, history: History, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotations of a block with its actions and state, and of its video alone."""
        c = self.config
        height, width = (length // PATCH_PX for length in latents.shape[-2:])
        sizes = (c.head_dim, c.latents_per_block, c.actions_per_block, c.states_per_block)
        return history.rotations(latents.shape[1], height, width, *sizes, latents.device)
