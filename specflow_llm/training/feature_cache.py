"""Features of training text on disk: written once, by whoever has them first, for any number of trainings.

A text's features depend on its tokens, the target and the tapped layers, and on nothing else, so that is what they are
filed under: a cache serves any selection of texts, grows with them, and can be filled while text is being written
(:mod:`.writer`), by several processes at once. Shards are complete or absent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..dspark.adapter import TargetAdapter
from ..dspark.checkpoint import write_whole
from ..errors import TrainingError
from .features import Features, FeatureSource
from .samples import Sample

CACHE_DTYPE = torch.bfloat16
"""Type of cached features and hidden states."""
_PARTS = ("features", "hidden", "log_total")
_TABLE = "cache.json"
_LOG_BYTES = 4
_GROUP = 8  # texts computed in one forward
_TOLD = 256  # texts between two words about progress


def cache_bytes(tokens: int, num_layers: int, hidden_size: int) -> int:
    """Bytes a cache of so many tokens takes: bfloat16 features and hidden state, and one float32, per token."""
    return tokens * (2 * hidden_size * (num_layers + 1) + _LOG_BYTES)


def cached_layers(folder: Path) -> tuple[int, ...]:
    """The tapped layers of the cache in a folder; none where there is no cache."""
    table = folder / _TABLE
    return tuple(json.loads(table.read_text(encoding="utf-8")).get("layers", ())) if table.exists() else ()


def text_key(token_ids: Sequence[int]) -> str:
    """What a text's features are filed under: a digest of its tokens (128 bits, in hexadecimal)."""
    return _digest(repr(tuple(token_ids)))


class FeatureCache:
    """Features of texts in a folder.

    What is put in is written in shards, each under the digest of what it holds and only when it is complete: a killed
    run loses the texts of one shard and no more.

    Args:
        folder: where the shards are; made if absent.
        identity: what features depend on beside the tokens (target, its type, layers); a cache of something else is
            refused.
        shard_size: texts per shard.

    Raises:
        TrainingError: the folder holds a cache of something else.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, shard_size: int = 32) -> None:
        self._folder, self._size = folder, shard_size
        self._waiting: dict[str, Features] = {}
        self._places: dict[str, Path] = {}
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / _TABLE
        if table.exists():
            found = json.loads(table.read_text(encoding="utf-8"))
            if found != identity:
                differing = [
                    f"{key} ({found.get(key)}, not {identity.get(key)})"
                    for key in sorted({*found, *identity})
                    if found.get(key) != identity.get(key)
                ]
                raise TrainingError(
                    f"the feature cache in {folder} was made with other {', '.join(differing)}",
                    "name another folder, or delete it",
                )
        else:
            write_whole(table, lambda path: path.write_text(json.dumps(dict(identity)), encoding="utf-8"))
        self.refresh()

    @classmethod
    def of_target(cls, folder: Path, adapter: TargetAdapter, layers: Sequence[int]) -> FeatureCache:
        """The cache of a target's features of these layers.

        Raises:
            TrainingError: the folder holds a cache of something else.
        """
        return cls(folder, {"target": adapter.name, "dtype": str(adapter.dtype), "layers": list(layers)})

    def refresh(self) -> None:
        """Take notice of what other processes wrote."""
        known = set(self._places.values())
        for path in sorted(self._folder.glob("*.safetensors")):
            if path not in known:
                with safe_open(path, framework="pt") as file:
                    self._places.update({name.partition(".")[0]: path for name in file.keys()})  # noqa: SIM118

    def __contains__(self, token_ids: Sequence[int]) -> bool:
        """Whether a text's features are here."""
        key = text_key(token_ids)
        return key in self._places or key in self._waiting

    def put(self, token_ids: Sequence[int], found: Features) -> None:
        """Keep a text's features, unless they are here; on disk with the next full shard or :meth:`flush`."""
        if token_ids in self:
            return
        self._waiting[text_key(token_ids)] = Features(
            found.features.detach().to(CACHE_DTYPE).cpu().contiguous(),
            found.hidden.detach().to(CACHE_DTYPE).cpu().contiguous(),
            found.log_total.detach().float().cpu().contiguous(),
        )
        if len(self._waiting) >= self._size:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if not self._waiting:
            return
        path = self._folder / f"{_digest(''.join(self._waiting))}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for key, found in self._waiting.items():
            for name, tensor in zip(_PARTS, (found.features, found.hidden, found.log_total), strict=True):
                tensors[f"{key}.{name}"] = tensor
        write_whole(path, lambda unfinished: save_file(tensors, unfinished))
        self._places.update(dict.fromkeys(self._waiting, path))
        self._waiting = {}

    def get(self, token_ids: Sequence[int]) -> Features:
        """A text's features.

        Raises:
            KeyError: they are not here.
        """
        key = text_key(token_ids)
        if key in self._waiting:
            return self._waiting[key]
        with safe_open(self._places[key], framework="pt") as file:
            return Features(
                file.get_tensor(f"{key}.features"),
                file.get_tensor(f"{key}.hidden"),
                file.get_tensor(f"{key}.log_total"),
            )


class CachedFeatures:
    """Features of samples from a cache; what is absent is computed, and kept.

    Args:
        cache: where they are.
        live: computes what is absent, rounded to :data:`CACHE_DTYPE`.
        samples: the data set.
    """

    def __init__(self, cache: FeatureCache, live: FeatureSource, samples: Sequence[Sample]) -> None:
        self._cache, self._live, self._samples = cache, live, samples

    def build(self, on_texts: Callable[[int, int], None] = lambda _done, _all: None) -> None:
        """Compute everything that is absent; told (texts done, texts in all) now and then, and at the end."""
        absent = self._absent(range(len(self._samples)))
        done = len(self._samples) - len(absent)
        for told in _groups(absent, _TOLD):
            for group in _groups(told, _GROUP):
                self._compute(group)
            done += len(told)
            on_texts(done, len(self._samples))
        self._cache.flush()

    def of(self, numbers: Sequence[int]) -> list[Features]:
        """See :class:`.features.FeatureSource`."""
        for group in _groups(self._absent(numbers), _GROUP):
            self._compute(group)
        return [self._cache.get(self._samples[number].token_ids) for number in numbers]

    def _absent(self, numbers: Sequence[int]) -> list[int]:
        absent = {self._samples[number].token_ids: number for number in reversed(numbers)}  # equal texts once
        return sorted(number for token_ids, number in absent.items() if token_ids not in self._cache)

    def _compute(self, numbers: Sequence[int]) -> None:
        for number, found in zip(numbers, self._live.of(numbers), strict=True):
            self._cache.put(self._samples[number].token_ids, found)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _groups(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for begin in range(0, len(numbers), size):
        yield numbers[begin : begin + size]
