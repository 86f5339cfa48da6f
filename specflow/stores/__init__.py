"""Stores: where runs are kept. In memory, or in one SQLite file; :mod:`.conformance` checks any other."""

from __future__ import annotations

from .leases import this_owner
from .memory import MemoryStore
from .sqlite import SQLiteStore

__all__ = ["MemoryStore", "SQLiteStore", "this_owner"]
