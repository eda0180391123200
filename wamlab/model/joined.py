"""Histories of single sessions, put together for one call of the network and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from wamlab.model.block import CrossKeys
from wamlab.model.kv_cache import History, Past


def joined(histories: Sequence[History]) -> History:
    """Return one history of several sessions, each given alone and all with as many streams.

    Texts and pasts of different length are filled up with tokens that nobody sees: sums change by rounding alone.
    Raises ValueError for a session that has not observed its first frame.
    """
    first, *others = histories
    if not others:
        return first
    lengths = tuple(history.num_frames for history in histories)
    pasts = [history.past for history in histories if history.past is not None and not history.lengths]
    if len(pasts) < len(histories):
        raise ValueError("only single sessions that have observed their first frame can be joined")
    past: Past = tuple(
        (_stacked([key for key, _ in layers], is_front=True), _stacked([value for _, value in layers], is_front=True))
        for layers in zip(*pasts, strict=True)
    )
    cross = tuple(_joined_cross(keys) for keys in zip(*(history.cross for history in histories), strict=True))
    if len(set(lengths)) == 1:
        return History(cross, past, lengths[0])
    counts = torch.tensor([past[0][0].shape[2] for past in pasts])
    is_filling = torch.arange(int(counts.max())) < (counts.max() - counts)[:, None]
    bias = torch.zeros(is_filling.shape).masked_fill(is_filling, -torch.inf).to(past[0][0].device)
    return History(cross, past, max(lengths), lengths, bias)


def parted(history: History, num_sessions: int) -> list[History]:
    """Return the history of each session, in memory of its own: the inverse of ``joined``."""
    if num_sessions == 1:
        return [history]
    history.num_streams(num_sessions)  # refuses a number that does not divide
    lengths = history.lengths or (history.num_frames,) * num_sessions
    found = []
    for session, length in enumerate(lengths):
        rows = slice(session, None, num_sessions)  # of each stream
        past = history.past and tuple(
            (_newest(key[rows], length, history.num_frames), _newest(value[rows], length, history.num_frames))
            for key, value in history.past
        )
        found.append(History(tuple(_cross_of(keys, session, rows) for keys in history.cross), past, length))
    return found


def _newest(values: Tensor, num_frames: int, num_held: int) -> Tensor:
    """Copy the tokens of the newest frames, so that nothing keeps those of other sessions alive."""
    num_tokens = values.shape[2] // num_held * num_frames
    return values[:, :, values.shape[2] - num_tokens :].clone()


def _cross_of(keys: CrossKeys, session: int, rows: slice) -> CrossKeys:
    bias = keys.text_bias
    return CrossKeys(
        keys.text_key[rows].clone(),
        keys.text_value[rows].clone(),
        bias if bias is None or bias.ndim == 1 else bias[session].clone(),
        None if keys.image_key is None else keys.image_key[rows].clone(),
        None if keys.image_value is None else keys.image_value[rows].clone(),
    )


def _joined_cross(keys: Sequence[CrossKeys]) -> CrossKeys:
    return CrossKeys(
        _stacked([k.text_key for k in keys]),
        _stacked([k.text_value for k in keys]),
        _joined_bias(keys),
        _stacked(image_keys) if (image_keys := [k.image_key for k in keys if k.image_key is not None]) else None,
        _stacked(images) if (images := [k.image_value for k in keys if k.image_value is not None]) else None,
    )


def _joined_bias(keys: Sequence[CrossKeys]) -> Tensor | None:
    """Return the bias that all sessions share, or else one for each row that also hides what fills up its text."""
    counts = [k.text_key.shape[2] for k in keys]
    rows = [
        torch.zeros(count, device=k.text_key.device) if k.text_bias is None else k.text_bias
        for k, count in zip(keys, counts, strict=True)
    ]
    if len(set(counts)) == 1 and all(torch.equal(row, rows[0]) for row in rows):
        return keys[0].text_bias
    longest = max(counts)
    filled = [F.pad(row, (0, longest - len(row)), value=-torch.inf) for row in rows]
    return torch.stack(filled).repeat(len(keys[0].text_key), 1)


def _stacked(values: Sequence[Tensor], *, is_front: bool = False) -> Tensor:
    """Stack (streams, heads, tokens, head_dim) of sessions to (streams * sessions, ...), filling up the tokens."""
    longest = max(v.shape[2] for v in values)
    missing = [longest - v.shape[2] for v in values]
    if any(missing):
        values = [F.pad(v, (0, 0, n, 0) if is_front else (0, 0, 0, n)) for v, n in zip(values, missing, strict=True)]
    return torch.stack(list(values), dim=1).flatten(0, 1)
