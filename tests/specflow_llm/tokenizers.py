"""Small tokenizers built in code: an id per character, an id per byte, trained byte-level BPE, SentencePiece-like."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."
"""64 characters, for models with 64 ids."""

TRAINING_TEXT = (
    "the quick brown fox jumps over the lazy dog. there then that this thing. ",
    "naïve café résumé 😀 😀 🎉🎉 中文字符 日本語 한국어 e\u0301 a\u0308. ",
    "    indented\n\n  code: return x\t# 😀\n",
)


class CharTokenizer:
    """One id per character of an alphabet. Answers like a Hugging Face tokenizer where this project asks."""

    eos_token_id: int | None = None
    chat_template: str | None = None

    def __init__(self, alphabet: str = ALPHABET) -> None:
        self._alphabet = alphabet

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Ids of a text whose characters are all in the alphabet."""
        del add_special_tokens
        return {"input_ids": [self._alphabet.index(character) for character in text]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The characters."""
        del skip_special_tokens
        return "".join(self._alphabet[token] for token in token_ids)

    def get_vocab(self) -> dict[str, int]:
        """Characters and their ids."""
        return {character: token for token, character in enumerate(self._alphabet)}


class ByteTokenizer:
    """One id per byte, and one special token: every character outside ASCII takes several tokens."""

    SPECIAL = 256
    vocab_size = 257
    eos_token_id: int | None = None
    chat_template: str | None = None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The text's UTF-8 bytes."""
        del add_special_tokens
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Bytes that do not form characters become replacement characters; the special token is shown as ``<end>``."""
        text = b""
        for token in token_ids:
            text += (b"" if skip_special_tokens else b"<end>") if token == self.SPECIAL else bytes([token])
        return text.decode("utf-8", errors="replace")


@functools.cache
def byte_level_bpe() -> Any:
    """A trained byte-level BPE tokenizer like GPT-2's, with about 340 ids and a chat template."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    return fast


@functools.cache
def sentencepiece_like() -> Any:
    """A Llama-2-like tokenizer: ``▁`` for spaces, pieces, and one token per byte for what has no piece.

    Its decoder strips the first space of a text, and replaces *every* byte of a run of bytes that is not valid as a
    whole, so that an incomplete character takes the complete ones before it along.
    """
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.:", "th", "he", "▁t", "▁th", "▁the"]
    merges = [("t", "h"), ("h", "e"), ("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_prefix_space=None
    )
