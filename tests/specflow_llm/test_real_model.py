"""Proof on a real model: 100 prompts of the demo model, token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specflow_llm import LLM, ModelNotFoundError, SamplingParams, Speculation
from specflow_llm.drafters import CombinedDrafter, DSparkDrafter, NGramDrafter, shipped_drafter
from specflow_llm.dspark import TargetAdapter
from specflow_llm.hub import BUILTIN_MODELS, DEMO_MODEL, ensure_builtin

ROOT = Path(__file__).resolve().parents[2]
NUM_PROMPTS = 100
NEW_TOKENS = 48
PACKED_MARGIN = 1e-2
"""Packed layers sum in another order. Where a token differs, the two best logits must be this close."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def load_prompts() -> list[str]:
    """100 first turns, spread over the categories of Spec-Bench, or as many as the package's own set has."""
    shared = ROOT.parent / "shared" / "data" / "spec_bench.jsonl"
    own = ROOT / "specflow_llm" / "data" / "prompts.jsonl"
    lines = (shared if shared.is_file() else own).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    step = max(1, len(records) // NUM_PROMPTS)
    return [record["turns"][0] for record in records[::step]][:NUM_PROMPTS]


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any, list[list[int]], list[list[int]]]:
    """The demo model in float32, its tokenizer, the prompts, and what ``generate`` answers."""
    try:
        folder = ensure_builtin(BUILTIN_MODELS[DEMO_MODEL])
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    torch.set_num_threads(max(1, torch.get_num_threads()))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts, answers = [], []
    for text in load_prompts():
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )
        ids = torch.tensor([encoded["input_ids"]])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=2
        )
        prompts.append(ids[0].tolist())
        answers.append(output[0, ids.shape[1] :].tolist())
    return model, tokenizer, prompts, answers


def gap_at(model: Any, prefix: list[int]) -> float:
    """Difference between the two best logits after ``prefix``."""
    with torch.inference_mode():
        best = model(torch.tensor([prefix])).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


@pytest.mark.parametrize("name", ["ngram", "dspark", "both"])
def test_answers_equal_generate_token_for_token(
    demo: tuple[Any, Any, list[list[int]], list[list[int]]], name: str
) -> None:
    """Speculative answers of the unmodified model, decoded in ragged batches of 8, are those of ``generate``."""
    model, tokenizer, prompts, answers = demo
    drafter: Any = NGramDrafter()
    if name != "ngram":
        trained = DSparkDrafter.load(shipped_drafter(DEMO_MODEL), TargetAdapter(model))
        drafter = trained if name == "dspark" else CombinedDrafter(drafter, trained)
    setting = Speculation(drafter=drafter, policy="fixed", max_draft_tokens=8)
    llm = LLM(model, tokenizer=tokenizer, speculation=setting, max_batch_size=8)
    outs = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
    assert len(outs) >= 30
    assert len({token for answer in answers for token in answer}) > 500
    assert sum(out.metrics.accepted for out in outs) > 100  # speculation took part
    differing = [index for index, out in enumerate(outs) if list(out.token_ids) != answers[index]]
    assert differing == []


def test_packed_answers_differ_only_where_logits_tie(
    demo: tuple[Any, Any, list[list[int]], list[list[int]]],
) -> None:
    """With packed layers an answer may leave ``generate``'s only at a tie of the two best logits."""
    model, tokenizer, prompts, answers = demo
    llm = LLM(DEMO_MODEL, dtype="float32", tokenizer=tokenizer)
    assert llm.packed_layers > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        out = list(llm.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS))[0].token_ids)
        if out != answer:
            at = next(index for index, (ours, theirs) in enumerate(zip(out, answer, strict=False)) if ours != theirs)
            assert gap_at(model, prompt + answer[:at]) < PACKED_MARGIN
