"""Context biases are fitted on text that was held out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow_llm.drafters.context_bias import ContextBias
from specflow_llm.drafters.conv_model import ConvModel, SharedTables
from specflow_llm.dspark.checkpoint import load_drafter
from specflow_llm.errors import TrainingError
from specflow_llm.training.batches import Batch, build_batch
from specflow_llm.training.context import CONTEXT_BIAS, ContextObservations
from specflow_llm.training.features import LiveFeatures
from specflow_llm.training.kinds.conv import ConvKind
from specflow_llm.training.kinds.dspark import DSparkKind
from specflow_llm.training.objective import draft_logits
from specflow_llm.training.plan import TrainingPlan
from specflow_llm.training.run import TrainingRun
from specflow_llm.training.trainer import Trainer
from tests.specflow_llm.block_drafters import config, sample
from tests.specflow_llm.chat import SETTINGS as SELF_ASKED
from tests.specflow_llm.chat import llm
from tests.specflow_llm.small_training import SETTINGS, adapter, texts, trainer
from tests.specflow_llm.test_context_bias import orders_after

PRIOR = (1.0, 2.0, 3.0)


def contexts(batch: Batch) -> list[list[int]]:
    """What stands before each supervised slot's token, in the order of the slots."""
    rows, blocks, offsets = batch.supervised.nonzero(as_tuple=True)
    ends = batch.anchors[rows, blocks] + offsets + 1
    return [batch.token_ids[row, :end].tolist() for row, end in zip(rows.tolist(), ends.tolist(), strict=True)]


@pytest.mark.parametrize("ids", [None, [0, 3, 1]])
def test_known_biases_are_found(ids: list[int] | None) -> None:
    """Tokens drawn from a law with known biases give them back, within five standard errors (odds 1e-5 in all)."""
    truth = (0.8, 2.0, -0.6)
    generator = torch.Generator().manual_seed(0)
    columns = {token: column for column, token in enumerate(range(4) if ids is None else ids)}
    size = len(columns)
    samples = [
        (number, sample(torch.randint(4, (40,), generator=generator).tolist(), index=number)) for number in range(160)
    ]
    batch = build_batch(samples, num_anchors=16, block=2, seed=1)
    before = contexts(batch)
    logits = torch.randn(len(before), size, generator=generator)
    biased = logits.clone()
    for row, text in enumerate(before):
        for token, order in orders_after(text, [], 3).items():
            if token in columns:
                biased[row, columns[token]] += truth[order - 1]
    labels = biased.softmax(-1).multinomial(1, generator=generator)[:, 0]
    labels[::7] = -1  # some came from outside the draft vocabulary
    table = None if ids is None else torch.tensor(ids)
    seen = ContextObservations(ContextBias((0.5, 0.5, 0.5), vocab_size=4, ids=table))
    half = len(batch.token_ids) // 2
    cut = int(batch.supervised[:half].sum())
    for part, rows in ((slice(None, half), slice(None, cut)), (slice(half, None), slice(cut, None))):
        piece = Batch(batch.token_ids[part], batch.lengths[part], batch.anchors[part], batch.supervised[part], ())
        seen.add(piece, logits[rows].split(100), labels[rows])
    assert len(seen) > 3000
    found = seen.fit()
    assert found == pytest.approx(truth, abs=0.25)  # standard errors are below 0.05 here
    assert max(abs(bias) for bias in found) > 1.5


def test_an_order_that_was_not_seen_keeps_its_bias() -> None:
    """Nothing to see gives what was expected; texts that never repeat two tokens say nothing about the second."""
    expected = ContextBias((0.5, 1.5), vocab_size=6, ids=None)
    assert ContextObservations(expected).fit() == (0.5, 1.5)
    batch = build_batch([(0, sample([1, 2, 1, 3, 1, 4, 1, 5]))], num_anchors=6, block=1, seed=0)
    seen = ContextObservations(expected)
    seen.add(batch, [torch.zeros(6, 6)], torch.tensor([0] * 6))
    first, second = seen.fit()
    assert first < 0.0  # what followed a 1 before never came again
    assert second == pytest.approx(1.5, abs=1e-6)


def conv_trainer(folder: Path) -> Trainer:
    """The same for a convolutional drafter."""
    shape = ConvKind(adapter()).design({"hidden_size": 16, "num_layers": 2, "draft_vocab_size": None, "block_size": 4})
    model = ConvModel(shape.with_(context_bias=PRIOR), SharedTables.of(adapter()), None)
    return Trainer(adapter(), model, texts(), LiveFeatures(adapter(), (), texts()), SETTINGS, folder)


@pytest.mark.parametrize("kind", ["dspark", "restricted", "conv"])
def test_at_the_fitted_biases_tokens_come_as_often_as_the_law_says(kind: str, tmp_path: Path) -> None:
    """By order: tokens that came, minus the probability they had, is what the prior asks for; by brute force."""
    restricted: dict[str, Any] = {"draft_vocab_size": 40} if kind == "restricted" else {}
    run = conv_trainer(tmp_path) if kind == "conv" else trainer(tmp_path, context_bias=PRIOR, **restricted)
    run.run(until=6)
    biases = torch.tensor((0.0, *run.fit_context_bias()), dtype=torch.float64)
    batch = run._batch(list(run.held_out), -1)
    with torch.no_grad():
        slots, _ = run._student.forward(batch, run._source.of(batch.indices))
        logits = draft_logits(slots, run._head).double()
    ids = run._model.draft_ids
    columns = {token: column for column, token in enumerate(range(64) if ids is None else ids.tolist())}
    surplus, seen = torch.zeros(4, dtype=torch.float64), torch.zeros(4)
    for row, (text, label) in enumerate(zip(contexts(batch), slots.labels.tolist(), strict=True)):
        orders = torch.zeros(logits.shape[1], dtype=torch.int64)
        for token, order in orders_after(text, [], 3).items():
            if token in columns:
                orders[columns[token]] = order
        if label < 0 or not orders.any():
            continue
        law = (logits[row] + biases[orders]).softmax(-1)
        surplus -= torch.zeros(4, dtype=torch.float64).index_add_(0, orders, law)
        surplus[orders[label]] += 1.0
        seen[orders[label]] += 1.0
    assert min(seen.tolist()) > 3
    torch.testing.assert_close(surplus[1:], biases[1:] - torch.tensor(PRIOR).double(), rtol=1e-3, atol=1e-3)
    assert float((biases[1:] - torch.tensor(PRIOR)).abs().max()) > 0.5


def test_nothing_held_out_is_refused(tmp_path: Path) -> None:
    """With a message that says what to set."""
    with pytest.raises(TrainingError, match="held_out"):
        trainer(tmp_path, settings=SETTINGS.with_(held_out=0.0)).fit_context_bias()


@pytest.mark.parametrize("held_out", [0.0, 0.3])
@pytest.mark.parametrize("changes", [{}, {"context_bias": []}])
def test_a_run_fits_them_when_it_ends(changes: dict[str, Any], held_out: float, tmp_path: Path) -> None:
    """In the drafter's config; where nothing is held out the default stays, and none stay none. Twice gives one."""
    settings = SETTINGS.with_(epochs=1, held_out=held_out, batch_size=4)
    plan = TrainingPlan(
        out=tmp_path,
        data=dataclasses.replace(SELF_ASKED, opened_fraction=0.0),
        training=settings,
        drafter={"num_features": 2, "num_layers": 1, **changes},
    )
    TrainingRun(llm(), plan).run()
    found = load_drafter(tmp_path).config.context_bias
    if "context_bias" in changes:
        assert found == ()
    elif held_out == 0.0:
        assert found == CONTEXT_BIAS
    else:
        assert len(found) == len(CONTEXT_BIAS)
        assert found != CONTEXT_BIAS
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert written["config"]["context_bias"] == list(found)
    TrainingRun(llm(), plan).run()  # finished before: goes on from the last step, and ends the same
    assert load_drafter(tmp_path).config.context_bias == found


def test_older_checkpoints_go_on(tmp_path: Path) -> None:
    """Biases are no part of what a checkpoint must agree on: not older states without any, nor runs with other ones."""
    first = trainer(tmp_path)
    first.run(until=3)
    for biases in ((), PRIOR, (0.0,)):
        again = trainer(tmp_path, context_bias=biases)
        assert again.resume()
        assert again.step == 3
    state = torch.load(tmp_path / "training.pt", weights_only=True)
    assert "context_bias" not in json.loads(state["identity"]["drafter"])


@pytest.mark.parametrize("kind", ["dspark", "conv"])
def test_a_drafter_to_go_on_from_gets_biases(kind: str, tmp_path: Path) -> None:
    """One that was made without any has those of a new drafter, its own stay, and the settings may say otherwise."""
    made: Any = DSparkKind(adapter(), None) if kind == "dspark" else ConvKind(adapter())
    shape = (
        config() if kind == "dspark" else made.design({"hidden_size": 16, "num_layers": 2, "draft_vocab_size": None})
    )
    for biases, changes, expected in (
        ((), {}, CONTEXT_BIAS),
        (PRIOR, {}, PRIOR),
        ((), {"context_bias": []}, ()),
        (PRIOR, {"context_bias": [1, 2]}, (1.0, 2.0)),
    ):
        model = made.new(shape.with_(context_bias=biases), texts(), seed=0, fresh=True, notify=lambda _told: None)
        made.save(model, tmp_path, {})
        found = made.load(tmp_path, changes, seed=0, fresh=False)
        assert found.config.context_bias == expected
