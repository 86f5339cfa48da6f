"""Recorded rounds: written and read back equal, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specflow.errors import InvalidSettingError
from specflow_llm.errors import DataFileError
from specflow_llm.records import FORMAT, RecordHeader, Recording, RoundRecord, read_rounds, write_rounds

UNTIMED = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""
HEADER = RecordHeader(drafter="dspark", temperature=0.5, max_draft=4, provenance={"model": "tiny", "threads": 2})


@st.composite
def round_records(draw: st.DrawFn) -> RoundRecord:
    """Any legal round of up to four drafted tokens."""
    survival = sorted(draw(st.lists(st.floats(0.0, 1.0), max_size=4)), reverse=True)
    accepted = draw(st.integers(0, len(survival)))
    return RoundRecord(
        request=draw(st.integers(0, 5)),
        category=draw(st.text(max_size=5)),
        position=draw(st.integers(0, 10**6)),
        survival=tuple(survival),
        accepted=accepted,
        emitted=draw(st.integers(0, accepted + 1)),
    )


@st.composite
def branching_records(draw: st.DrawFn) -> RoundRecord:
    """Any legal round of a draft that branches."""
    survival = sorted(draw(st.lists(st.floats(0.0, 1.0), max_size=4)), reverse=True)
    parents = [draw(st.integers(-1, item - 1)) for item in range(len(survival))]
    path: list[int] = []
    while options := [item for item, parent in enumerate(parents) if parent == (path[-1] if path else -1)]:
        if draw(st.booleans()):
            break
        path.append(draw(st.sampled_from(options)))
    return RoundRecord(
        request=0,
        category="t",
        position=draw(st.integers(0, 99)),
        survival=tuple(survival),
        accepted=len(path),
        emitted=draw(st.integers(0, len(path) + 1)),
        parents=tuple(parents),
        path=tuple(path),
    )


@UNTIMED
@given(st.lists(st.one_of(round_records(), branching_records()), max_size=8))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rounds: list[RoundRecord]) -> None:
    """Header and rounds come back equal, to the last digit of every estimate."""
    path = tmp_path_factory.mktemp("records") / "deep" / "rounds.jsonl"
    assert write_rounds(path, HEADER, iter(rounds)) == len(rounds)
    found = read_rounds(path)
    assert found == Recording(HEADER, tuple(rounds))
    assert found.branches is any(item.parents is not None for item in rounds)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def record(**changes: Any) -> RoundRecord:
    """A round with changes."""
    fields = {"request": 0, "category": "qa", "position": 9, "survival": (0.9, 0.5), "accepted": 1, "emitted": 2}
    return RoundRecord(**{**fields, **changes})


def test_rounds_are_grouped_by_request() -> None:
    """Rounds of several requests may alternate; each request's are in their order."""
    rounds = (record(request=3), record(request=1), record(request=3, position=11))
    grouped = Recording(HEADER, rounds).by_request()
    assert list(grouped) == [3, 1]
    assert grouped[3] == (rounds[0], rounds[2])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request", -1), ("position", 1.5), ("category", None), ("accepted", 3), ("accepted", -1), ("emitted", 3),
        ("emitted", True), ("survival", (0.5, 0.9)), ("survival", (1.2,)), ("survival", (float("nan"),)),
    ],
)  # fmt: skip
def test_impossible_rounds_are_refused(field: str, value: object) -> None:
    """Every field is checked; estimates must be probabilities that do not rise along a draft."""
    with pytest.raises(InvalidSettingError, match=field):
        record(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("drafter", ""), ("temperature", -1.0), ("temperature", float("nan")), ("max_draft", 0), ("provenance", None)],
)
def test_impossible_headers_are_refused(field: str, value: object) -> None:
    """Every field of the header is checked."""
    fields: dict[str, Any] = {"drafter": "d", "temperature": 0.0, "max_draft": 1, "provenance": {}, field: value}
    with pytest.raises(InvalidSettingError, match=field):
        RecordHeader(**fields)


def test_a_failed_recording_leaves_no_file(tmp_path: Path) -> None:
    """A round that does not fit the header, or a source that raises, leaves an older file as it was and nothing new."""
    path = tmp_path / "rounds.jsonl"
    write_rounds(path, HEADER, [record()])
    before = path.read_text(encoding="utf-8")
    with pytest.raises(InvalidSettingError, match="at most max_draft=4"):
        write_rounds(path, HEADER, [record(), record(survival=(0.5,) * 5)])
    assert path.read_text(encoding="utf-8") == before
    assert len(list(tmp_path.iterdir())) == 1


def test_of_a_draft_that_branches_the_accepted_path_counts() -> None:
    """What is kept of a prefix are the items of the path that are in it; of a chain, the first ones."""
    tree = record(survival=(0.6, 0.3, 0.2, 0.1), accepted=2, emitted=3, parents=(-1, -1, 1, 0), path=(1, 2))
    assert [tree.kept(length) for length in range(5)] == [(), (), (1,), (1, 2), (1, 2)]
    assert [record(accepted=1).kept(length) for length in range(3)] == [(), (0,), (0,)]


TREE = {"survival": [0.5, 0.4], "accepted": 1, "emitted": 2, "parents": [-1, -1], "path": [1]}
HEAD = {"format": FORMAT, "version": 1, "drafter": "d", "temperature": 0.0, "max_draft": 2, "provenance": {}}
LINE = {"request": 0, "category": "qa", "position": 9, "survival": [0.9], "accepted": 1, "emitted": 2}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "not the header"),
        ([{"format": "other"}], "not the header of recorded rounds"),
        ([{**HEAD, "version": 3}], "version 3"),
        ([HEAD, {**LINE, **TREE, "parents": [-1, 1]}], "line 2: parents"),
        ([HEAD, {**LINE, **TREE, "parents": [-1]}], "line 2: parents"),
        ([HEAD, {**LINE, **TREE, "path": []}], "line 2: path"),
        ([HEAD, {**LINE, **TREE, "parents": [-1, 0]}], "line 2: path"),
        ([HEAD, {**LINE, "path": [0]}], "line 2: path"),
        ([{key: HEAD[key] for key in HEAD if key != "drafter"}], "line 1 has no drafter"),
        ([HEAD, {key: LINE[key] for key in LINE if key != "accepted"}], "line 2 has no accepted"),
        ([HEAD, LINE, {**LINE, "accepted": 7}], "line 3: accepted=7"),
        ([HEAD, {**LINE, "survival": [0.9, 0.8, 0.7]}], "line 2: survival"),
        ([HEAD, {**LINE, "survival": None}], "line 2"),
        ([HEAD, [1, 2]], "line 2 is not a JSON object"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, lines: list[Any], message: str) -> None:
    """What is wrong is said with the file and the line."""
    path = tmp_path / "rounds.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(DataFileError, match=message):
        read_rounds(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a line that was cut off, and bytes that are no text are told apart."""
    with pytest.raises(DataFileError, match="cannot be read"):
        read_rounds(tmp_path / "missing.jsonl")
    cut = tmp_path / "cut.jsonl"
    cut.write_text(json.dumps(HEAD) + "\n" + json.dumps(LINE)[:20], encoding="utf-8")
    with pytest.raises(DataFileError, match="line 2 is not JSON"):
        read_rounds(cut)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataFileError, match="cannot be read"):
        read_rounds(binary)


def test_unknown_fields_and_empty_lines_are_ignored(tmp_path: Path) -> None:
    """A newer writer may add fields; the ones known here count."""
    path = tmp_path / "rounds.jsonl"
    text = "\n".join([json.dumps({**HEAD, "note": 1}), "", json.dumps({**LINE, "seconds": 0.1}), ""])
    path.write_text(text, encoding="utf-8")
    assert read_rounds(path).rounds == (record(survival=(0.9,)),)
