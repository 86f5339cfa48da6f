"""Training a convolutional drafter: what is supervised, that it learns, that it resumes exactly, and what it serves."""

from __future__ import annotations

import copy
import functools
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from typer.testing import CliRunner

from specflow.errors import InvalidSettingError
from specflow_llm import LLM, SamplingParams, Speculation
from specflow_llm.cli import app
from specflow_llm.drafters import ConvDrafter, TargetFacts, build_drafter
from specflow_llm.drafters.conv_checkpoint import is_conv, load_conv, save_conv
from specflow_llm.drafters.conv_model import ConvModel, SharedTables
from specflow_llm.dspark import TargetAdapter
from specflow_llm.errors import CheckpointError, TrainingError
from specflow_llm.training.batches import build_chain_batch
from specflow_llm.training.features import LiveFeatures
from specflow_llm.training.kinds import build_kind
from specflow_llm.training.kinds.conv import ConvKind
from specflow_llm.training.plan import TrainingPlan
from specflow_llm.training.run import TrainingRun
from specflow_llm.training.samples import Sample
from specflow_llm.training.settings import TrainSettings
from specflow_llm.training.trainer import Trainer
from specflow_llm.training.world import World
from tests.specflow_llm.harness import drive, make_engine
from tests.specflow_llm.models import VOCAB, tiny_model

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_layers": 2,
    "kernel_size": 3,
    "draft_vocab_size": 48,
    "block_size": 4,
}
SETTINGS = TrainSettings(
    epochs=8, batch_size=8, learning_rate=5e-3, held_out=0.2, warmup=0.1, checkpoint_steps=1000, precision="float32"
)


@functools.cache
def target() -> PreTrainedModel:
    """A tiny target that is often sure, mostly because of the last few tokens: something to be learned."""
    model: Any = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
    made: PreTrainedModel = model
    return made


@functools.cache
def adapter() -> TargetAdapter:
    """The target as drafters see it."""
    return TargetAdapter(target())


@functools.cache
def samples() -> tuple[Sample, ...]:
    """Text that the target wrote at temperature 1, after prompts of 4 random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (80, 4), generator=generator)
    with torch.inference_mode():
        while ids.shape[1] < 40:
            law = target()(ids, use_cache=False).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(law, 1, generator=generator)], dim=1)
    # Ragged, so that padding is part of every batch.
    return tuple(Sample(index, tuple(row[: 40 - index % 7]), 4, 4, 1.0) for index, row in enumerate(ids.tolist()))


def fresh_model(seed: int = 0, **changes: Any) -> ConvModel:
    """An untrained drafter."""
    kind = ConvKind(adapter())
    config = kind.design({**SIZES, **changes})
    return kind.new(config, samples(), seed=seed, fresh=False, notify=lambda _message: None)


def make_trainer(model: ConvModel, folder: Path, *, settings: TrainSettings = SETTINGS, world: Any = None) -> Trainer:
    """A trainer over the text."""
    live = LiveFeatures(adapter(), (), samples())
    return Trainer(adapter(), model, list(samples()), live, settings, folder, world or World())


# --- What is supervised -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_own", [0, 1, 4, 11])
def test_every_token_of_the_target_is_supervised_once(first_own: int) -> None:
    """Blocks meet end to end: all tokens of the target's own, each once, in order, and no others."""
    sample = Sample(0, tuple(range(12)), first_own, first_own, 0.0)
    batch = build_chain_batch([(0, sample), (3, Sample(3, (5, 6, 7), 1, 1, 0.0))], block=4)
    slots = batch.anchors[0].unsqueeze(-1) + 1 + torch.arange(4)
    assert slots[batch.supervised[0]].tolist() == list(range(max(first_own, 1), 12))
    assert batch.supervised[1].sum() == 2
    assert batch.indices == (0, 3)


@torch.inference_mode()
def test_slots_see_the_past_only_and_teachers_are_the_targets_laws(tmp_path: Path) -> None:
    """Each slot's logits, label and teacher equal those computed from its own prefix alone, to 1e-4."""
    model = fresh_model()
    trainer = make_trainer(model, tmp_path)
    batch = trainer._batch([5, 17], 0)
    slots, teacher = trainer._student.forward(batch, trainer._source.of(batch.indices))
    logits, laws = trainer._head(slots.hidden), teacher(torch.arange(len(slots.hidden)))
    assert model.draft_ids is not None
    places = [
        (row, place) for row, number in enumerate((5, 17)) for place in range(4, len(samples()[number].token_ids))
    ]
    assert len(places) == len(logits)
    for index, (row, place) in enumerate(places):
        prefix, token = batch.token_ids[row, :place], int(batch.token_ids[row, place])
        torch.testing.assert_close(logits[index], model(prefix[None])[0, -1], rtol=1e-4, atol=1e-4)
        law = target()(prefix[None], use_cache=False).logits[0, -1].log_softmax(-1)[model.draft_ids]
        torch.testing.assert_close(laws[index], law, rtol=1e-4, atol=1e-4)
        label = int(slots.labels[index])
        assert token == int(model.draft_ids[label]) if label >= 0 else token not in model.draft_ids.tolist()
    assert bool((slots.labels < 0).any())  # text outside the draft vocabulary was part of it
    assert set(slots.weights.tolist()) == {1.0}


# --- Learning ---------------------------------------------------------------------------------------------------------


@functools.cache
def trained() -> tuple[ConvModel, Any, Any]:
    """(model, figures on held-out text before training, and after). Seeded: the same on every run."""
    model = fresh_model()
    trainer = make_trainer(model, Path("/nowhere"))
    trainer.save = lambda: None  # type: ignore[method-assign]
    before = trainer.measure()
    trainer.run()
    return model, before, trainer.measure()


def test_training_raises_acceptance_on_held_out_text() -> None:
    """Text that was not trained on is foreseen much better, at every place of a round."""
    _, before, after = trained()
    assert len(after.accept) == SIZES["block_size"]
    assert min(after.accept) > 3 * max(before.accept)
    assert min(after.match) > 3 * max(before.match)
    assert after.sampled_length > before.sampled_length + 0.1
    assert after.greedy_length > before.greedy_length + 0.1
    assert after.loss < 0.6 * before.loss


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    """Stopped after 5 of 12 steps and resumed by another process's objects, every weight is the same bit for bit."""
    settings = SETTINGS.with_(epochs=1.5)
    whole, first, second = fresh_model(), fresh_model(), fresh_model(seed=9)
    make_trainer(whole, tmp_path / "a", settings=settings).run()
    make_trainer(first, tmp_path / "b", settings=settings).run(until=5)
    trainer = make_trainer(second, tmp_path / "b", settings=settings)
    assert trainer.resume()
    assert trainer.step == 5
    trainer.run()
    assert trainer.step == trainer.num_steps == 12
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_another_draft_vocabulary_is_not_resumed(tmp_path: Path) -> None:
    """Heads and labels are set up before a checkpoint is read; one with other ids would be learned wrongly."""
    settings = SETTINGS.with_(epochs=0.2)
    make_trainer(fresh_model(), tmp_path, settings=settings).run()
    model = fresh_model()
    assert model.draft_ids is not None
    other = ConvModel(model.config, SharedTables.of(adapter()), model.draft_ids.flip(0))
    assert make_trainer(fresh_model(), tmp_path, settings=settings).resume()
    with pytest.raises(TrainingError, match="other draft vocabulary"):
        make_trainer(other, tmp_path, settings=settings).resume()


class Meeting:
    """Where the threads of :class:`ThreadWorld` add up tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60.0)
        self.parts: dict[int, torch.Tensor] = {}


@dataclass(frozen=True)
class ThreadWorld(World):
    """Processes that are threads."""

    meeting: Any = None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up, in place."""
        self.meeting.parts[self.rank] = tensor.clone()
        self.meeting.barrier.wait()
        tensor.copy_(torch.stack([self.meeting.parts[rank] for rank in range(self.size)]).sum(0))
        self.meeting.barrier.wait()
        return tensor

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up gradients."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.sum(parameter.grad)


def test_two_processes_train_what_one_would(tmp_path: Path) -> None:
    """Batches shared between two give the same drafter, up to the rounding of sums, and the same figures."""
    settings = SETTINGS.with_(epochs=0.6, learning_rate=1e-3)
    alone = fresh_model()
    expected = make_trainer(alone, tmp_path / "one", settings=settings)
    expected.run()
    meeting, models, figures = Meeting(2), [fresh_model(), fresh_model()], {}

    def work(rank: int) -> None:
        world = ThreadWorld(rank, 2, meeting)
        trainer = make_trainer(models[rank], tmp_path / "two", settings=settings, world=world)
        trainer.run()
        figures[rank] = trainer.measure()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert figures[0] == figures[1]
    assert figures[0].accept == pytest.approx(expected.measure().accept, rel=1e-3)
    for name, tensor in alone.named_parameters():
        torch.testing.assert_close(tensor, models[0].get_parameter(name), rtol=1e-3, atol=1e-4)
        assert torch.equal(models[0].get_parameter(name), models[1].get_parameter(name)), name


def test_it_learns_in_bfloat16_too(tmp_path: Path) -> None:
    """Products in bfloat16 leave weights in float32, and the loss falls."""
    model = fresh_model()
    trainer = make_trainer(model, tmp_path, settings=SETTINGS.with_(epochs=2, precision="bfloat16"))
    before = trainer.measure().loss
    trainer.run()
    assert trainer.measure().loss < before - 0.1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# --- Files ------------------------------------------------------------------------------------------------------------


def facts(model: PreTrainedModel) -> TargetFacts:
    """What building a drafter needs to know."""
    return TargetFacts(
        vocab_size=model.config.vocab_size, tokenizer=None, dtype=model.dtype, device=model.device, model=model
    )


def test_a_checkpoint_round_trip_changes_nothing(tmp_path: Path) -> None:
    """In float32 the logits are equal bit for bit, and in bfloat16 to its precision; the target's tables stay out."""
    model = trained()[0]
    ids = torch.tensor([samples()[3].token_ids])
    save_conv(model, tmp_path / "32", dtype=torch.float32)
    save_conv(model, tmp_path / "16", extra={"trained": {"steps": 3}})
    assert torch.equal(load_conv(tmp_path / "32", adapter())(ids), model(ids))
    rough = load_conv(tmp_path / "16", adapter())
    assert {weight.dtype for weight in rough.parameters()} == {torch.float32}
    torch.testing.assert_close(rough(ids), model(ids), rtol=0.05, atol=0.05 * float(model(ids).detach().abs().max()))
    assert rough.config == model.config
    assert not {"embedding", "head"} & set(load_file(tmp_path / "16" / "model.safetensors"))
    described = json.loads((tmp_path / "16" / "config.json").read_text())
    assert described["format"] == "specflow-conv"
    assert described["trained"] == {"steps": 3}


def test_a_drafter_may_bring_its_own_embedding(tmp_path: Path) -> None:
    """A model that shares nothing is read back too."""
    model = ConvModel(fresh_model().config, None, fresh_model().draft_ids)
    save_conv(model, tmp_path, dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(load_conv(tmp_path, adapter())(ids), model(ids))


def test_its_folder_is_a_drafter(tmp_path: Path) -> None:
    """A folder's name is enough to get the drafter, under the folder's name."""
    save_conv(trained()[0], tmp_path / "quick")
    assert is_conv(tmp_path / "quick")
    assert not is_conv(tmp_path)
    drafter = build_drafter(str(tmp_path / "quick"), facts(target()))
    assert isinstance(drafter, ConvDrafter)
    assert drafter.name == "quick"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 96}, "whose vocabulary is 64; this target's is 96"),
        ({"hidden_size": 48}, "whose embedding's width is 32; this target's is 48"),
    ],
    ids=["vocabulary", "width"],
)
def test_a_wrong_target_is_refused(tmp_path: Path, overrides: dict[str, int], message: str) -> None:
    """With both sizes in the message, before anything is drafted."""
    save_conv(fresh_model(), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        build_drafter(tmp_path, facts(tiny_model("llama", **overrides)))


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    """Whatever is wrong with a folder, the message says it."""
    save_conv(fresh_model(), tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    good, described = load_file(weights), json.loads(config.read_text())

    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            load_conv(tmp_path, adapter())

    save_file({name: tensor for name, tensor in good.items() if name != "enter.weight"}, weights)
    refused("enter.weight")
    save_file({**good, "extra": torch.zeros(1)}, weights)
    refused("extra")
    save_file({**good, "draft_ids": good["draft_ids"].clone().fill_(3)}, weights)
    refused("48 different ids of a vocabulary of 64")
    save_file({**good, "leave.weight": good["leave.weight"][:, :5].contiguous()}, weights)
    refused("leave.weight")
    weights.write_bytes(b"nothing")
    refused("cannot be read")
    save_file(good, weights)
    assert load_conv(tmp_path, adapter()).config == fresh_model().config
    for change, match in (
        ({"version": 2}, "version 2"),
        ({"format": "specflow-dspark"}, "no convolutional drafter"),
        ({"config": {**described["config"], "spin": 1}}, "config is wrong"),
        ({"config": {**described["config"], "kernel_size": 1}}, "kernel_size"),
    ):
        config.write_text(json.dumps({**described, **change}))
        refused(match)
    config.unlink()
    refused("cannot be read")


# --- At work ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
def test_output_is_that_of_plain_decoding(temperature: float) -> None:
    """With the trained drafter, in a ragged batch, token for token; and drafts are accepted."""
    drafter = ConvDrafter(trained()[0], target_vocab_size=VOCAB)
    requests = [
        (
            list(samples()[number].token_ids[: 4 + number]),
            SamplingParams(temperature=temperature, seed=3, max_tokens=24),
        )
        for number in range(5)
    ]
    plain = [run.completion.token_ids for run in drive(make_engine(target()), requests)]
    drafted = drive(make_engine(target(), drafter, num_draft=4), requests)
    assert [run.completion.token_ids for run in drafted] == plain
    assert sum(run.completion.metrics.accepted for run in drafted) >= 5


# --- The command's run ------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_drafter_in_its_folder(tmp_path: Path) -> None:
    """From text to a folder that drafts, with a card; from a feature cache, and once more without training again."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(sample.to_line() + "\n" for sample in samples()[:24]))
    plan = TrainingPlan(
        out=tmp_path / "out",
        kind="conv",
        training=SETTINGS.with_(epochs=1.0),
        drafter=SIZES,
        samples=(text,),
        cache=tmp_path / "cache",
    )
    told: list[str] = []
    llm = LLM(target(), tokenizer=None, check_model=False)
    result = TrainingRun(llm, plan, notify=told.append).run()
    assert result.held_out is not None
    assert result.num_samples == 24
    assert any("convolutional layers of width 48 that see 5 tokens" in line for line in told)
    described = json.loads((plan.out / "config.json").read_text())
    assert described["trained"]["samples"] == 24
    card = (plan.out / "README.md").read_text()
    assert "convolutional drafter" in card
    assert "teacher forcing" in card
    written = load_file(plan.out / "model.safetensors")
    TrainingRun(llm, plan, notify=told.append).run()
    again = load_file(plan.out / "model.safetensors")
    assert all(torch.equal(written[name], again[name]) for name in written)
    assert any("going on from step" in line for line in told)
    drafting = LLM(target(), tokenizer=None, check_model=False, speculation=Speculation(drafter=str(plan.out)))
    params = SamplingParams(max_tokens=8)
    assert drafting.generate([[1, 2, 3]], params)[0].token_ids == llm.generate([[1, 2, 3]], params)[0].token_ids
    start = TrainingPlan(out=tmp_path / "on", kind="conv", training=plan.training, samples=(text,), start_from=plan.out)
    assert TrainingRun(llm, start).run().num_samples == 24


def test_a_cache_with_features_serves_both_kinds(tmp_path: Path) -> None:
    """Hidden states that were kept for a block drafter are not computed again for a convolutional one."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(sample.to_line() + "\n" for sample in samples()[:12]))
    llm = LLM(tiny_model("llama", num_hidden_layers=4), tokenizer=None, check_model=False)
    settings = SETTINGS.with_(epochs=0.1, num_anchors=4)
    written: list[dict[str, int]] = []
    for kind, sizes in (("dspark", {"num_features": 2, "num_layers": 1}), ("conv", SIZES)):
        plan = TrainingPlan(
            out=tmp_path / kind, kind=kind, training=settings, drafter=sizes, samples=(text,), cache=tmp_path / "cache"
        )
        TrainingRun(llm, plan).run()
        written.append({path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.safetensors")})
    assert written[0]
    assert written[0] == written[1]


def test_the_command_trains_either_kind(tmp_path: Path) -> None:
    """``train --kind conv`` takes the options of every kind, and refuses those of the other one by name."""
    target().save_pretrained(tmp_path / "model")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(sample.to_line() + "\n" for sample in samples()[:12]))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"drafter": {"hidden_size": 24, "draft_vocab_size": 32}, "training": {"epochs": 0.2}}))
    shared = ["train", "--target", str(tmp_path / "model"), "--text", str(text), "--config", str(config)]
    options = [*shared, "--kind", "conv", "--layers", "2", "--block-size", "3", "--json"]
    done = CliRunner().invoke(app, [*options, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.stderr
    assert len(json.loads(done.stdout)["held_out"]["accept"]) == 3
    assert load_conv(tmp_path / "out", adapter()).config.num_layers == 2
    refused = CliRunner().invoke(app, [*options, "--markov", "rnn", "--out", str(tmp_path / "other")])
    assert refused.exit_code == 2
    assert "markov" in refused.stderr
    unknown = CliRunner().invoke(app, [*shared, "--kind", "diffusion", "--out", str(tmp_path / "other")])
    assert unknown.exit_code == 2
    assert "diffusion" in unknown.stderr


def test_unknown_kinds_and_fields_are_refused() -> None:
    """By name, with what there is."""
    with pytest.raises(InvalidSettingError, match=r"kind.*conv, dspark"):
        build_kind("diffusion", adapter(), None)
    with pytest.raises(InvalidSettingError, match=r"markov.*kernel_size"):
        ConvKind(adapter()).design({"markov": "rnn"})
    with pytest.raises(InvalidSettingError, match="draft_vocab_size"):
        ConvKind(adapter()).design({"draft_vocab_size": 65})
