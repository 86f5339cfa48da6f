"""What cannot work is refused before work starts, names what was wrong, and leaves nothing behind."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from typer.testing import CliRunner

from specflow.errors import BackendContractError, InvalidSettingError
from specflow.policies import Fixed
from specflow_llm import LLM, ModelNotFoundError, SamplingParams, Speculation
from specflow_llm.calibration.table import fingerprint
from specflow_llm.cli import app
from specflow_llm.drafters import DrafterBase, DraftRequest, Proposal
from specflow_llm.drafters.base import RowId
from specflow_llm.dspark import TargetAdapter
from specflow_llm.engine import EngineConfig
from specflow_llm.errors import DrafterError, PromptError, TrainingError
from specflow_llm.training.design import design, new_drafter, start_from_target, target_layers_to_copy
from specflow_llm.training.features import LiveFeatures
from specflow_llm.training.objective import LossWeights
from specflow_llm.training.plan import TrainingPlan
from specflow_llm.training.run import TrainingRun
from specflow_llm.training.samples import SampleSettings
from specflow_llm.training.settings import TrainSettings, read_settings
from specflow_llm.training.text import TextStage
from specflow_llm.training.trainer import Trainer
from specflow_llm.training.world import World
from tests.specflow_llm.block_drafters import target
from tests.specflow_llm.chat import SETTINGS, ChatTokenizer, llm
from tests.specflow_llm.models import generate, tiny_model
from tests.specflow_llm.small_training import SETTINGS as TRAINING
from tests.specflow_llm.small_training import adapter, fresh_model, texts
from tests.specflow_llm.tokenizers import byte_level_bpe

# ----------------------------------------------------------------------------------------------------- settings of LLM


@pytest.mark.parametrize(
    "settings",
    [
        {"prefill_chunk": -3},  # would run no prompt at all
        {"prefill_chunk": 0},
        {"prefill_chunk": 2.5},
        {"max_batch_size": 0},  # would wait for ever
        {"max_batch_size": True},
        {"speculation": "ngram"},
    ],
)
def test_settings_of_an_llm_are_checked(settings: Mapping[str, Any]) -> None:
    """By name, before the model is looked at."""
    with pytest.raises(InvalidSettingError, match=next(iter(settings))):
        LLM(tiny_model(), **settings)


def test_an_engine_that_could_serve_nobody_is_refused() -> None:
    """An engine may be built without an LLM."""
    with pytest.raises(InvalidSettingError, match="max_batch_size"):
        EngineConfig(max_batch_size=-1)


def test_a_broken_tokenizer_is_not_taken_for_none(tmp_path: Path) -> None:
    """The reason is told where the model is loaded; ids can be worked with all the same."""
    tiny_model().save_pretrained(tmp_path)
    byte_level_bpe().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"broken', encoding="utf-8")
    with pytest.raises(ModelNotFoundError, match="tokenizer could not be loaded"):
        LLM(tmp_path)
    assert LLM(tmp_path, tokenizer=None, check_model=False).tokenizer is None


def test_a_folder_that_is_not_there_is_called_a_folder(tmp_path: Path) -> None:
    """Not a hub id of a wrong form."""
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        LLM(tmp_path / "nothing")


def test_penalties_of_a_model_are_told_and_not_applied() -> None:
    """``generate`` applies them to greedy output, too; here ``SamplingParams`` decide, and loading says so."""
    model = copy.deepcopy(tiny_model())
    assert model.generation_config is not None
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.suppress_tokens = [3]
    told: list[str] = []
    (done,) = LLM(model, check_model=False, notify=told.append).generate([1, 2], SamplingParams(max_tokens=8))
    assert [line for line in told if "repetition_penalty=1.3, suppress_tokens=[3]" in line]
    assert list(done.token_ids) == generate(tiny_model(), [1, 2], 8)
    told.clear()
    LLM(tiny_model(), check_model=False, notify=told.append)
    assert not [line for line in told if "generation_config" in line]


# ------------------------------------------------------------------------------------------------------------- drafters


@pytest.mark.parametrize(("name", "told"), [("ngarm", "'ngram'"), ("ngram+", "'dspark'"), ("DSpark", "'dspark'")])
def test_a_slip_in_a_drafters_name_asks_no_hub(name: str, told: str) -> None:
    """What was meant is named at once."""
    with pytest.raises(ModelNotFoundError, match=f"no drafter of that name.*{told}"):
        LLM(tiny_model(), check_model=False, speculation=Speculation(drafter=name))


class Proposes(DrafterBase):
    """Always the same."""

    def __init__(self, what: Any) -> None:
        self._what = what

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """What it was made with."""
        return [self._what] * len(requests)


@pytest.mark.parametrize("policy", ["adaptive", "fixed"])
@pytest.mark.parametrize(
    "what",
    [
        None,
        Proposal(["a"]),
        Proposal([0, "a"]),
        Proposal([1, 2], survival=[0.5, math.nan]),
        Proposal([1], survival=[math.inf]),
    ],  # type: ignore[list-item]
)
def test_a_drafter_that_breaks_its_contract_is_named(what: Any, policy: str) -> None:
    """Under every policy alike, whatever the policy would do with a number that is none."""
    speculation = Speculation(drafter=Proposes(what), policy=policy)
    decoder = LLM(tiny_model(), check_model=False, speculation=speculation)
    with pytest.raises(BackendContractError, match="drafter Proposes"):
        decoder.generate([1, 2], SamplingParams(max_tokens=30))
    assert decoder.engine.num_unfinished == 0


class Sticky(DrafterBase):
    """Cannot let go."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """One token each."""
        return [Proposal([1] * min(1, request.limit)) for request in requests]

    def release(self, row: RowId) -> None:
        """Fail."""
        raise RuntimeError(f"still holding {row}")


def test_a_drafter_that_fails_to_release_leaves_no_request_behind() -> None:
    """The error is raised, and every request of the call is gone; later calls do not decode them along."""
    speculation = Speculation(drafter=Sticky(), policy=Fixed(1))
    decoder = LLM(tiny_model(), check_model=False, speculation=speculation)
    with pytest.raises(RuntimeError, match="still holding"):
        decoder.generate([[1], [2], [3], [4]], SamplingParams(max_tokens=9))
    assert decoder.engine.num_unfinished == 0
    assert not decoder._inbox


# ------------------------------------------------------------------------------------------------------------- training


WRONG: Sequence[tuple[type, Mapping[str, Any], str]] = [
    (TrainSettings, {"epochs": "4"}, "epochs"),
    (TrainSettings, {"epochs": math.inf}, "epochs"),
    (TrainSettings, {"loss": 3}, "loss"),
    (TrainSettings, {"batch_size": True}, "batch_size"),
    (TrainSettings, {"seed": 1.5}, "seed"),
    (TrainSettings, {"max_length": 50.5}, "max_length"),
    (TrainSettings, {"loss": LossWeights(ce=0.0, kl=0.0, tv=0.0)}, "loss"),
    (LossWeights, {"ce": "1"}, "ce"),
    (LossWeights, {"decay": None}, "decay"),
    (SampleSettings, {"num_samples": 4.5}, "num_samples"),
    (SampleSettings, {"temperatures": 1.0}, "temperatures"),
    (SampleSettings, {"opened_fraction": "half"}, "opened_fraction"),
]


@pytest.mark.parametrize(("kind", "values", "name"), WRONG)
def test_training_settings_of_wrong_types_are_named(kind: Any, values: Mapping[str, Any], name: str) -> None:
    """As they come from a file; before any text is made."""
    with pytest.raises(InvalidSettingError, match=name):
        kind(**values)


def test_unknown_loss_terms_are_named() -> None:
    """And those there are."""
    with pytest.raises(InvalidSettingError, match=r"foo.*confidence"):
        TrainSettings.from_dict({"loss": {"foo": 1}})


@pytest.mark.parametrize("text", ['{"training": [1]}', '{"data": "abc"}', '{"drafter": [1]}', "[]", '{"more": {}}'])
def test_a_settings_file_holds_objects(tmp_path: Path, text: str) -> None:
    """One object for each section that is there, and no other section."""
    path = tmp_path / "set.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TrainingError, match="objects"):
        read_settings(path)


def test_more_text_is_refused_before_it_is_made_where_training_has_begun(tmp_path: Path) -> None:
    """Otherwise hours of text would be made for nothing, and the first command would not go on any more."""

    def stage(num_samples: int) -> TextStage:
        data = dataclasses.replace(SETTINGS, opened_fraction=0.0, num_samples=num_samples)
        return TextStage(llm(), TrainingPlan(out=tmp_path, data=data), World())

    stage(6).make()
    few = stage(6).read()
    (tmp_path / "training.pt").write_bytes(b"whatever")
    before = (tmp_path / "samples.jsonl").read_bytes()
    with pytest.raises(TrainingError, match="has begun"):
        stage(9).make()
    assert (tmp_path / "samples.jsonl").read_bytes() == before
    stage(6).make()  # nothing to do
    (tmp_path / "training.pt").unlink()
    stage(9).make()
    assert len(stage(9).read().samples) > len(few.samples)
    assert stage(6).read() == few  # what lies beyond a plan's number is not part of its text


@pytest.mark.parametrize("kind", ["dspark", "conv"])
def test_a_model_that_lies_where_the_result_goes_is_not_overwritten(tmp_path: Path, kind: str) -> None:
    """The target's own folder, or a drafter from elsewhere; one that this folder's training made may be made again."""
    tiny_model().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    plan = TrainingPlan(out=tmp_path, kind=kind, data=SETTINGS)
    with pytest.raises(TrainingError, match="would be overwritten"):
        TrainingRun(llm(), plan).run()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "named"), [({"hidden_size": 64}, "hidden_size"), ({"vocab_size": 300}, "vocab_size")]
)
def test_sizes_of_the_target_cannot_be_chosen(changes: dict[str, Any], named: str) -> None:
    """A drafter shares the target's embedding and head."""
    adapter = TargetAdapter(llm().model)
    with pytest.raises(InvalidSettingError, match=named):
        design(adapter, **changes)
    same = {name: getattr(design(adapter), name) for name in changes}
    assert design(adapter, **same) == design(adapter)


@pytest.mark.parametrize("name", ["qk_norm", "confidence", "confidence_with_markov"])
def test_switches_of_a_drafter_are_switches(name: str) -> None:
    """A text is true, whatever it says."""
    with pytest.raises(InvalidSettingError, match=name):
        design(TargetAdapter(llm().model), **{name: "no"})


def test_a_drafter_may_normalise_where_its_target_does_not() -> None:
    """Other projects' layout wants it: copies of the target's layers get norms that start at one."""
    adapter = TargetAdapter(llm().model)
    config = design(adapter, qk_norm=True, num_layers=1)
    model = new_drafter(config, (), adapter, seed=0)
    start_from_target(model, adapter, target_layers_to_copy(config, adapter))
    norm: Any = model.layers[0].self_attn.q_norm
    assert set(norm.weight.tolist()) == {1.0}


@pytest.mark.parametrize("prompt", [5, None, ["x"], "", "  "])
def test_prompts_are_texts(tmp_path: Path, prompt: Any) -> None:
    """The template would take anything, and the target answer it."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "why"}) + "\n" + json.dumps({"prompt": prompt}), encoding="utf-8")
    stage = TextStage(llm(), TrainingPlan(out=tmp_path / "out", data=SETTINGS, prompts=path), World())
    with pytest.raises(TrainingError, match="line 2"):
        stage.make()


@pytest.mark.parametrize("option", [("--prompts", "p.jsonl"), ("--samples", "5")])
def test_how_to_make_text_says_nothing_beside_text(tmp_path: Path, option: tuple[str, str]) -> None:
    """What would be ignored is refused."""
    arguments = ["train", "--target", "no-model", "--out", str(tmp_path / "o"), "--text", str(tmp_path), *option]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "no text is made" in " ".join(result.output.split())


def test_blocks_longer_than_any_answer_still_have_a_length() -> None:
    """A round emits a token at least; with no whole block to measure on, the slots say the rest."""
    model = fresh_model(block_size=60)
    measured = Trainer(
        adapter(), model, texts(12, 20), LiveFeatures(adapter(), model.config.target_layer_ids, texts(12, 20)),
        dataclasses.replace(TRAINING, held_out=0.5), Path("unused"), World(),
    ).measure()  # fmt: skip
    assert measured.sampled_length > 1.0
    assert measured.greedy_length >= 1.0


# ---------------------------------------------------------------------------------------------------- requests and chat


class Refusing(ChatTokenizer):
    """Its template wants no system message, as some do."""

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **settings: Any) -> Any:
        """One turn, or an error."""
        if messages[0]["role"] == "system":
            raise TemplateError("System role not supported")
        return super().apply_chat_template(messages, tokenize=tokenize, **settings)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "system", "content": "be brief"}], "System role not supported"),
        ([{"role": "user"}], "no 'content'"),
        ([{"role": "user", "content": None}], "no 'content'"),
    ],
)
def test_chats_that_the_template_cannot_take_are_prompt_errors(messages: Any, told: str) -> None:
    """With the template's own words; nothing was started."""
    model = LLM(target(), tokenizer=Refusing(), speculation=None, check_model=False)
    with pytest.raises(PromptError, match=told):
        model.chat(messages)


@pytest.mark.parametrize("params", [{"max_tokens": 1}, 5, "greedy", [SamplingParams(), 3]])
def test_params_are_params(params: Any) -> None:
    """One prompt or several, streamed or not."""
    for ask in (llm().stream, llm().generate):
        with pytest.raises(InvalidSettingError, match="params"):
            ask("Why?", params)


@pytest.mark.parametrize("name", ["none", "ngram+none"])
def test_none_is_no_drafter(name: str) -> None:
    """No hub is asked for it; the error says how to decode plainly."""
    with pytest.raises(DrafterError, match="speculation=None"):
        LLM(tiny_model(), speculation=Speculation(drafter=name), check_model=False)


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_a_drafter_written_again_is_the_same_drafter(tmp_path: Path) -> None:
    """When and how it was trained, and the state that training goes on from, are not what a calibration depends on."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    config = {"format": "specflow-dspark", "config": {"block_size": 7}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "trained": {"date": "Monday"}}), encoding="utf-8")
    (tmp_path / "training.pt").write_bytes(b"step 100")
    before = fingerprint(tmp_path)
    (tmp_path / "training.pt").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "trained": {"date": "Tuesday"}}, indent=1), "utf-8")
    assert fingerprint(tmp_path) == before
    (tmp_path / "pytorch_model.bin").write_bytes(b"a copy")
    assert fingerprint(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"WEIGHTS")
    changed = fingerprint(tmp_path)
    config["config"] = {"block_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert len({before, changed, fingerprint(tmp_path)}) == 3


# ------------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["evaluate", "--target", "no-model", "--out", "{file}/x"], "cannot be written"),
        (["profile", "{file}/x.json", "--model", "no-model"], "cannot be written"),
        (["profile", "{folder}", "--model", "no-model"], "it is a folder"),
        (["simulate", "--record", "none", "--costs", "none", "--plot", "{file}/x.png"], "cannot be written"),
        (["simulate", "--record", "none", "--costs", "none", "--plot", "{folder}/x.foo"], "a suffix among"),
    ],
)
def test_where_results_go_is_made_sure_of_first(tmp_path: Path, arguments: Sequence[str], named: str) -> None:
    """Before models and records, which are not even there, are asked for."""
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    places = {"file": str(file), "folder": str(tmp_path)}
    result = CliRunner().invoke(app, [word.format(**places) for word in arguments])
    assert result.exit_code == 2
    assert named in " ".join(result.output.split())


def test_a_share_of_requests_is_a_share() -> None:
    """Refused by the command line, not after decoding."""
    result = CliRunner().invoke(app, ["calibrate", "--drafter", "nowhere", "--fraction", "7"])
    assert result.exit_code == 2
    assert "fraction" in result.output
