"""Training works, can be interrupted anywhere, and can be shared by processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.errors import InvalidSettingError
from specflow.policies import Fixed
from specflow_llm.drafters.dspark import DSparkDrafter
from specflow_llm.errors import TrainingError
from specflow_llm.training import trainer as trainer_module
from specflow_llm.training.features import Features, LiveFeatures
from specflow_llm.training.objective import LossWeights, chunked_loss, expected_length, reference_loss
from specflow_llm.training.settings import TrainSettings, read_settings
from specflow_llm.training.trainer import STATE_FILE, Report, Trainer
from tests.specflow_llm.block_drafters import sample
from tests.specflow_llm.decoding import decode
from tests.specflow_llm.small_training import SETTINGS, TOGETHER, adapter, fresh_model, texts, trainer


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    """The drafter's weights."""
    return {name: tensor.clone() for name, tensor in run._model.state_dict().items() if tensor is not None}


def same(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are equal bit by bit."""
    return set(mine) == set(other) and all(torch.equal(mine[name], other[name]) for name in mine)


# --- It learns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["anchor_predicts", pytest.param("mask_predicts", marks=pytest.mark.slow)])
def test_training_raises_acceptance_on_held_out_text(tmp_path: Path, layout: str) -> None:
    """Forty-eight steps lift both estimated lengths above 1.7 on text not trained on, from below 1.1; and the engine's.

    The engine then emits at least half a token more per round on prompts of its own, greedily.
    """
    settings = SETTINGS.with_(epochs=16, batch_size=16, learning_rate=1e-2, checkpoint_steps=10**6)
    run = trainer(tmp_path, settings=settings, layout=layout, markov_rank=32)
    before = run.measure()
    reports: list[Report] = []
    run.run(reports.append)
    after = run.measure()
    assert before.greedy_length < 1.1
    assert before.sampled_length < 1.1
    assert after.greedy_length > 1.7
    assert after.sampled_length > 1.7
    assert after.tv < before.tv - 0.2
    assert after.loss < 0.5 * before.loss
    assert min(after.accept) > max(before.accept) + 0.1
    assert reports[-1].step == reports[-1].num_steps == run.num_steps == 48
    assert reports[-1].recent.loss < reports[0].recent.loss
    assert reports[-1].seconds_left == 0.0

    def emitted(model: Any) -> float:
        prompts = [list(entry.token_ids[:5]) for entry in texts()[48:54]]
        drafter = DSparkDrafter(model, adapter())
        done = decode(adapter().model, prompts, [16] * len(prompts), drafter=drafter, policy=Fixed(4))
        return sum(map(len, done.outputs)) / sum(completion.metrics.rounds for completion in done.completions)

    assert emitted(run._model) > emitted(fresh_model(layout=layout, markov_rank=32)) + 0.5


def test_the_fast_loss_is_the_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes the chunked path, with the chunk of the settings, and what it gives is the plain loss."""
    seen: list[tuple[int, int]] = []

    def spy(slots: Any, head: Any, teacher: Any, loss: LossWeights, *, chunk: int) -> Any:
        asked: list[int] = []

        def counted(hidden: torch.Tensor) -> torch.Tensor:
            asked.append(len(hidden))
            found: torch.Tensor = head(hidden)
            return found

        parts = chunked_loss(slots, counted, teacher, loss, chunk=chunk)
        plain = reference_loss(slots, head, teacher, loss)
        torch.testing.assert_close(parts.total.detach(), plain.total.detach(), rtol=1e-5, atol=1e-4)
        seen.append((max(asked), chunk))
        return parts

    monkeypatch.setattr(trainer_module, "chunked_loss", spy)
    run = trainer(tmp_path, settings=SETTINGS.with_(loss_chunk=37))
    run.run(until=2)
    assert seen == [(37, 37)] * 2


def test_what_is_measured_is_what_it_is_called(tmp_path: Path) -> None:
    """Figures recomputed from whole laws: accept rates by slot, matches, and lengths of whole blocks."""
    run = trainer(tmp_path, draft_vocab_size=32)
    chosen = list(run.held_out)
    assert chosen == list(range(48, 60))
    found = run.measure()
    rates: list[list[list[float]]] = []
    with torch.no_grad():
        for begin in range(0, len(chosen), SETTINGS.batch_size):
            batch = run._batch(chosen[begin : begin + SETTINGS.batch_size], -1)
            slots, teacher = run._student.forward(batch, run._source.of(batch.indices))
            parts = reference_loss(slots, run._head, teacher, SETTINGS.loss)
            values = iter(parts.accept.tolist())
            blocks = batch.supervised.flatten(0, 1).tolist()
            rates += [[[next(values)] if kept else [] for kept in block] for block in blocks]
    for slot in range(4):
        column = [rate for block in rates for rate in block[slot]]
        assert found.accept[slot] == pytest.approx(sum(column) / len(column), abs=1e-6)
    whole = [torch.tensor([rate for slot in block for rate in slot]) for block in rates if block[-1]]
    assert found.sampled_length == pytest.approx(sum(map(expected_length, whole)) / len(whole), abs=1e-6)
    assert run.measure() == found  # the draws are the same
    assert run.measure(range(4)) != found


def test_the_teacher_is_the_targets_law_at_the_position_before(tmp_path: Path) -> None:
    """Log-probabilities of the draft vocabulary under the target, normalised over the whole one, for each slot."""
    run = trainer(tmp_path, draft_vocab_size=32)
    batch = run._batch([0, 5], 3)
    with torch.no_grad():
        slots, teacher = run._student.forward(batch, run._source.of(batch.indices))
        laws = teacher(torch.arange(len(slots.hidden)))
    ids = run._model.draft_ids
    assert isinstance(ids, torch.Tensor)
    place = 0
    for row, number in enumerate((0, 5)):
        text = torch.tensor([texts()[number].token_ids])
        with torch.inference_mode():
            logits = adapter().model(input_ids=text, use_cache=False).logits[0]
        for anchor, kept in zip(batch.anchors[row].tolist(), batch.supervised[row].tolist(), strict=True):
            for slot in range(sum(kept)):
                expected = logits[anchor + slot].log_softmax(-1)[ids]
                torch.testing.assert_close(laws[place], expected, rtol=1e-4, atol=1e-4)
                token = int(text[0, anchor + slot + 1])
                column = (ids == token).nonzero().flatten().tolist()
                assert int(slots.labels[place]) == (column[0] if column else -1)
                assert float(slots.weights[place]) == pytest.approx(2.718281828 ** (-slot / 4.0))
                place += 1
    assert place == len(laws)


def test_only_the_drafter_is_trained(tmp_path: Path) -> None:
    """The target's weights stay as they are, and no gradient reaches them."""
    before = {name: tensor.clone() for name, tensor in adapter().model.state_dict().items()}
    trainer(tmp_path).run(until=2)
    assert all(torch.equal(before[name], tensor) for name, tensor in adapter().model.state_dict().items())
    assert all(parameter.grad is None for parameter in adapter().model.parameters())


# --- It can be interrupted --------------------------------------------------------------------------------------------


def test_going_on_from_a_checkpoint_is_exact(tmp_path: Path) -> None:
    """Stopped at any checkpoint and continued by a new trainer, weights are those of a run that never stopped."""
    whole = trainer(tmp_path / "whole")
    whole.run()
    parts = tmp_path / "parts"
    for until in (3, 4, 11, None):
        run = trainer(parts)
        resumed = run.resume()
        assert resumed == (until != 3)
        run.run(until=until)
    assert run.step == whole.step == 24
    assert same(weights(run), weights(whole))
    assert sorted(path.name for path in parts.iterdir()) == [STATE_FILE]


def environment() -> dict[str, str]:
    """For child processes: one thread, so that sums are taken in the same order."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.slow
def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    """SIGKILL at an arbitrary moment after a checkpoint; the resumed run ends with the very weights of a whole one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = trainer(tmp_path / "whole")
        whole.run()
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.specflow_llm.small_training", "alone", str(tmp_path / "killed")],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert child.stdout is not None
        with child.stdout:
            assert child.stdout.readline() == "saved 3\n"
            assert child.stdout.readline() == "saved 6\n"
            child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        run = trainer(tmp_path / "killed")
        assert run.resume()
        assert 6 <= run.step < 24
        run.run()
        assert same(weights(run), weights(whole))
    finally:
        torch.set_num_threads(threads)


def test_an_unfinished_checkpoint_is_never_read(tmp_path: Path) -> None:
    """What a process wrote when it was killed has another name; the checkpoint before it is whole."""
    run = trainer(tmp_path)
    run.run(until=3)
    (tmp_path / f"{STATE_FILE}.123.tmp").write_bytes(b"half")
    again = trainer(tmp_path)
    assert again.resume()
    assert again.step == 3
    assert not trainer(tmp_path / "empty").resume()


def test_matrices_may_be_bfloat16_while_everything_else_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's laws, the weights and all figures stay float32; the products are bfloat16; and it learns as much.

    "auto" is what the device has hardware for, and a checkpoint remembers which it was.
    """
    products: list[torch.dtype] = []
    losses = {}
    for precision in ("float32", "bfloat16"):
        run = trainer(tmp_path / precision, settings=SETTINGS.with_(precision=precision, checkpoint_steps=10**6))
        hook = run._model.fc.register_forward_hook(lambda _module, _inputs, output: products.append(output.dtype))
        run.run()
        hook.remove()
        losses[precision] = run.measure().loss
        assert products == [torch.float32 if precision == "float32" else torch.bfloat16] * run.num_steps
        assert {parameter.dtype for parameter in run._model.parameters()} == {torch.float32}
        products.clear()
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)

    automatic = SETTINGS.with_(precision="auto")
    monkeypatch.setattr("specflow_llm.training.trainer.supports_bfloat16", lambda _device: True)
    trainer(tmp_path / "auto", settings=automatic).run(until=3)
    assert trainer(tmp_path / "auto", settings=automatic).resume()
    monkeypatch.setattr("specflow_llm.training.trainer.supports_bfloat16", lambda _device: False)
    with pytest.raises(TrainingError, match="other precision"):
        trainer(tmp_path / "auto", settings=automatic).resume()


def test_tokens_that_no_text_holds_bias_nothing(tmp_path: Path) -> None:
    """Their rows of the Markov head's first matrix are zero before training and after it; others are not."""
    chosen = texts()[:4]
    run = trainer(tmp_path, samples=chosen, settings=SETTINGS.with_(batch_size=2))
    run.run(until=6)
    head = run._model.markov_head
    assert head is not None
    seen = {token for entry in chosen for token in entry.token_ids}
    moved = head.previous.weight.abs().sum(-1) > 0.0
    never = [token for token in range(run._model.config.vocab_size) if token not in seen]
    assert never
    assert not bool(moved[never].any())
    assert float(moved[sorted(seen)].float().mean()) > 0.5


@pytest.mark.parametrize("multiple", [1.0, 4.0])
def test_the_markov_head_learns_at_a_rate_of_its_own(tmp_path: Path, multiple: float) -> None:
    """Adam's first step is as long as the rate, whatever the gradient: the head's is so many times the others'."""
    run = trainer(tmp_path, settings=SETTINGS.with_(markov_rate=multiple))
    before = weights(run)
    run.run(until=1)
    moved = {name: float((tensor - before[name]).abs().max()) for name, tensor in weights(run).items()}
    rate = run._settings.rate(0, run.num_steps)
    for name, distance in moved.items():
        if name.startswith(("markov_head.previous", "layers.", "fc.")):  # W2 waits for W1, which is zero
            wanted = rate * (multiple if name.startswith("markov_head.") else 1.0)
            assert distance == pytest.approx(wanted, rel=1e-2), name


@pytest.mark.parametrize("what", ["training", "drafter", "data"])
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, what: str) -> None:
    """Other settings, another drafter or other text: the error names which, and nothing is loaded."""
    trainer(tmp_path).run(until=3)
    other = {
        "training": lambda: trainer(tmp_path, settings=SETTINGS.with_(learning_rate=1e-4)),
        "drafter": lambda: trainer(tmp_path, markov="gated"),
        "data": lambda: trainer(tmp_path, samples=(*texts()[:59], sample([1, 2, 3, 4]))),
    }[what]()
    before = weights(other)
    with pytest.raises(TrainingError, match=f"other {what}"):
        other.resume()
    assert other.step == 0
    assert same(weights(other), before)


def test_text_of_one_run_is_the_same_in_any_order_of_steps(tmp_path: Path) -> None:
    """Step n sees the same texts and anchors whether or not the steps before it were run."""
    run = trainer(tmp_path)
    whole = list(run._batches(0, 24))
    assert list(run._batches(7, 11)) == whole[7:11]
    assert sorted(itertools.chain.from_iterable(whole[:6])) == list(range(48))  # an epoch has each text once
    assert whole[:6] != whole[6:12]
    first, second = run._batch(whole[0], 0), run._batch(whole[0], 6)
    assert torch.equal(first.token_ids, second.token_ids)
    assert not torch.equal(first.anchors, second.anchors)


@pytest.mark.parametrize("layout", ["anchor_predicts", "mask_predicts"])
def test_short_blocks_train_as_a_drafter_of_short_blocks_would(tmp_path: Path, layout: str) -> None:
    """In the first steps a drafter of blocks of 6 learns what one of 4 would, bit by bit; then its later slots too."""
    settings = SETTINGS.with_(short_blocks=0.25)
    long = trainer(tmp_path / "long", settings=settings, block_size=6, layout=layout)
    short = trainer(tmp_path / "short", settings=settings, block_size=4, layout=layout)
    first = long.num_steps // 4
    reports: list[Report] = []
    for run in (long, short):
        run.run(reports.append, until=first)
    assert same(weights(long), weights(short))
    assert {len(report.recent.accept) for report in reports} == {4}
    assert len(long.measure().accept) == 6  # what is measured is always whole
    later: list[Report] = []
    long.run(later.append, until=first + 4)
    assert {len(report.recent.accept) for report in later} == {6}
    assert settings.block(0, 100) == settings.block(24, 100) == 4
    assert settings.block(25, 100) is None
    assert SETTINGS.block(74, 100) == 4
    assert SETTINGS.block(75, 100) is SETTINGS.with_(short_blocks=0.0).block(0, 100) is None
    short.run(until=first + 4)
    assert not same(weights(long), weights(short))


# --- It can be shared -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Processes that share batches have the weights of one that has them whole, to 1e-6 in the mean, and equal figures.

    Of a batch of one text, one of the processes has nothing.
    """
    subprocess.run(
        [sys.executable, "-m", "tests.specflow_llm.small_training", "together", str(tmp_path)],
        check=True,
        env={**environment(), "MASTER_PORT": str(29500 + os.getpid() % 2000)},
        timeout=100,
    )
    for size, steps in TOGETHER.items():
        alone = trainer(tmp_path / "alone", settings=SETTINGS.with_(batch_size=size))
        alone.run(until=steps)
        measured = alone.measure()
        for rank in (0, 1):
            found = torch.load(tmp_path / f"{size}-{rank}.pt", weights_only=True)
            for name, tensor in weights(alone).items():
                difference = (found["model"][name].double() - tensor.double()).abs()
                # Adam divides by a gradient's size: where that is nearly zero, rounding shows, up to a step's rate.
                assert float(difference.mean()) < 1e-6
                assert float(difference.max()) < 0.05 * SETTINGS.learning_rate
            assert found["accept"] == pytest.approx(measured.accept, abs=1e-5)
            assert found["loss"] == pytest.approx(measured.loss, abs=1e-4)


# --- Odd input --------------------------------------------------------------------------------------------------------


class Spoilt:
    """A source whose features are not numbers from some step on."""

    def __init__(self, source: LiveFeatures, good: int) -> None:
        self._source, self._left = source, good

    def of(self, numbers: Any) -> list[Features]:
        """Good ones first."""
        self._left -= 1
        found = self._source.of(numbers)
        if self._left >= 0:
            return found
        return [Features(entry.features * torch.nan, entry.hidden, entry.log_total) for entry in found]


def test_a_loss_that_is_not_a_number_ends_training_before_it_spoils_the_weights(tmp_path: Path) -> None:
    """The error says at which step, the weights are those before it, and the last checkpoint can be gone on from."""
    model = fresh_model()
    source = Spoilt(LiveFeatures(adapter(), (0, 2), texts()), good=4)
    run = Trainer(adapter(), model, texts(), source, SETTINGS, tmp_path)
    with pytest.raises(TrainingError, match="not a finite number at step 4"):
        run.run()
    assert all(bool(tensor.isfinite().all()) for tensor in weights(run).values())
    again = trainer(tmp_path)
    assert again.resume()
    assert again.step == 3


def test_batches_in_which_nothing_is_supervised_are_passed_over(tmp_path: Path) -> None:
    """Texts too short for any block change nothing and spoil nothing, also when measured."""
    short = tuple(sample([5, 6 + index % 3], first_own=1, index=index) for index in range(10))
    run = trainer(tmp_path, samples=short, settings=SETTINGS.with_(batch_size=4, epochs=2))
    before = weights(run)
    run.run()
    assert same(weights(run), before)
    assert run.measure().sampled_length == 1.0  # a round emits one token, whatever is drafted


def test_long_texts_are_cut(tmp_path: Path) -> None:
    """No anchor and no label lies beyond ``max_length``."""
    run = trainer(tmp_path, settings=SETTINGS.with_(max_length=12))
    batch = run._batch([0, 1, 2], 0)
    assert batch.token_ids.shape[1] == 12
    assert int(batch.anchors.max()) <= 10
    run.run(until=2)


def test_there_must_be_something_to_learn_from_and_to_measure(tmp_path: Path) -> None:
    """No text, or none left after holding out, is refused; so is measuring where nothing was held out."""
    with pytest.raises(TrainingError, match="no conversations to learn"):
        trainer(tmp_path, samples=())
    with pytest.raises(TrainingError, match="held out"):
        trainer(tmp_path, settings=SETTINGS.with_(held_out=0.0)).measure()


@pytest.mark.parametrize("seed", [0, 20_260_101, 2**40])
def test_any_seed_will_do(tmp_path: Path, seed: int) -> None:
    """Large seeds do not overflow where they are mixed with steps and numbers."""
    trainer(tmp_path, settings=SETTINGS.with_(seed=seed)).run(until=1)


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_the_rate_rises_and_falls() -> None:
    """Linear to the top in the warm-up, then a cosine to the final fraction."""
    settings = TrainSettings(learning_rate=1.0, warmup=0.1, final_rate=0.2)
    rates = [settings.rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.6)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert settings.rate(100, 100) == pytest.approx(0.2)
    assert TrainSettings(learning_rate=1.0).rate(0, 1) == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0.0),
        ("batch_size", 0),
        ("num_anchors", 0),
        ("learning_rate", -1.0),
        ("markov_rate", 0.0),
        ("warmup", 1.5),
        ("final_rate", -0.1),
        ("short_blocks", 1.5),
        ("weight_decay", -1.0),
        ("grad_clip", 0.0),
        ("loss_chunk", 0),
        ("max_length", 4),
        ("held_out", 1.0),
        ("checkpoint_steps", 0),
        ("report_steps", 0),
        ("precision", "float16"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(name: str, value: Any) -> None:
    """The error names the field."""
    with pytest.raises(InvalidSettingError, match=name):
        TrainSettings(**{name: value})


def test_settings_survive_a_file(tmp_path: Path) -> None:
    """Plain data in, equal settings out; unknown fields and sections are refused."""
    settings = TrainSettings(epochs=2.5, loss=LossWeights(ce=0.5), seed=3)
    assert TrainSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    assert TrainSettings.from_dict({}) == TrainSettings()
    with pytest.raises(InvalidSettingError, match="colour"):
        TrainSettings.from_dict({"colour": "red"})
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"training": {"epochs": 1}}), encoding="utf-8")
    assert read_settings(path) == {"training": {"epochs": 1}}
    for text in ("{", "[]", '{"other": {}}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(TrainingError, match="settings"):
            read_settings(path)
    with pytest.raises(TrainingError, match="cannot be read"):
        read_settings(tmp_path / "nowhere.json")
