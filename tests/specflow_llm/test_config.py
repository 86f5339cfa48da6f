"""Settings: each mistake is reported when the settings are built, by name, with what was expected."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest

from specflow.errors import DefinitionError, InvalidSettingError
from specflow.policies import Fixed
from specflow_llm import SamplingParams, Speculation
from specflow_llm.config import VERIFICATIONS

WRONG: list[tuple[str, Any, str]] = [
    *(("max_tokens", value, "an integer >= 1") for value in (0, -1, 1.5, True, None, "5")),
    *(("temperature", value, "a number >= 0") for value in (-0.1, math.nan, math.inf, None, "hot", True)),
    *(("top_k", value, "an integer >= 0") for value in (-1, 2.0, None)),
    *(("top_p", value, r"a number in (0, 1]") for value in (0, -0.5, 1.01, math.nan, None)),
    *(("min_p", value, "a number in [0, 1)") for value in (1, -0.1, None)),
    *(("repetition_penalty", value, "a number > 0") for value in (0, -1.0, None)),
    *(("frequency_penalty", value, "a number in [-2, 2]") for value in (2.1, -3)),
    *(("presence_penalty", value, "a number in [-2, 2]") for value in (2.1, None)),
    *(("logit_bias", value, "{token id: number}") for value in ({-1: 1.0}, {"a": 1.0}, {3: "x"}, {3: math.inf})),
    ("logit_bias", [(3, 1.0)], "a mapping from token id to number"),
    *(("bad_words", value, "a sequence of words") for value in ("damn", 3, [""], [[]], [[-1]], [["a"]], [3], None)),
    *(("min_tokens", value, "an integer >= 0") for value in (-1, 1.0, None)),
    ("min_tokens", 129, "at most max_tokens (128)"),
    *(("seed", value, "None or an integer in [0, 2**63)") for value in (-1, 2**63, 1.0, "7", True)),
    *(("stop", value, "non-empty strings") for value in ("", ["a", ""], [1])),
    *(("stop", value, "a string or strings") for value in (5, None, b"x")),
    *(("include_stop_str", value, "True or False") for value in (1, "no", None)),
    *(("ignore_eos", value, "True or False") for value in (0, None)),
    *(("stop_token_ids", value, "token ids") for value in (5, [-1], ["</s>"], "</s>", None, [True])),
    *(("logprobs", value, "None or an integer in [0, 100]") for value in (-1, 101, True, 2.0)),
    *(("logits_processors", value, "a sequence of callables") for value in (print, [3], "f")),
    *(("stopping_criteria", value, "a sequence of callables") for value in (print, [3], None)),
    *(("max_time", value, "None or seconds > 0") for value in (0, -1, math.inf, "1s")),
    *(("skip_special_tokens", value, "True or False") for value in (1, None)),
    *(("speculate", value, "True or False") for value in (1, None)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "expected"), WRONG, ids=[f"{name}={value!r}" for name, value, _ in WRONG])
def test_a_wrong_setting_is_named_with_what_was_expected(name: str, value: Any, expected: str) -> None:
    """The error holds the field, the value and the expectation, and is a ``ValueError``."""
    with pytest.raises(InvalidSettingError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.setting == name
    assert expected in caught.value.expected
    assert str(caught.value).startswith(f"{name}=")
    assert isinstance(caught.value, DefinitionError)
    assert isinstance(caught.value, ValueError)


def test_every_field_is_checked() -> None:
    """No field of the settings is missing from the table of wrong values above."""
    assert {field.name for field in dataclasses.fields(SamplingParams)} == {name for name, _, _ in WRONG}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *(("max_draft_tokens", value, "an integer in [0, 256]") for value in (-1, 257, 2.0, True)),
        *(
            ("policy", value, "'adaptive', 'fixed', 'cost_scheduled', 'pid' or a Policy object")
            for value in ("fast", None, 3, Fixed)
        ),
        *(("verification", value, "one of") for value in ("exact", None)),
    ],
)
def test_a_wrong_speculation_setting_is_named(name: str, value: Any, expected: str) -> None:
    """The same for how to draft; a policy class is not a policy."""
    with pytest.raises(InvalidSettingError) as caught:
        Speculation(**{name: value})
    assert caught.value.setting == name
    assert expected in caught.value.expected


def test_legal_edges_are_accepted() -> None:
    """The ends of every range work."""
    SamplingParams(
        max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=0.01, frequency_penalty=-2,
        presence_penalty=2, logit_bias={0: -100}, bad_words=["x", [1, 2], (3,)], min_tokens=1, seed=2**63 - 1,
        stop=["a"], stop_token_ids=[0], logprobs=100, max_time=0.001,
    )  # fmt: skip
    for rule in VERIFICATIONS:
        Speculation(max_draft_tokens=0, verification=rule, policy=Fixed(3))
    Speculation(max_draft_tokens=256, drafter=None, policy="fixed")


def test_one_pass_iterables_are_kept_whole() -> None:
    """Sequences given as generators are not used up by the validation, which would switch the setting off silently."""
    params = SamplingParams(
        stop=(text for text in ("a", "b")),
        stop_token_ids=(token for token in (1, 2)),
        bad_words=(word for word in ("x", [3])),
        logits_processors=(item for item in (print,)),
        stopping_criteria=iter([len]),
    )
    assert (params.stop, params.stop_strings) == (("a", "b"), ("a", "b"))
    assert params.stop_token_ids == (1, 2)
    assert params.bad_words == ("x", (3,))
    assert (params.logits_processors, params.stopping_criteria) == ((print,), (len,))


def test_later_changes_of_the_given_objects_do_no_harm() -> None:
    """Settings hold their own copies of what they were given."""
    stop, bias, ends = ["a"], {1: 2.0}, [4]
    params = SamplingParams(stop=stop, logit_bias=bias, stop_token_ids=ends)
    stop.append("")
    bias[-5] = math.nan
    ends.append(-1)
    assert (params.stop, dict(params.logit_bias), params.stop_token_ids) == (("a",), {1: 2.0}, (4,))


def test_settings_cannot_be_changed() -> None:
    """Settings are frozen; a changed copy is made with ``dataclasses.replace`` and validated again."""
    params = SamplingParams(stop="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 3  # type: ignore[misc]
    assert dataclasses.replace(params, max_tokens=3).stop == ("x",)
    with pytest.raises(InvalidSettingError):
        dataclasses.replace(params, max_tokens=0)


def test_settings_and_errors_travel_between_processes() -> None:
    """Both survive pickling."""
    params = SamplingParams(stop="x", logit_bias={1: 2.0}, bad_words=["y"])
    assert pickle.loads(pickle.dumps(params)) == params  # noqa: S301 - our own bytes
    with pytest.raises(InvalidSettingError) as caught:
        SamplingParams(top_p=2)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 - our own bytes


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-6, True), (9e-6, True), (1e-5, False), (0.1, False)]
)
def test_temperatures_near_zero_are_greedy(temperature: float, greedy: bool) -> None:  # noqa: FBT001
    """Below 1e-5 division would overflow before it mattered, so it counts as zero."""
    assert SamplingParams(temperature=temperature).is_greedy is greedy
