"""Verifiers: does a guess hold? Whole values are compared; sampled drafts have the laws of their acceptance rules."""

from __future__ import annotations

from .laws import Law, PrefixOutcome, PrefixRule, block_rule, one_hot_rule, residual, token_rule
from .values import Equal, Judge, Predicate, SameFields, Tolerance

__all__ = [
    "Equal",
    "Judge",
    "Law",
    "Predicate",
    "PrefixOutcome",
    "PrefixRule",
    "SameFields",
    "Tolerance",
    "block_rule",
    "one_hot_rule",
    "residual",
    "token_rule",
]
