"""Predictors: guess what comes next from what has been committed.

For steps of a workflow: :class:`Constant`, :class:`LastValue`, :class:`Majority`, :class:`Markov`,
:class:`ByArguments`, :class:`NearestNeighbour`, :class:`TraceReplay`, a function of your own in :class:`Fn`, and
several of them in :class:`Tournament` or :class:`FirstOf`. For branches, bit by bit: :class:`TwoBit`, :class:`GShare`,
:class:`Perceptron` and :class:`TAGE`; :class:`Branch` makes one of these a predictor for steps.

None holds anything of a run. What came before is an argument, guesses included, and tables learn from committed
results only: there is nothing to undo when a guess was wrong, and one object may serve many steps and many runs at the
same time.
"""

from __future__ import annotations

from .branch import BranchPrediction, BranchPredictor, GShare, Perceptron, TwoBit
from .combined import FirstOf, Tournament
from .constant import Constant, LastValue
from .frequency import ByArguments, Majority, Markov
from .function import Fn
from .neighbours import NearestNeighbour
from .results import Branch
from .tage import TAGE
from .trace import TraceReplay

__all__ = [
    "TAGE",
    "Branch",
    "BranchPrediction",
    "BranchPredictor",
    "ByArguments",
    "Constant",
    "FirstOf",
    "Fn",
    "GShare",
    "LastValue",
    "Majority",
    "Markov",
    "NearestNeighbour",
    "Perceptron",
    "Tournament",
    "TraceReplay",
    "TwoBit",
]
