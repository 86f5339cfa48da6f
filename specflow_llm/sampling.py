"""From logits to tokens: the processed law of one request, and its randomness.

Knows no model: tensors in, tokens out. Nothing here draws from a global generator. Every random number is a function of
(seed, absolute position, stream), so a request's tokens do not depend on the batch it runs in, on the order in which
requests are served, or on how often a position is computed again.

Shapes: ``T`` rows (positions), ``V`` vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import torch

from specflow.errors import BackendContractError, InvalidSettingError

from .config import SamplingParams

Rule = Literal["greedy", "token", "block", "one_hot", "coupled"]
"""The acceptance rule of one request; see :mod:`specflow_llm.verification`."""

RULES: Final[tuple[Rule, ...]] = ("greedy", "token", "block", "one_hot", "coupled")

TARGET: Final = 1
"""Stream of the noise that chooses the target's token at a position."""
DRAFT: Final = 2
"""Stream of the noise that draws a drafted token."""
ACCEPT: Final = 3
"""Stream of the uniforms that accept or reject a drafted token."""
RESIDUAL: Final = 4
"""Stream of the noise that draws the token after the accepted ones, under the ratio rules."""

_LANE_BITS: Final = 8


def lane(stream: int, index: int) -> int:
    """A stream of its own for the ``index``-th drafted token of a round.

    A position can be drafted again in a later round. Under the block rule the outcome of the earlier round depends on
    what was drawn for that position then, so drawing the same number again would bias the output. Position and index
    together name the round (it started at ``position - index``), and no two rounds of a request start at one position.
    """
    return stream | (index + 1) << _LANE_BITS


# --- Keyed randomness -------------------------------------------------------------------------------------------------

_MASK64: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def _mix64(state: int) -> int:
    """The SplitMix64 finaliser (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def key64(seed: int, position: int, stream: int) -> int:
    """64 mixed bits for (seed, position, stream): number ``position`` of a SplitMix64 sequence per (seed, stream)."""
    start = _mix64(_mix64((seed + _GOLDEN) & _MASK64) ^ _mix64((stream * _GOLDEN) & _MASK64))
    return _mix64((start + (position + 1) * _GOLDEN) & _MASK64)


def uniform(seed: int, position: int, stream: int) -> float:
    """A number in [0, 1), a multiple of 2**-53, that depends on nothing but its arguments."""
    return (key64(seed, position, stream) >> 11) * 2.0**-53


def _mix32(bits: torch.Tensor) -> torch.Tensor:
    """Mix int32 ``bits`` in place: ``lowbias32`` of Wellons 2018, "Prospecting for hash functions".

    Products wrap modulo 2**32. The masks make the arithmetic right shift of signed integers a logical one.
    """
    high = torch.bitwise_right_shift(bits, 16)
    bits.bitwise_xor_(high.bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    torch.bitwise_right_shift(bits, 15, out=high)
    bits.bitwise_xor_(high.bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    torch.bitwise_right_shift(bits, 16, out=high)
    return bits.bitwise_xor_(high.bitwise_and_(0xFFFF))


@lru_cache(maxsize=8)
def _mixed_indices(vocab_size: int, device: torch.device) -> torch.Tensor:
    """[V] int32: the first mixing round, which is the same for every key. Never written to."""
    with torch.inference_mode(mode=False):
        return _mix32(torch.arange(vocab_size, dtype=torch.int32, device=device))


def _signed32(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def gumbel_rows(
    seed: int,
    positions: Sequence[int],
    vocab_size: int,
    device: torch.device,
    stream: int = TARGET,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Standard Gumbel noise for several positions at once.

    A counter-based generator in the manner of Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3"): entry
    ``v`` is a hash of a 64-bit key and ``v``. It is therefore the same in any batch and for any vocabulary size. The
    integer part is bit-identical on all devices; the two logarithms may differ by rounding.

    With u uniform, -log1p(-u) is exponential, and minus its logarithm is Gumbel. Small u, which make the winners, keep
    the full relative precision of fp32; u is kept below 1, so that every value is finite.

    Args:
        seed: the request's seed.
        positions: absolute positions, ``T`` of them.
        vocab_size: ``V``.
        device: where the noise is needed.
        stream: what it is used for.
        ids: compute the entries of these ids only, in this order; the same numbers as in a whole row.

    Returns:
        [T, V] (or [T, number of ids]) fp32 in about [-2.9, 21.5].
    """
    keys = [key64(seed, position, stream) for position in positions]
    low = [[_signed32(key & 0xFFFFFFFF)] for key in keys]
    high = [[_signed32(key >> 32 | 1)] for key in keys]
    words = torch.tensor([low, high], dtype=torch.int32).to(device, non_blocking=True)
    # Each step is invertible (the factor is odd), so no two entries of a row start from equal words.
    indices = _mixed_indices(vocab_size, device)
    bits = _mix32(((indices if ids is None else indices[ids]) ^ words[0]).mul_(words[1]))
    # Rounding takes the largest word to 2**31, so the factor keeps u below 1.
    values = torch.add(bits.bitwise_and_(0x7FFFFFFF), 0.5).mul_(-(2.0**-31) * (1.0 - 2.0**-24))
    return values.log1p_().neg_().log_().neg_()


def gumbel_noise(
    seed: int, position: int, vocab_size: int, device: torch.device | str, stream: int = TARGET
) -> torch.Tensor:
    """[V] fp32 standard Gumbel noise for one position; see :func:`gumbel_rows`."""
    return gumbel_rows(seed, (position,), vocab_size, torch.device(device), stream)[0]


def race(probs: torch.Tensor, noise: torch.Tensor) -> int:
    """Draw a token: the first arrival of an exponential race, which is the Gumbel-max trick without logarithms of 0.

    Args:
        probs: [V] the law, up to a factor; a token of probability 0 never wins.
        noise: [V] standard Gumbel noise.
    """
    return int((probs * noise.exp()).argmax())


# --- Truncation -------------------------------------------------------------------------------------------------------

# On a CPU a full sort is the largest cost of sampling, while nearly all of the mass is in few tokens. Elsewhere sorting
# is cheap and looking at the mass would be a synchronisation.
_FIRST_CANDIDATES: Final = 64


def _nucleus(
    scores: torch.Tensor, log_total: torch.Tensor, top_p: float, size: int, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest set of tokens whose mass reaches ``top_p``, looking at ``size`` of at most ``limit`` tokens first.

    Args:
        scores: [T, V].
        log_total: [T, 1] logarithm of the mass that counts as 1.
        top_p: in (0, 1).
        size: how many of the highest scores to look at.
        limit: how many may be kept.

    Returns:
        ([T, 1] int64 number of tokens kept, [T, 1] lowest score kept).
    """
    values = scores.topk(size).values
    mass = (values - log_total).double().exp_().cumsum(-1)
    count = ((mass < top_p).sum(-1, keepdim=True) + 1).clamp_(max=size)
    border = values.gather(-1, count - 1)
    if size < limit and len(rows := (mass[:, -1] < top_p).nonzero().flatten()):
        count[rows], border[rows] = _nucleus(scores[rows], log_total[rows], top_p, min(limit, size * 8), limit)
    return count, border


def _selection(scores: torch.Tensor, limit: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """([T, 1] number of tokens kept, [T, 1] lowest score kept): ``limit`` tokens, and of those ``top_p``."""
    vocab_size = scores.shape[-1]
    values = scores.topk(limit).values if limit < vocab_size else scores
    if top_p >= 1.0:
        border = values[:, -1:]
        return torch.full_like(border, limit, dtype=torch.int64), border
    size = min(limit, _FIRST_CANDIDATES) if scores.device.type == "cpu" else limit
    return _nucleus(scores, values.logsumexp(-1, keepdim=True), top_p, size, limit)


def _keep(scores: torch.Tensor, count: torch.Tensor, border: torch.Tensor) -> torch.Tensor:
    """Which tokens are the ``count`` [T, 1] highest of ``scores`` [T, V], the lowest of them at ``border`` [T, 1]."""
    keep = scores >= border
    surplus = keep.sum(-1, keepdim=True, dtype=torch.int32) - count
    if scores.device.type != "cpu" or bool(surplus.any()):
        tied = scores == border
        room = tied.sum(-1, keepdim=True, dtype=torch.int32) - surplus
        keep &= ~tied | (tied.cumsum(-1, dtype=torch.int32) <= room)
    return keep


def truncate(scores: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """Keep the most probable tokens: top-k, then top-p on the renormalised law, then min-p.

    Exactly as many tokens are kept as the settings say. Where scores tie at the border, the lower ids stay. Then
    ``top_k=1`` is greedy decoding also where two logits are equal, which low precision makes common.

    Args:
        scores: [T, V] fp32, unnormalised log-probabilities.
        top_k: keep this many; 0 keeps all.
        top_p: keep the smallest set whose mass reaches this (Holtzman et al. 2020); the token that crosses it stays.
        min_p: drop tokens less probable than this fraction of the most probable one (Nguyen et al. 2024).

    Returns:
        [T, V] fp32, minus infinity where dropped.
    """
    vocab_size = scores.shape[-1]
    limit = min(top_k, vocab_size) or vocab_size
    if limit < vocab_size or top_p < 1.0:
        count, border = _selection(scores, limit, top_p)
        scores = torch.where(_keep(scores, count, border), scores, -math.inf)
    if min_p > 0.0:
        scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(min_p), -math.inf)
    return scores


# --- One request ------------------------------------------------------------------------------------------------------


class _TokenCounts:
    """Which tokens a history holds and how often, updated by what is new since the last call.

    The history is compared with the one known, so that the answer never depends on earlier calls.
    """

    def __init__(self, vocab_size: int, num_prompt_tokens: int) -> None:
        self._vocab_size = vocab_size
        self._num_prompt_tokens = num_prompt_tokens
        self._ids: list[int] = []
        self._in_output: dict[int, int] = {}
        self._column: dict[int, int] = {}
        self._as_tensors = torch.empty((2, 0), dtype=torch.int64)

    def _update(self, history: Sequence[int]) -> None:
        ids = list(history)
        known = len(self._ids)
        if ids[:known] != self._ids:
            known, self._in_output, self._column = 0, {}, {}
        elif len(ids) == known:
            return
        for index in range(known, len(ids)):
            token = ids[index]
            self._column.setdefault(token, len(self._column))
            self._in_output[token] = self._in_output.get(token, 0) + (index >= self._num_prompt_tokens)
        self._ids = ids
        self._as_tensors = torch.tensor([[*self._in_output], [*self._in_output.values()]], dtype=torch.int64)

    def rows(
        self, history: Sequence[int], extra: Sequence[int], first: int, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What each row sees: ``history`` and, for row t, the first ``first + t`` ids of ``extra``.

        Args:
            history: every committed token id.
            extra: ids after it. Those outside the vocabulary are passed over: they are rejected at their position, and
                no row that sees them is used.
            first: how many of ``extra`` the first row sees.
            num_rows: ``T``.

        Returns:
            ([n] the distinct ids; [T, n] bool: the row sees the id; [T, n] its count in the row's output), on the CPU.
        """
        self._update(history)
        known = self._as_tensors.shape[1]
        valid = (token for token in extra if 0 <= token < self._vocab_size and token not in self._column)
        fresh = {token: known + column for column, token in enumerate(dict.fromkeys(valid))}
        ids = torch.cat((self._as_tensors[0], torch.tensor([*fresh], dtype=torch.int64)))
        seen = torch.zeros((num_rows, len(ids)), dtype=torch.bool)
        counts = torch.zeros((num_rows, len(ids)), dtype=torch.int64)
        seen[:, :known] = True
        counts[:, :known] = self._as_tensors[1]
        for index, token in enumerate(extra):
            if (column := self._column.get(token, fresh.get(token))) is not None:
                row = max(0, index + 1 - first)
                seen[row:, column] = True
                counts[row:, column] += 1
        return ids, seen, counts


def _checked_ids(setting: str, ids: Sequence[int], vocab_size: int) -> list[int]:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidSettingError(setting, token, f"token ids of the model's vocabulary, 0 to {vocab_size - 1}")
    return list(ids)


class RowSampler:
    """How one request's tokens are chosen.

    Processing order: logit bias, bad words, min_tokens, repetition, frequency and presence penalty, the user's logits
    processors, temperature, top-k, top-p, min-p. Greedy requests skip the last four, which cannot change the most
    probable token. Constraints that together forbid every token are ignored at that position: a request cannot emit
    nothing.

    Positions are absolute: the index, in prompt plus output, of the token being chosen.

    Args:
        params: the request's settings.
        vocab_size: ``V``; logits have this many columns.
        eos_token_ids: the model's end-of-sequence ids, forbidden before ``min_tokens`` unless ``ignore_eos``.
        bad_word_ids: id sequences that must not be generated (the strings of ``params.bad_words`` already tokenised).
        num_prompt_tokens: where the output begins in a history.
        seed: the request's seed.
        rule: the acceptance rule; greedy requests always use ``greedy``.

    Raises:
        InvalidSettingError: an id is outside the vocabulary, a bad word is empty, or the rule cannot serve the request.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
        num_prompt_tokens: int,
        seed: int,
        rule: Rule,
    ) -> None:
        if rule not in RULES:
            raise InvalidSettingError("rule", rule, f"one of {RULES}")
        self._params = params
        self._vocab_size = vocab_size
        self._num_prompt_tokens = num_prompt_tokens
        self._seed = seed
        self._rule: Rule = "greedy" if params.is_greedy else rule
        self._processors = tuple(params.logits_processors)
        if self._rule == "greedy" and not params.is_greedy:
            raise InvalidSettingError("rule", rule, "a rule for sampling, because temperature is above 0")
        if self._processors and self._rule not in {"greedy", "coupled"}:
            raise InvalidSettingError(
                "verification",
                self._rule,
                "'coupled' or 'auto' for a request with logits_processors: they may keep state, so they are called "
                "once per emitted token, and only rules that match token by token never ask about rejected positions",
            )
        bias_ids = _checked_ids("logit_bias", list(params.logit_bias), vocab_size)
        self._bias_ids = torch.tensor(bias_ids, dtype=torch.int64)
        self._bias_values = torch.tensor([float(params.logit_bias[token]) for token in bias_ids], dtype=torch.float32)
        words = [_checked_ids("bad_words", word, vocab_size) for word in bad_word_ids]
        if not all(words):
            raise InvalidSettingError("bad_words", [], "non-empty id sequences")
        self._bad_ids = sorted({word[0] for word in words if len(word) == 1})
        self._bad_phrases = tuple((tuple(word[:-1]), word[-1]) for word in words if len(word) > 1)
        self._bad_context = max((len(prefix) for prefix, _ in self._bad_phrases), default=0)
        stops = _checked_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        ends = set(stops) | (set() if params.ignore_eos else set(eos_token_ids))
        # Ends outside the vocabulary cannot be generated, so they need no forbidding.
        self._end_ids = sorted(token for token in ends if 0 <= token < vocab_size) if params.min_tokens else []
        self._has_penalties = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        self._counts = _TokenCounts(vocab_size, num_prompt_tokens)

    @property
    def is_greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self._params.is_greedy

    @property
    def rule(self) -> Rule:
        """The acceptance rule."""
        return self._rule

    @property
    def seed(self) -> int:
        """The request's seed."""
        return self._seed

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self._vocab_size

    @property
    def is_pointwise(self) -> bool:
        """True when the law at a position needs no history, so that all rows of a block are processed at once."""
        return not (self._bad_phrases or self._end_ids or self._has_penalties or self._processors)

    @property
    def _treats_ids_alike(self) -> bool:
        """True when nothing is done to single ids, so that laws over part of the vocabulary can be processed alone."""
        return self.is_pointwise and not (self._bad_ids or len(self._bias_ids))

    @property
    def matches(self) -> bool:
        """True when drafts are verified by comparing them with the target's own choices, whatever they are."""
        return self._rule in {"greedy", "coupled"}

    @property
    def is_sequential(self) -> bool:
        """True when the user's processors must be called once per emitted token, in order, and never elsewhere."""
        return bool(self._processors)

    @property
    def is_trivial(self) -> bool:
        """True when the most probable token of the raw logits is the answer."""
        return self.is_greedy and self._treats_ids_alike

    def scores(
        self,
        logits: torch.Tensor,
        history: Sequence[int],
        block: Sequence[int] = (),
        start: int = 0,
        *,
        for_draft: bool = False,
    ) -> torch.Tensor:
        """Processed logits, not normalised; arguments as for :meth:`log_probs`.

        Greedy choices are made from these: rounding in the normalisation could merge two nearly equal logits.

        Returns:
            [T, V] fp32; a view of ``logits`` where nothing had to be done.
        """
        params = self._params
        scores = self._constrained(logits, history, block, start)
        if self._has_penalties:
            scores = self._penalised(scores, history, block, start)
        if self._processors and not for_draft:
            scores = self._user_processed(scores, history, block, start)
        if self.is_greedy:
            return scores
        if params.temperature != 1.0:
            scores = scores / params.temperature
        return truncate(scores, params.top_k, params.top_p, params.min_p)

    def log_probs(
        self,
        logits: torch.Tensor,
        history: Sequence[int],
        block: Sequence[int] = (),
        start: int = 0,
        for_draft: bool = False,  # noqa: FBT001, FBT002 - a flag that callers name
    ) -> torch.Tensor:
        """The request's law: processed, normalised log-probabilities.

        Args:
            logits: [T, V] raw logits, any floating dtype.
            history: every committed token id, prompt and output.
            block: tokens assumed to follow the history; row t sees ``history + block[: start + t]``.
            start: index into the block of the first row.
            for_draft: leave out the user's processors, which must see emitted tokens only.

        Returns:
            [T, V] fp32; minus infinity where a token is impossible.

        Raises:
            BackendContractError: a user's processor returned something other than a score per token, or forbade all.
        """
        return torch.log_softmax(self.scores(logits, history, block, start, for_draft=for_draft), dim=-1)

    def choose(self, log_probs: torch.Tensor, position: int) -> int:
        """The target's token at ``position``: the same with or without speculation.

        Args:
            log_probs: [V] fp32, the law at this position; any constant may be added to it.
            position: absolute position of the token.

        Returns:
            The most probable token for greedy requests; otherwise a draw by the Gumbel-max trick (Gumbel 1954; Maddison
            et al. 2014) with noise keyed by (seed, position).
        """
        if not self.is_greedy:
            log_probs = log_probs + gumbel_noise(self._seed, position, log_probs.shape[-1], log_probs.device)
        return int(log_probs.argmax())

    def draft(
        self,
        logits: torch.Tensor,
        history: Sequence[int],
        drafted: Sequence[int],
        position: int,
        vocabulary: torch.Tensor | None = None,
    ) -> tuple[int, torch.Tensor | None, float]:
        """A drafted token, chosen in the way this request's rule accepts most often.

        Args:
            logits: [V] the drafter's raw logits over the target's vocabulary; [Vd] with ``vocabulary``.
            history: every *committed* token id. It also names the round, which keeps its draws apart from those of
                other rounds, so drafted tokens must not be part of it.
            drafted: the tokens drafted before this one in this round.
            position: absolute position of the token, ``len(history) + len(drafted)``.
            vocabulary: [Vd] int64 ids that the columns of ``logits`` stand for; all others are impossible.

        Returns:
            (token, [V] fp32 probabilities it was drawn from or None, confidence). The probabilities are given for the
            token and block rules only and are the very tensor drawn from. Otherwise the token is the most probable one
            (greedy, one-hot), or the one the target's own noise selects (coupled). The confidence is the top
            probability of the draft law; it does not depend on the draw.

        Raises:
            BackendContractError: the position does not follow history and drafted tokens.
        """
        if position != len(history) + len(drafted):
            raise BackendContractError(
                "drafter",
                f"asked for position {position} after {len(history)} committed and {len(drafted)} drafted tokens",
                "position must be len(history) + len(drafted), with the committed tokens in history",
            )
        scores, vocabulary = self._draft_scores(logits, history, drafted, vocabulary)
        vocab_size, device = self._vocab_size, scores.device
        if self._rule in {"token", "block"}:
            probs = scores.softmax(-1)
            noise = gumbel_rows(self._seed, (position,), vocab_size, device, lane(DRAFT, len(drafted)), vocabulary)[0]
            place, top = race(probs, noise), float(probs.amax())
            if vocabulary is None:
                return place, probs, top
            return int(vocabulary[place]), probs.new_zeros(vocab_size).index_copy_(0, vocabulary, probs), top
        confidence = float((scores.amax() - scores.logsumexp(-1)).exp())
        if self._rule == "coupled":
            scores = scores + gumbel_rows(self._seed, (position,), vocab_size, device, ids=vocabulary)[0]
        place = int(scores.argmax())
        return place if vocabulary is None else int(vocabulary[place]), None, confidence

    def alternatives(
        self,
        logits: torch.Tensor,
        history: Sequence[int],
        drafted: Sequence[int],
        count: int,
        vocabulary: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
    ) -> tuple[list[int], list[float]]:
        """The likeliest choices of a request that is verified by matching, and what each is likely to be right with.

        Under the coupled rule the target's choice is the largest of its scores plus noise that is known beforehand
        (:meth:`choose`), so the draft's scores with the same noise say which tokens it will be.

        Args:
            logits: [V] the drafter's raw logits over the target's vocabulary; [Vd] with ``vocabulary``.
            history: every committed token id.
            drafted: the tokens that these choices follow.
            count: how many.
            vocabulary: [Vd] int64 ids that the columns of ``logits`` stand for; all others are impossible.
            noise: what :meth:`draft_noise` gave for this position and vocabulary, where it was asked before.

        Returns:
            (token ids, shares that sum to at most 1), the best first.
        """
        scores, vocabulary = self._draft_scores(logits, history, drafted, vocabulary)
        if noise is None:
            noise = self.draft_noise(len(history) + len(drafted), scores.device, vocabulary)
        scores = scores if noise is None else scores + noise
        best = scores.topk(min(count, len(scores)))
        shares = (best.values - scores.logsumexp(-1)).exp().tolist()
        places = best.indices if vocabulary is None else vocabulary[best.indices]
        found = [(token, share) for token, share in zip(places.tolist(), shares, strict=True) if share > 0.0]
        return [token for token, _ in found], [share for _, share in found]

    def _draft_scores(
        self, logits: torch.Tensor, history: Sequence[int], drafted: Sequence[int], vocabulary: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Processed logits of one drafted place, and the ids of its columns; None where they are all ids."""
        if vocabulary is not None and not self._treats_ids_alike:
            # What is done to single ids needs a column for each; most requests do nothing of the kind.
            logits = logits.new_full((self._vocab_size,), -math.inf).index_copy_(0, vocabulary, logits)
            vocabulary = None
        return self.scores(logits[None], history, drafted, len(drafted), for_draft=True)[0], vocabulary

    def draft_noise(
        self, position: int, device: torch.device, vocabulary: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The noise of the coupled rule at a position; None for greedy requests.

        For these ids ([Vd]), or for all ([V]) where the request does something to single ids.
        """
        if self._rule != "coupled":
            return None
        ids = vocabulary if self._treats_ids_alike else None
        return gumbel_rows(self._seed, (position,), self._vocab_size, device, ids=ids)[0]

    def _constrained(
        self, logits: torch.Tensor, history: Sequence[int], block: Sequence[int], start: int
    ) -> torch.Tensor:
        """Logit bias, bad words and min_tokens."""
        has_bias = len(self._bias_ids) > 0
        forbids = bool(self._bad_ids or self._bad_phrases or self._end_ids)
        if not (has_bias or forbids):
            return logits.float()
        scores = logits.to(torch.float32, copy=True)
        if has_bias:
            scores[:, self._bias_ids.to(scores.device)] += self._bias_values.to(scores.device)
        if not forbids:
            return scores
        if self._bad_ids:
            scores[:, self._bad_ids] = -math.inf
        if self._bad_phrases:
            tail = [*history[-self._bad_context :], *block[: start + len(scores) - 1]]
            for row in range(len(scores)):
                context = tuple(tail[: len(tail) - (len(scores) - 1 - row)])
                for prefix, last in self._bad_phrases:
                    if context[-len(prefix) :] == prefix:
                        scores[row, last] = -math.inf
        if self._end_ids:
            emitted = len(history) + start - self._num_prompt_tokens
            scores[: max(0, self._params.min_tokens - emitted), self._end_ids] = -math.inf
        return torch.where(scores.amax(-1, keepdim=True) == -math.inf, logits.float(), scores)

    def _penalised(
        self, scores: torch.Tensor, history: Sequence[int], block: Sequence[int], start: int
    ) -> torch.Tensor:
        """Repetition penalty over prompt and output, frequency and presence penalty over the output."""
        params, device = self._params, scores.device
        extra = block[: start + len(scores) - 1]
        tables = self._counts.rows(history, extra, start, len(scores))
        ids, seen, counts = (table.to(device) for table in tables)
        part = scores[:, ids]
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            part = torch.where(seen, torch.where(part < 0, part * penalty, part / penalty), part)
        part = part - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        return scores.index_copy(1, ids, part)

    def _user_processed(
        self, scores: torch.Tensor, history: Sequence[int], block: Sequence[int], start: int
    ) -> torch.Tensor:
        """The user's processors, row by row, on a copy they may write to."""
        rows = []
        for index in range(len(scores)):
            ids = torch.tensor([[*history, *block[: start + index]]], dtype=torch.int64, device=scores.device)
            row: Any = scores[index : index + 1].clone()
            for processor in self._processors:
                row = processor(ids, row)
                if not isinstance(row, torch.Tensor) or row.numel() != self._vocab_size:
                    shape = tuple(row.shape) if isinstance(row, torch.Tensor) else type(row).__name__
                    raise BackendContractError(
                        f"{type(processor).__name__}()",
                        f"returned {shape} as a logits processor",
                        f"it must return the scores, a tensor of shape (1, {self._vocab_size})",
                    )
            row = row.reshape(1, -1).float()
            if not bool(row.max() > -math.inf):
                raise BackendContractError(
                    "logits_processors",
                    f"left no token possible at position {len(history) + start + index}",
                    "at least one score must be above minus infinity, and none may be NaN",
                )
            rows.append(row)
        return torch.cat(rows)


# --- Log-probabilities to report --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one emitted token under the raw model."""

    token_id: int
    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, float], ...]
    """The most probable tokens and their log-probabilities, in falling order."""


def top_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-probabilities of emitted tokens, from raw logits: before temperature, penalties and truncation.

    Args:
        logits: [T, V] raw logits, any floating dtype; row t is the law token t was chosen under.
        token_ids: the T emitted tokens.
        count: how many of the most probable tokens to add; 0 for none.

    Returns:
        One entry per token.
    """
    if not token_ids:
        return []
    scores = logits[: len(token_ids)].float()
    log_total = scores.logsumexp(-1, keepdim=True)
    index = torch.tensor(token_ids, dtype=torch.int64, device=scores.device)[:, None]
    chosen = (scores.gather(-1, index) - log_total).flatten().tolist()
    if count == 0:
        return [TokenLogprob(token, value, ()) for token, value in zip(token_ids, chosen, strict=True)]
    top = scores.topk(min(count, scores.shape[-1]))
    tops = zip(top.indices.tolist(), (top.values - log_total).tolist(), strict=True)
    return [
        TokenLogprob(token, value, tuple(zip(ids, values, strict=True)))
        for token, value, (ids, values) in zip(token_ids, chosen, tops, strict=True)
    ]
