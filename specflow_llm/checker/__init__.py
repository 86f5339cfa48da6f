"""Checks a drafter of one's own: is it exact, does it keep its state in order, what does it gain?"""

from __future__ import annotations

from .check import check_drafter
from .harness import tiny_target
from .report import Check, Concern, DrafterReport, Gain, Outcome

__all__ = ["Check", "Concern", "DrafterReport", "Gain", "Outcome", "check_drafter", "tiny_target"]
