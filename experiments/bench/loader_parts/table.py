"""What loaders cost beside one another: medians and spreads of ratios paired by round, with the bare decoder's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from loader_parts import peers, rounds
from loader_parts.rounds import Costs
from loader_parts.ways import BARE, FLOAT32, OWN, POOLED, RLINF, SHARDS, STORED, UINT8, WINDOW

from wamlab.lab.table import Table

RATIOS: Mapping[str, tuple[str, str, str]] = {  # figure -> what is dearer, what is cheaper, the table's head
    "speedup_vs_lerobot_float32": (FLOAT32, OWN, "LeRobot float32"),
    "speedup_vs_lerobot_uint8": (UINT8, OWN, "LeRobot uint8"),
    "speedup_vs_dreamzero": (WINDOW, OWN, "DreamZero"),
    "speedup_vs_rlinf": (RLINF, OWN, "RLinf"),
    "speedup_vs_dreamzero_pool": (WINDOW, POOLED, "DreamZero, pool"),
    "speedup_vs_rlinf_pool": (RLINF, POOLED, "RLinf, pool"),
    "cpu_vs_bare_torchcodec": (OWN, BARE, "ours / bare"),
    "warm_store_speedup": (FLOAT32, STORED, "LeRobot, store"),
}
SETTING_WIDTH, CELL_WIDTH = 46, 23


@dataclass(frozen=True)
class Ratio:
    """A ratio's median and spread over rounds."""

    median: float
    lowest: float
    highest: float
    num_rounds: int
    bare: float | None  # what the bare decoder reaches, where that decodes as often

    def __str__(self) -> str:
        digits = 2 if self.highest < 10 else 1
        bare = f" ({self.bare:.{digits}f})" if self.bare else ""
        return f"{self.median:.{digits}f} {self.lowest:.{digits}f}–{self.highest:.{digits}f}{bare}"


def ratios_of(costs: Mapping[str, Costs]) -> dict[str, Ratio]:
    """Return every ratio that could be measured, by its figure's name."""
    wanted = dict(RATIOS)
    if pooled := next((way for way in costs if way.startswith("wamlab, pool") and way != POOLED), None):
        wanted["speedup_vs_dreamzero_shards"] = (SHARDS, pooled, "DreamZero, shards")
    found = {}
    for key, (dear, cheap, _) in wanted.items():
        if dear not in costs or cheap not in costs or not costs[dear].seconds:
            continue
        if own := rounds.ratios(costs[dear], costs[cheap]):
            bare = rounds.ratios(costs[dear], costs[BARE]) if cheap == OWN else []
            reached = statistics.median(bare) if bare else None
            found[key] = Ratio(statistics.median(own), own[0], own[-1], len(own), reached)
    return found


def head() -> str:
    """Return the whole table's head."""
    names = "".join(name.ljust(CELL_WIDTH) for *_, name in RATIOS.values())
    return (
        "times cheaper in CPU time than each peer: median lowest–highest of rounds (bare decoder)\n"
        f"{'videos, window'.ljust(SETTING_WIDTH)}{names}".rstrip()
    )


def line(setting: str, found: Mapping[str, Ratio]) -> str:
    """Return a setting's line of the whole table."""
    cells = (str(found[key]) if key in found else "–" for key in RATIOS)
    return (setting.ljust(SETTING_WIDTH) + "".join(cell.ljust(CELL_WIDTH) for cell in cells)).rstrip()


def detailed(costs: Mapping[str, Costs]) -> Table:
    """Return a line a loader: what it costs, how many times what wamlab costs, and what the bare decoder does."""
    return Table([_row(way, costs) for way in costs])


def _row(way: str, costs: Mapping[str, Costs]) -> dict[str, Any]:
    cost = costs[way]
    if cost.error:
        return {"loader": way, "ms, median": cost.error[:70]}
    own, pooled, bare = (rounds.ratios(cost, costs[other]) for other in (OWN, POOLED, BARE))
    return {
        "loader": way + (" (PyAV in torchcodec's place)" if _is_replaced(way) else ""),
        "ms, median": cost.ms,
        "/ wamlab": statistics.median(own),
        "lowest": own[0],
        "highest": own[-1],
        f"/ {POOLED.removeprefix('wamlab, ')}": statistics.median(pooled),
        "/ bare decoder": statistics.median(bare),
    }


def _is_replaced(way: str) -> bool:
    return bool(peers.NO_TORCHCODEC) and way in (FLOAT32, UINT8, RLINF, BARE)


def figures_of(costs: Mapping[str, Costs], found: Mapping[str, Ratio]) -> dict[str, Any]:
    """Return a setting's figures for JSON: the medians by name, and all of it."""
    return {
        **{key: ratio.median for key, ratio in found.items()},
        "cpu_ms": {way: cost.ms for way, cost in costs.items() if cost.seconds},
        "ratios": {key: asdict(ratio) for key, ratio in found.items()},
    }
