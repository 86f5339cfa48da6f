"""What the target thinks of the training text: features for the drafter, hidden states for the teacher.

On the fly they cost one target forward per batch and epoch. :class:`FeatureCache` keeps them on disk instead, in shards
that are complete or absent; for several epochs on one small machine that saves most of the time.

Letters in shapes: B sequences, S positions, D hidden size, F features, V vocabulary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..dspark.adapter import TargetAdapter
from ..errors import TrainingError
from ..features import FeatureTaps
from .samples import Sample

CACHE_DTYPE = torch.bfloat16
"""Type of cached features and hidden states."""
_TABLE = "cache.json"
_LOG_BYTES = 4


@dataclass(frozen=True, slots=True)
class Features:
    """One sequence as the target sees it."""

    features: torch.Tensor
    """[S, F] outputs of the tapped layers, side by side; F is 0 where none are tapped."""
    hidden: torch.Tensor
    """[S, D] after the final norm."""
    log_total: torch.Tensor
    """[S] fp32 logsumexp of the logits over the whole vocabulary."""


class FeatureSource(Protocol):
    """**Protocol:** gives the features of samples by number."""

    def of(self, numbers: Sequence[int]) -> list[Features]:
        """Features of these samples, in order."""
        ...


class LiveFeatures:
    """Runs the target.

    Args:
        adapter: the target.
        layers: tapped decoder layers; none for drafters that need the teacher only.
        samples: the data set.
        dtype: what hidden states are rounded to *before* their logits are summed up; the type of the cache that keeps
            them (:data:`CACHE_DTYPE`), or the teacher's probabilities do not add up to one. None rounds nothing.
    """

    def __init__(
        self,
        adapter: TargetAdapter,
        layers: Sequence[int],
        samples: Sequence[Sample],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._adapter = adapter
        self._taps = FeatureTaps(adapter.model, layers)
        self._samples = samples
        self._dtype = dtype

    @torch.inference_mode()
    def of(self, numbers: Sequence[int]) -> list[Features]:
        """See :class:`FeatureSource`. One padded forward; causal attention keeps the padding out of sight."""
        chosen = [self._samples[number].token_ids for number in numbers]
        ids = torch.zeros(len(chosen), max(map(len, chosen)), dtype=torch.int64)
        for row, tokens in enumerate(chosen):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        ids = ids.to(self._adapter.device)
        with self._taps.recording() as tapped:
            hidden = self._adapter.last_hidden(ids)
        features = tapped.features()
        if features is None:
            features = hidden.new_empty(*hidden.shape[:2], 0)
        found = []
        for row, tokens in enumerate(chosen):
            kept = hidden[row, : len(tokens)].to(self._dtype or hidden.dtype)
            found.append(Features(features[row, : len(tokens)].clone(), kept.clone(), self._log_total(kept)))
        return found

    def _log_total(self, hidden: torch.Tensor, chunk: int = 256) -> torch.Tensor:
        pieces = [self._adapter.logits(part).logsumexp(-1) for part in hidden.split(chunk)]
        return torch.cat(pieces)


def cache_bytes(samples: Sequence[Sample], num_layers: int, hidden_size: int) -> int:
    """Bytes a cache of these samples takes: bfloat16 features and hidden state, and one float32, per token."""
    tokens = sum(len(sample.token_ids) for sample in samples)
    return tokens * (2 * hidden_size * (num_layers + 1) + _LOG_BYTES)


def cached_layers(folder: Path) -> tuple[int, ...]:
    """The tapped layers of the cache in a folder; none where there is no cache."""
    table = folder / _TABLE
    return tuple(json.loads(table.read_text(encoding="utf-8")).get("layers", ())) if table.exists() else ()


class FeatureCache:
    """Features on disk, in shards of whole samples.

    A shard appears under its name when it is complete, so a killed run loses the shard it was writing and no more.

    Args:
        folder: where the shards are.
        live: computes what is absent, rounded to :data:`CACHE_DTYPE`.
        identity: what the features depend on (target, layers, data); a cache of something else is refused.
        count: samples in the data set.
        shard_size: samples per shard.

    Raises:
        TrainingError: the folder holds a cache of something else.
    """

    def __init__(
        self, folder: Path, live: FeatureSource, identity: dict[str, Any], count: int, *, shard_size: int = 32
    ) -> None:
        self._folder, self._live, self._count, self._size = folder, live, count, shard_size
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / _TABLE
        wanted = {**identity, "shard_size": shard_size}
        if table.exists():
            found = json.loads(table.read_text(encoding="utf-8"))
            if found != wanted:
                differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
                raise TrainingError(
                    f"the feature cache in {folder} was made with other {', '.join(differing)}",
                    "delete it, or name another folder",
                )
        else:
            table.write_text(json.dumps(wanted), encoding="utf-8")

    def build(self, on_shard: Callable[[int, int], None] = lambda _done, _all: None) -> None:
        """Compute every shard that is absent; told (shards done, shards in all) after each."""
        shards = list(self._shards())
        for done, (shard, numbers) in enumerate(shards, 1):
            path = self._path(shard)
            if not path.exists():
                self._write(path, numbers)
            on_shard(done, len(shards))

    def of(self, numbers: Sequence[int]) -> list[Features]:
        """See :class:`FeatureSource`; shards that are absent are made first."""
        return [self._read(number) for number in numbers]

    def _shards(self) -> Iterator[tuple[int, range]]:
        for shard, begin in enumerate(range(0, self._count, self._size)):
            yield shard, range(begin, min(begin + self._size, self._count))

    def _path(self, shard: int) -> Path:
        return self._folder / f"{shard:06d}.safetensors"

    def _read(self, number: int) -> Features:
        shard = number // self._size
        path = self._path(shard)
        if not path.exists():
            begin = shard * self._size
            self._write(path, range(begin, min(begin + self._size, self._count)))
        with safe_open(path, framework="pt") as file:
            return Features(
                file.get_tensor(f"{number}.features"),
                file.get_tensor(f"{number}.hidden"),
                file.get_tensor(f"{number}.log_total"),
            )

    def _write(self, path: Path, numbers: Sequence[int]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for begin in range(0, len(numbers), 8):
            group = numbers[begin : begin + 8]
            for number, found in zip(group, self._live.of(group), strict=True):
                tensors[f"{number}.features"] = found.features.to(CACHE_DTYPE).cpu().contiguous()
                tensors[f"{number}.hidden"] = found.hidden.to(CACHE_DTYPE).cpu().contiguous()
                tensors[f"{number}.log_total"] = found.log_total.float().cpu().contiguous()
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        save_file(tensors, unfinished)
        unfinished.replace(path)
