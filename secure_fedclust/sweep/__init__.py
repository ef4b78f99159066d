"""Privacy-utility sweeps: one file in, one tidy table and pictures out (docs/sweeps.md)."""

from secure_fedclust.sweep.config import SweepConfig
from secure_fedclust.sweep.study import SweepResult, sweep

__all__ = ["SweepConfig", "SweepResult", "sweep"]
