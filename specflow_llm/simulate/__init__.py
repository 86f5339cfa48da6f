"""What would another policy have achieved at another load? Recorded rounds are replayed under measured costs."""

from __future__ import annotations

from .candidates import DEFAULT_POLICIES, policy_names
from .plot import save_plot
from .replay import Outcome, replay
from .report import Simulation, simulate, tables

__all__ = ["DEFAULT_POLICIES", "Outcome", "Simulation", "policy_names", "replay", "save_plot", "simulate", "tables"]
