"""Drafters while they are trained: ``base`` (what the loop needs of one), ``dspark`` and ``conv``."""

from __future__ import annotations

from ...drafters.conv_model import ConvModel
from ...dspark.adapter import TargetAdapter
from ...dspark.model import DSparkModel
from ..settings import TrainSettings
from .base import Student
from .conv import ConvStudent
from .dspark import DSparkStudent

Trainee = DSparkModel | ConvModel
"""Models that can be trained."""


def build_student(adapter: TargetAdapter, model: Trainee, settings: TrainSettings) -> Student:
    """A model as the training loop sees it."""
    if isinstance(model, ConvModel):
        return ConvStudent(adapter, model)
    return DSparkStudent(adapter, model, settings)


__all__ = ["ConvStudent", "DSparkStudent", "Student", "Trainee", "build_student"]
