"""Each line that is logged in an update says of which update it is, on both sides; as JSON where that is asked for."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
import torch

from sglang_reshard.errors import EngineRefused
from sglang_reshard.observability.logs import FIELDS, JsonFormatter, configure, get_logger, log_context
from support.toy import ToyRank
from support.toy_serving import receiver_of
from support.toy_trainers import State
from support.world import run_world


class Kept(logging.Handler):
    """What this package logs in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        own = logging.getLogger("sglang_reshard")
        own.addHandler(self)
        own.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def told(self) -> list[dict[str, Any]]:
        return [{"message": r.getMessage(), **{f: getattr(r, f) for f in FIELDS}} for r in self.records]


def train(trainer: Any) -> tuple[str, list[dict[str, Any]]]:
    kept = Kept()
    sender = trainer.sender()
    state = State((1,), "tp", torch.float32)
    sender.update(state.given, weight_version="good")
    with pytest.raises(EngineRefused):
        sender.update(state.given, weight_version="bad")
    return sender.session.address.session, kept.told()


def broken(*_: Any) -> None:
    raise RuntimeError("a bug")


def serve(rank: int, size: int, requests: Any) -> list[dict[str, Any]]:
    kept = Kept()
    receiver = receiver_of(ToyRank(rank, size))
    for request in requests:
        if request.weight_version == "bad":
            receiver._executor._planner._plan = broken
        requests.answer(receiver.update(request))
    return kept.told()


def test_lines_of_both_sides_name_session_update_version_and_rank() -> None:
    ((session, told),), (engine,) = run_world(1, 1, train, serve)
    (line,) = told
    assert "to 1 engine rank with transport ipc" in line["message"]
    assert {field: line[field] for field in FIELDS} == {
        "session": session, "update": 1, "version": "good", "rank": "trainer rank 0",
    }  # fmt: skip
    assert engine, "the engine logs what it did not raise on purpose"
    for line in engine:
        assert {field: line[field] for field in FIELDS} == {
            "session": session, "update": 2, "version": "bad", "rank": "engine rank 0",
        }  # fmt: skip


def test_lines_outside_an_update_have_the_fields_too() -> None:
    kept = Kept()
    try:
        get_logger("sglang_reshard.somewhere").info("idle")
        with log_context(update=3):
            with log_context(rank="engine rank 1"):
                get_logger("sglang_reshard.somewhere").info("busy")
            get_logger("sglang_reshard.somewhere").info("later")
    finally:
        logging.getLogger("sglang_reshard").removeHandler(kept)
    assert [(line["update"], line["rank"]) for line in kept.told()] == [("", ""), (3, "engine rank 1"), (3, "")]


def test_a_json_line_has_what_is_known() -> None:
    record = logging.makeLogRecord(
        {"name": "sglang_reshard.x", "levelname": "ERROR", "msg": "a %s", "args": ("b",), "update": 7, "session": ""}
    )
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = JsonFormatter().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert told.pop("time").endswith("Z")
    assert told.pop("exception").endswith("ValueError: two\nlines")
    assert told == {"level": "ERROR", "logger": "sglang_reshard.x", "message": "a b", "update": 7}


def test_an_unknown_format_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RESHARD_LOG", "xml")
    with pytest.raises(ValueError, match=r"SGLANG_RESHARD_LOG='xml'"):
        configure()
