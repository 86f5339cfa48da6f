"""The command line ``specflow``: look at stored runs, go on with them, ask what if, and test programs."""

from __future__ import annotations

from .app import main

__all__ = ["main"]
