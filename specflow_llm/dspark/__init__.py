"""DSpark: a drafter that reads the target's features, drafts a block in one pass, and knows how sure it is.

``config`` (what it is made of), ``layers`` and ``model`` (the parallel backbone), ``heads`` (Markov and confidence),
``adapter`` (what it borrows from the target), ``checkpoint`` (files). The drafter that serves the engine is
:class:`specflow_llm.drafters.dspark.DSparkDrafter`; training is :mod:`specflow_llm.training`.
"""

from .adapter import DraftHead, TargetAdapter
from .config import DSparkConfig, Layout, MarkovKind, spread_layers
from .model import DSparkModel

__all__ = ["DSparkConfig", "DSparkModel", "DraftHead", "Layout", "MarkovKind", "TargetAdapter", "spread_layers"]
