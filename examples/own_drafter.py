"""A drafter of one's own, checked: what followed this token last time follows it again.

python examples/own_drafter.py
python examples/own_drafter.py --model smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from specflow_llm import LLM, DrafterBase, DraftRequest, Proposal
from specflow_llm.checker import check_drafter


class LastTime(DrafterBase):
    """Proposes what followed the most recent occurrence of the last token."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One lookup per request; where the last token is new there is no guess."""
        return [Proposal(self.continuation(request.token_ids)[: request.limit]) for request in requests]

    @staticmethod
    def continuation(token_ids: Sequence[int]) -> list[int]:
        """The tokens after the last token's previous occurrence."""
        *past, last = token_ids
        for index in reversed(range(len(past))):
            if past[index] == last:
                return [*past[index + 1 :], last]
        return []


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the drafter and print what it gains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="measure the gain on this model instead of a tiny random one")
    name = parser.parse_args(arguments).model
    llm = LLM(name, speculation=None) if name else None
    report = check_drafter(
        LastTime,
        model=llm.model if llm else None,
        tokenizer=llm.tokenizer if llm else None,
    )
    print(report)
    gain = report.gain
    if gain is not None:
        print(f"\non {gain.model}: {gain.mean_accepted_length:.2f} tokens per target forward")
        print(f"accepted, by position in the draft: {[round(share, 2) for share in gain.acceptance_by_position]}")
        if gain.is_real_model:
            print(f"estimated speedup: {gain.estimated_speedup:.2f}")


if __name__ == "__main__":
    main()
