"""What depth, block size, Markov head, rank, draft vocabulary, objective and rates do, on equal text, equally long.

Every variant sees the same conversations, the same anchors and the same number of steps, and is measured on the same
held-out conversations along the target's own text: accept rate by slot (temperature 1), agreement of the most probable
tokens (temperature 0), and the emitted tokens per round they amount to. Counts, so no clock is involved.

    python benchmarks/dspark_ablations.py --conversations 1200 --cache features --steps 250

Short trainings rank what learns fastest, not what is best in the end; the table says how long they were.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from specflow_llm.dspark import TargetAdapter
from specflow_llm.dspark.model import parameter_count
from specflow_llm.hub import DEMO_MODEL, load_model
from specflow_llm.provenance import provenance
from specflow_llm.training.design import design, new_drafter, start_from_target, target_layers_to_copy
from specflow_llm.training.feature_cache import CACHE_DTYPE, CachedFeatures, FeatureCache
from specflow_llm.training.features import LiveFeatures
from specflow_llm.training.objective import LossWeights
from specflow_llm.training.samples import read_samples
from specflow_llm.training.settings import TrainSettings
from specflow_llm.training.trainer import Trainer

BASE: dict[str, Any] = {
    "block_size": 5, "sliding_window": 256, "num_layers": 2, "draft_vocab_size": 8192, "markov_rank": 128,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "no Markov head": {"markov": "none"},
    "no heads (DFlash)": {"markov": "none", "confidence": False},
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "rank 32": {"markov_rank": 32},
    "1 layer": {"num_layers": 1},
    "3 layers": {"num_layers": 3},
    "block 4": {"block_size": 4},
    "block 7": {"block_size": 7},
    "block 10": {"block_size": 10},
    "vocabulary 4096": {"draft_vocab_size": 4096},
    "vocabulary 16384": {"draft_vocab_size": 16384},
    "no KL": {"loss": {"kl": 0.0}},
    "KL only": {"loss": {"kl": 1.0, "tv": 0.0, "ce": 0.0}},
    "fresh weights": {"fresh": True},
    "Markov rate 1": {"markov_rate": 1.0},
}
"""What differs from the base; ``loss`` and ``markov_rate`` go to training, ``fresh`` starts from random weights."""
TEXT = Path(__file__).parent / "drafter" / "smollm2_samples.jsonl.xz"


def run_variant(
    name: str, changes: dict[str, Any], base: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train and measure one variant."""
    adapter, tokenizer, samples, folder = base["adapter"], base["tokenizer"], base["samples"], arguments.cache
    loss = LossWeights(**changes.get("loss", {}))
    fields = {key: value for key, value in changes.items() if key not in {"loss", "fresh", "markov_rate"}}
    config = design(adapter, tokenizer, **{**BASE, **fields})
    model = new_drafter(config, samples, adapter, arguments.seed)
    copied = target_layers_to_copy(config, adapter)
    if copied and not changes.get("fresh"):
        start_from_target(model, adapter, copied)
    layers = config.target_layer_ids
    live = LiveFeatures(adapter, layers, samples, dtype=CACHE_DTYPE)
    source = CachedFeatures(FeatureCache.of_target(folder, adapter, layers), live, samples)
    train = len(samples) - round(len(samples) * 0.05)
    settings = TrainSettings(
        epochs=arguments.steps * 4 / train, batch_size=4, num_anchors=32, learning_rate=1e-3, loss=loss,
        checkpoint_steps=10**9, report_steps=10**9, seed=arguments.seed, short_blocks=0.0,
    )  # fmt: skip
    if "markov_rate" in changes:
        settings = settings.with_(markov_rate=changes["markov_rate"])
    trainer = Trainer(adapter, model, samples, source, settings, arguments.out)
    trainer.run()
    held = trainer.measure(limit=64)
    return {"variant": name, "parameters": parameter_count(model), "steps": trainer.num_steps, **asdict(held)}


def main() -> None:
    """Run the variants and print a table; ``--json FILE`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=DEMO_MODEL)
    parser.add_argument("--text", type=Path, default=TEXT, help="conversations of the target (samples.jsonl)")
    parser.add_argument("--conversations", type=int, help="so many of them, drawn by --seed; all by default")
    parser.add_argument("--cache", type=Path, required=True, help="folder for features; made if absent")
    parser.add_argument("--out", type=Path, default=Path("ablations"), help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(arguments.target, tokenizer="auto", dtype="auto", device="auto", pack=True)
    samples = read_samples(arguments.text)
    if arguments.conversations is not None:
        samples = random.Random(arguments.seed).sample(samples, arguments.conversations)
    base = {"adapter": TargetAdapter(loaded.model), "tokenizer": loaded.tokenizer, "samples": samples}
    rows = []
    for name in arguments.only:
        rows.append(run_variant(name, VARIANTS[name], base, arguments))
        row = rows[-1]
        rates = " ".join(f"{rate:.3f}" for rate in row["accept"])
        print(
            f"{name:20} {row['parameters'] / 1e6:5.1f} M  sampled {row['sampled_length']:.3f}  greedy "
            f"{row['greedy_length']:.3f}  accepted {rates}",
            flush=True,
        )
        if arguments.json is not None:
            described: dict[str, Any] = {
                "provenance": dict(provenance(device=loaded.model.device, dtype=loaded.model.dtype))
            }
            described["conversations"] = len(base["samples"])
            arguments.json.write_text(json.dumps({**described, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
