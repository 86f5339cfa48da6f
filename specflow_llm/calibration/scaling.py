"""What corrects a confidence: its logit is divided by a temperature and shifted, by its position alone.

``sigmoid(z / T + b)`` is the sigmoid of Platt scaling (Platt, "Probabilistic outputs for support vector machines",
1999), with slope 1 / T. With b = 0 it is temperature scaling (Guo et al., arXiv:1706.04599), which stretches logits
about zero and so cannot move a drafter that claims 0.6 on average where 0.3 are accepted.

Letters in shapes: K positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specflow.errors import InvalidSettingError

from .metrics import Floats


@dataclass(frozen=True, slots=True)
class Scale:
    """The correction of one position: ``z / temperature + shift``."""

    temperature: float = 1.0
    """T > 0: above 1 it draws confidences towards 1/2, before the shift."""
    shift: float = 0.0
    """b, in logits: below 0 it takes confidence away everywhere."""

    def __post_init__(self) -> None:
        """Validate both."""
        if not (_is_number(self.temperature) and self.temperature > 0.0):
            raise InvalidSettingError("temperature", self.temperature, "a finite number > 0")
        if not _is_number(self.shift):
            raise InvalidSettingError("shift", self.shift, "a finite number")

    @property
    def is_identity(self) -> bool:
        """True when it changes nothing."""
        return self.temperature == 1.0 and self.shift == 0.0

    def apply(self, logit: float) -> float:
        """One corrected logit."""
        return logit / self.temperature + self.shift


def calibrated(logits: npt.ArrayLike, scales: Sequence[Scale] | None = None) -> Floats:
    """Survival estimates from conditional logits: products of sigmoid(z_k / T_k + b_k).

    Args:
        logits: [..., K] logit of P(token k is accepted | the tokens before it are), K <= the number of scales.
        scales: one per position; None leaves the confidences as they are.

    Returns:
        [..., K] P(tokens 0..k are all accepted), which never rises with k.

    Raises:
        InvalidSettingError: there are more positions than scales.
    """
    values = np.asarray(logits, dtype=np.float64)
    if scales is not None:
        width = values.shape[-1]
        if len(scales) < width:
            raise InvalidSettingError("scales", tuple(scales), f"one for each of {width} positions")
        temperatures = np.array([scale.temperature for scale in scales[:width]])
        shifts = np.array([scale.shift for scale in scales[:width]])
        values = values / temperatures + shifts
    return np.asarray(np.cumprod(sigmoid(values), axis=-1), dtype=np.float64)


def sigmoid(logits: Floats) -> Floats:
    """1 / (1 + exp(-z)), without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * logits)), dtype=np.float64)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
