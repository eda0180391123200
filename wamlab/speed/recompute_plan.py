"""Which block of a network keeps what of its forward pass: one policy a block, written, read and drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from wamlab.errors import InputError

# From the simplest to the least simple, which decides between plans that are equally good.
POLICIES = ("keep", "full", "attention", "matmuls", "offload")
MEANINGS = {
    "keep": "keeps everything",
    "full": "computes everything again",
    "attention": "keeps attention outputs, computes the rest again",
    "matmuls": "keeps attention and matrix products, computes the rest again",
    "offload": "keeps everything in host memory",
}
MARKS = {"keep": "#", "full": ".", "attention": "o", "matmuls": "+", "offload": "^"}
COLORS = {
    "keep": "#2b6cb0", "full": "#e2e8f0", "attention": "#b794f4", "matmuls": "#68b2e3", "offload": "#f6ad55",
}  # fmt: skip
RUN = re.compile(r"\s*(\d+)\s*\*?\s*([a-z]+)\s*")


@dataclass(frozen=True)
class RecomputePlan:
    """One policy of ``POLICIES`` for each block, the first block's first."""

    policies: tuple[str, ...]

    def __post_init__(self) -> None:
        for index, policy in enumerate(self.policies):
            if policy not in POLICIES:
                raise InputError(f'block {index} has the policy "{policy}": give one of {", ".join(POLICIES)}')

    @classmethod
    def uniform(cls, policy: str, num_blocks: int) -> RecomputePlan:
        """Return the plan that treats every block alike."""
        return cls((policy,) * num_blocks)

    @classmethod
    def read(cls, text: str) -> RecomputePlan:
        """Return the plan that ``str`` wrote, such as "12 full, 28 keep"; anything else raises InputError."""
        policies: list[str] = []
        for part in text.split(","):
            found = RUN.fullmatch(part)
            if found is None:
                raise InputError(f'"{part.strip()}" is no part of a recompute plan: write "12 full, 28 keep"')
            policies += [found[2]] * int(found[1])
        return cls(tuple(policies))

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """Return policies with the number of neighbouring blocks that have them, in order."""
        return tuple((policy, len(list(blocks))) for policy, blocks in groupby(self.policies))

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Return what makes a plan less simple, the weightiest first: kinds, changes between blocks, kinds' ranks."""
        kinds = set(self.policies)
        return len(kinds), len(self.runs), sum(POLICIES.index(policy) for policy in kinds)

    def count(self, policy: str) -> int:
        """Return how many blocks have a policy."""
        return self.policies.count(policy)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"policies": list(self.policies)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RecomputePlan:
        """Return the plan that ``to_dict`` gave."""
        return cls(tuple(values["policies"]))

    def __len__(self) -> int:
        return len(self.policies)

    def __iter__(self) -> Iterator[str]:
        return iter(self.policies)

    def __str__(self) -> str:
        return ", ".join(f"{number} {policy}" for policy, number in self.runs)

    def draw(self) -> str:
        """Return a picture of the blocks in text: one mark a block, first block on the left, and what marks mean."""
        rows = "".join(MARKS[policy] for policy in self.policies)
        used = [policy for policy in POLICIES if policy in self.policies]
        legend = [f"  {MARKS[policy]} {self.count(policy):3} x {policy}: {MEANINGS[policy]}" for policy in used]
        return "\n".join([f"blocks 0..{len(self) - 1}  |{rows}|", *legend])

    def draw_svg(self, *, width_px: int = 640) -> str:
        """Return the same picture as SVG, which notebooks show."""
        used = [policy for policy in POLICIES if policy in self.policies]
        step_px = width_px / max(len(self), 1)
        boxes = [
            f'<rect x="{index * step_px:.1f}" y="0" width="{max(step_px - 1, 1):.1f}" height="28" rx="2" '
            f'fill="{COLORS[policy]}"><title>block {index}: {MEANINGS[policy]}</title></rect>'
            for index, policy in enumerate(self.policies)
        ]
        for row, policy in enumerate(used):
            top_px = 40 + 18 * row
            boxes.append(f'<rect x="0" y="{top_px}" width="12" height="12" rx="2" fill="{COLORS[policy]}"/>')
            boxes.append(
                f'<text x="18" y="{top_px + 10}" font-size="12" font-family="sans-serif" fill="#848d97">'
                f"{self.count(policy)} x {policy}: {MEANINGS[policy]}</text>"
            )
        height_px = 40 + 18 * len(used)
        size = f'width="{width_px}" height="{height_px}" viewBox="0 0 {width_px} {height_px}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(boxes)}</svg>'

    def _repr_svg_(self) -> str:
        return self.draw_svg()
