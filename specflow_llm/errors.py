"""Errors of the decoding backend. They hang below the core's tree (see ``specflow.errors``).

::

    SpecflowError
    ├── DefinitionError (ValueError)
    │   ├── InvalidSettingError      a SamplingParams or Speculation field cannot work
    │   ├── PromptError              a prompt cannot be decoded: empty, wrong type, ids out of range, no tokenizer
    │   ├── ContextLengthError       prompt (plus requested tokens) does not fit the model
    │   ├── ModelNotFoundError       no such path, hub id or built-in model
    │   ├── UnsupportedModelError    this architecture cannot be decoded exactly here, and why
    │   ├── DataFileError            a file of measurements (recorded rounds, costs) cannot be used, and why
    │   ├── DrafterError             this drafter cannot serve this target, and why
    │   ├── CheckpointError          a drafter's checkpoint cannot be used as it is, and why
    │   └── TrainingError            training cannot start or go on, and why
    └── MisuseError (RuntimeError)
        ├── EngineBusyError          step() was called while a step was running: from a callback, or another thread
        └── SlotError                a slot cache row was used in a way that would corrupt it
"""

from __future__ import annotations

from specflow.errors import DefinitionError, InvalidSettingError, MisuseError


class PromptError(DefinitionError):
    """A prompt cannot be decoded."""

    def __init__(self, index: int, problem: str, remedy: str) -> None:
        self.index = index
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"prompt {index}: {problem}; {remedy}")


class ContextLengthError(DefinitionError):
    """A prompt does not fit the model's context."""

    def __init__(self, index: int, prompt_tokens: int, context: int) -> None:
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.context = context
        super().__init__(
            f"prompt {index} has {prompt_tokens} tokens, but the model's context holds {context} "
            "including at least one new token; shorten the prompt or load a model with a longer context"
        )


class ModelNotFoundError(DefinitionError):
    """No such path, hub id or built-in model."""

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        self.name = name
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"cannot load model {name!r}: {reason}; {remedy}")


class UnsupportedModelError(DefinitionError):
    """This architecture cannot be decoded exactly here."""

    def __init__(self, model: str, reason: str, remedy: str) -> None:
        self.model = model
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{model} is not supported: {reason}; {remedy}")


class DrafterError(DefinitionError):
    """This drafter cannot serve this target."""

    def __init__(self, drafter: str, reason: str, remedy: str) -> None:
        self.drafter = drafter
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"drafter {drafter}: {reason}; {remedy}")


class CheckpointError(DefinitionError):
    """A drafter's checkpoint cannot be used as it is."""

    def __init__(self, path: object, reason: str, remedy: str) -> None:
        self.path = str(path)
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"drafter checkpoint {self.path}: {reason}; {remedy}")


class DataFileError(DefinitionError):
    """A file of measurements cannot be used as it is."""

    def __init__(self, path: object, reason: str, remedy: str) -> None:
        self.path = str(path)
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{self.path}: {reason}; {remedy}")


class TrainingError(DefinitionError):
    """Training cannot start or go on."""

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"cannot train: {reason}; {remedy}")


class EngineBusyError(MisuseError):
    """An engine was stepped while a step was running."""

    def __init__(self) -> None:
        super().__init__(
            "the engine is inside a step already; it serves one caller at a time. "
            "Do not generate from a logits processor, stopping criterion or observer of the same LLM, "
            "and give each thread its own LLM or a lock"
        )


class SlotError(MisuseError):
    """A slot cache row was used in a way that would corrupt it."""

    def __init__(self, row: int, problem: str) -> None:
        self.row = row
        self.problem = problem
        super().__init__(f"slot cache row {row}: {problem}")


def require(
    ok: bool,  # noqa: FBT001 - the condition is what is required
    setting: str,
    value: object,
    expected: str,
) -> None:
    """Refuse a setting unless a condition holds.

    Raises:
        InvalidSettingError: it does not.
    """
    if not ok:
        raise InvalidSettingError(setting, value, expected)
