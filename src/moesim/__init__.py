"""moesim: predicts how long a large MoE training run takes on a cluster and what it costs."""

from __future__ import annotations

__version__ = "0.1.0"
