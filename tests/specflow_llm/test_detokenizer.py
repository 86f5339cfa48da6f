"""Ids to text, in pieces: they add up to the whole, whatever the cuts, and none ends inside a character."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from specflow_llm.detokenizer import Detokenizer
from specflow_llm.hub import BUILTIN_MODELS, DEMO_MODEL, cache_folder
from tests.specflow_llm.tokenizers import ByteTokenizer, byte_level_bpe, sentencepiece_like

TEXTS = (
    "hello the dog 😀 中文字符 e\u0301 naïve",
    "中文字符日本語한국어",
    "😀🎉😀 👨‍👩‍👧‍👦🇩🇪 the end",
    "   leading,  double and trailing spaces  ",
    "a\u0308\u0301\u0302 combining o\u0308 marks \u200d",
    "line one\n\n\tline two\r\n",
    "日本 the 語 x😀y",
    "a real \ufffd replacement character, and one at the end \ufffd",
)
BROKEN = (
    b"\xf0\x9f\x98 lost its last byte",
    b"\x80\x81 continuation bytes \xff\xfe and others",
    "日本".encode()[:4] + b" \xe8\xaa",
    b"ends inside \xf0\x9f",
)
TOKENIZERS = {"bytes": ByteTokenizer, "bpe": byte_level_bpe, "sentencepiece": sentencepiece_like}


def demo_tokenizer() -> Any:
    """The demo model's tokenizer, where the demo model has been converted already."""
    demo = BUILTIN_MODELS[DEMO_MODEL]
    folder = cache_folder() / "models" / f"{demo.name}-{demo.version}"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"the demo model is not in {folder}; any command that loads it puts it there")
    return AutoTokenizer.from_pretrained(folder)


def pieces(tokenizer: Any, ids: Sequence[int], cuts: Sequence[int], *, skip_special_tokens: bool = True) -> list[str]:
    """Push ``ids`` in the parts that ``cuts`` make of them, then flush."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    edges = [0, *cuts, len(ids)]
    parts = [detokenizer.push(ids[begin:end]) for begin, end in itertools.pairwise(edges)]
    parts.append(detokenizer.flush())
    assert "".join(parts) == detokenizer.text
    return parts


def all_cuts(size: int) -> Iterator[list[int]]:
    """Every split in two, every token on its own, and 40 random splits."""
    yield from ([cut] for cut in range(size + 1))
    yield list(range(1, size))
    choose = random.Random(0)
    for _ in range(40):
        yield sorted(choose.sample(range(size + 1), choose.randint(2, min(size, 9))))


def assert_pieces_add_up(tokenizer: Any, ids: Sequence[int], **settings: bool) -> None:
    """Every split gives the tokenizer's own text, and a replacement character only where that text has one."""
    whole = tokenizer.decode(list(ids), skip_special_tokens=settings.get("skip_special_tokens", True))
    for cuts in all_cuts(len(ids)):
        parts = pieces(tokenizer, ids, cuts, **settings)
        assert "".join(parts) == whole, cuts


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_split_gives_the_whole_text(name: str, text: str) -> None:
    """All two-way and many random splits of valid text give what decoding all ids gives (vLLM#41967, #43221)."""
    tokenizer = TOKENIZERS[name]()
    assert_pieces_add_up(tokenizer, tokenizer(text)["input_ids"])


@pytest.mark.parametrize("data", BROKEN)
@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_every_split_of_broken_bytes_gives_the_whole_text(name: str, data: bytes) -> None:
    """Bytes that form no character appear as the decoder shows them at once, for every split."""
    tokenizer: Any = TOKENIZERS[name]()
    ids = list(data) if name == "bytes" else [byte_id(tokenizer, byte) for byte in data]
    assert_pieces_add_up(tokenizer, ids)


def byte_id(tokenizer: Any, byte: int) -> int:
    """The id of a single byte in a byte-level BPE vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    character = chr(byte) if byte in printable else chr(256 + others.index(byte))
    found: int = tokenizer.convert_tokens_to_ids(character)
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_ids_give_the_same_text_for_every_split(name: str) -> None:
    """Text is a function of the ids, never of how many arrive together, for any ids a model could emit."""
    tokenizer: Any = TOKENIZERS[name]()
    size = ByteTokenizer.vocab_size if name == "bytes" else len(tokenizer)
    choose = random.Random(3)
    for _ in range(60):
        ids = [choose.randrange(size) for _ in range(12)]
        texts = {
            "".join(pieces(tokenizer, ids, cuts))
            for cuts in ([], list(range(1, 12)), [4], [1, 8], sorted(choose.sample(range(13), 4)))
        }
        assert len(texts) == 1, ids


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_are_left_out_or_shown(name: str, skip_special_tokens: bool) -> None:  # noqa: FBT001
    """Special tokens between, before and after text vanish or appear as the tokenizer decides, for every split."""
    tokenizer: Any = TOKENIZERS[name]()
    special = [ByteTokenizer.SPECIAL] if name == "bytes" else [tokenizer.eos_token_id, tokenizer.bos_token_id]
    word = tokenizer("the 日", add_special_tokens=False)["input_ids"]
    ids = [*special, *word, *special, *special, *word, *special]
    assert_pieces_add_up(tokenizer, ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_piece_ends_inside_a_character(name: str) -> None:
    """Token by token, no piece of valid text holds a replacement character, although most tokens are single bytes."""
    tokenizer: Any = TOKENIZERS[name]()
    ids = tokenizer("日 😀本\u0301語🎉")["input_ids"]
    parts = pieces(tokenizer, ids, list(range(1, len(ids))))
    assert not any("\ufffd" in part for part in parts)
    assert parts.count("") > 6


def test_text_before_half_a_character_is_not_held() -> None:
    """A token that ends a word and begins a character releases the word, and with it a stop string."""

    class WithPieces(ByteTokenizer):
        PIECE = 257

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            del skip_special_tokens
            pieces = [b"end. \xf0\x9f" if token == self.PIECE else bytes([token]) for token in token_ids]
            return b"".join(pieces).decode("utf-8", errors="replace")

    detokenizer = Detokenizer(WithPieces())
    assert detokenizer.push([WithPieces.PIECE]) == "end. "
    assert detokenizer.push([0x98, 0x80]) == "😀"
    assert detokenizer.push([WithPieces.PIECE, 0x98]) == "end. "
    assert detokenizer.flush() == "\ufffd"


def test_the_window_stays_short() -> None:
    """Decoding a token costs the same after 50 tokens as after 2000: the decoder never sees more than a few ids."""

    class Watched(ByteTokenizer):
        longest = 0

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            self.longest = max(self.longest, len(token_ids))
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Watched()
    detokenizer = Detokenizer(tokenizer)
    for token in ("日本 the 😀    " * 100).encode():
        detokenizer.push([token])
    assert tokenizer.longest <= 16


@pytest.mark.parametrize("name", TOKENIZERS)
def test_rewinding_takes_back_text_and_ids(name: str) -> None:
    """After a rewind to any place the rest of the ids gives the same text as without the detour."""
    tokenizer: Any = TOKENIZERS[name]()
    ids = tokenizer("the 日本 😀 dog")["input_ids"]
    detour = tokenizer("語🎉 x", add_special_tokens=False)["input_ids"]
    for place in range(len(ids)):
        detokenizer = Detokenizer(tokenizer)
        detokenizer.push(ids[:place])
        before, mark = detokenizer.text, detokenizer.mark()
        detokenizer.push(detour[: 1 + place % len(detour)])
        detokenizer.flush()
        detokenizer.rewind(mark)
        assert detokenizer.text == before
        detokenizer.push(ids[place:])
        detokenizer.flush()
        assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_detokenizer_that_decodes_pushes_alone_is_caught() -> None:
    """The check above fails for the obvious wrong way: decoding each push by itself."""
    tokenizer = ByteTokenizer()
    ids = tokenizer("日本")["input_ids"]
    alone = "".join(tokenizer.decode(ids[begin : begin + 2]) for begin in range(0, len(ids), 2))
    assert alone != tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_tokenizer_adds_up(text: str) -> None:
    """The same holds for the demo model's own tokenizer."""
    tokenizer = demo_tokenizer()
    assert_pieces_add_up(tokenizer, tokenizer(text)["input_ids"])
