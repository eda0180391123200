"""What a server has done, as Prometheus text."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Metrics:
    """Counters since the start, and the latencies of the last thousand answers."""

    num_requests: int = 0
    num_malformed: int = 0  # answered with a sentence
    num_failed: int = 0  # of well-formed requests: the policy raised
    num_connections: int = 0
    num_planned: int = 0  # requests that a call of the policy answered
    latencies_ms: deque[float] = field(default_factory=lambda: deque(maxlen=1000))  # request read to answer ready

    def percentile_ms(self, percent: int | float) -> float:
        return float(np.percentile(list(self.latencies_ms), percent)) if self.latencies_ms else 0.0

    def text(self, gauges: Mapping[str, int | float]) -> str:
        """Return all numbers, those of this moment (``gauges``) last."""
        rows = {
            "requests_total": self.num_requests,
            "malformed_total": self.num_malformed,
            "failed_total": self.num_failed,
            "connections_total": self.num_connections,
            "planned_total": self.num_planned,
            'latency_ms{quantile="0.5"}': self.percentile_ms(50),
            'latency_ms{quantile="0.99"}': self.percentile_ms(99),
            **gauges,
        }
        return "".join(f"wamlab_serve_{name} {value:g}\n" for name, value in rows.items())
