"""The benchmark: this library against transformers' own ways to generate, in one run, and what explains the result."""

from __future__ import annotations

from .command import bench_command
from .run import BenchReport, Conclusion, run_bench
from .settings import BenchSettings
from .summary import Summary

__all__ = ["BenchReport", "BenchSettings", "Conclusion", "Summary", "bench_command", "run_bench"]
