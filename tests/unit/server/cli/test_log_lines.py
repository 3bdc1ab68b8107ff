"""Log lines: the event's text, its fields, one line each."""

import json
import logging

import pytest

from kvkeep_server.cli.log_lines import JsonLines, TextLines, log_to_stderr


def record(text: str = "session ended", **fields: object) -> logging.LogRecord:
    made = logging.getLogger("kvkeep_server.service").makeRecord(
        "kvkeep_server.service", logging.INFO, "x.py", 1, text, (), None, extra=fields
    )
    made.created = 1767322800.25
    return made


def test_text():
    line = TextLines().format(record(session=7, reason="EOF on the socket", name_="a"))
    assert line == (
        '2026-01-02T03:00:00.250Z INFO session ended session=7 reason="EOF on the socket" name_=a'
    )


@pytest.mark.parametrize("value", ["a\nb", 'say "x"', "", "\x1b[31m"])
def test_text_of_a_client_cannot_break_the_line(value):
    line = TextLines().format(record(client_name=value))
    assert line.isprintable()
    assert json.loads(line.partition("client_name=")[2]) == value


def test_json():
    line = JsonLines().format(record(session=7, path=__file__))
    assert json.loads(line) == {
        "time": "2026-01-02T03:00:00.250Z",
        "level": "info",
        "logger": "kvkeep_server.service",
        "event": "session ended",
        "session": 7,
        "path": __file__,
    }


def test_traceback_is_kept():
    made = record()
    made.exc_info = (ValueError, ValueError("planted"), None)
    assert "ValueError: planted" in TextLines().format(made)
    assert "ValueError: planted" in json.loads(JsonLines().format(made))["traceback"]


def of_grpc(error, created=0.0):
    made = logging.getLogger("grpc._cython.cygrpc").makeRecord(
        "grpc._cython.cygrpc", logging.ERROR, "x", 1, "Invalid %s", ("\xff secret",), None
    )
    made.exc_info, made.created = (type(error), error, None), created
    return made


def written(caught, *records):
    """The lines of these records."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        log_to_stderr(level="info", form="text")
        for made in records:
            root.handle(made)
    finally:
        root.handlers[:], root.level = before, level
    return caught.readouterr().err.splitlines()


def test_what_a_peer_alone_can_bring_about_is_one_line_a_minute(capsys):
    no_text = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "planted")
    times = [0.0, 1.0, 59.0, 61.0, 62.0]
    lines = written(capsys, *(of_grpc(no_text, at) for at in times))
    assert [line.partition(" ")[2] for line in lines] == [
        "WARNING calls came with metadata that is no text times=1",
        "WARNING calls came with metadata that is no text times=3",
    ]


@pytest.mark.parametrize("name", ["DecodeError", "ExecuteBatchError"])
def test_what_its_caller_was_told_is_no_line(capsys, name):
    assert written(capsys, of_grpc(type(name, (Exception,), {})())) == []


def test_bugs_keep_their_tracebacks(capsys):
    ours = record()
    ours.exc_info = (UnicodeDecodeError, UnicodeDecodeError("utf-8", b"x", 0, 1, "planted"), None)
    lines = written(capsys, of_grpc(KeyError("planted")), ours)
    assert sum("planted" in line for line in lines) == 2


def test_level_and_form_take_effect(capsys):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        log_to_stderr(level="warning", form="json")
        logging.getLogger("kvkeep_server").info("quiet")
        logging.getLogger("kvkeep_server").warning("loud", extra={"n": 1})
    finally:
        root.handlers[:], root.level = before, level
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "loud"
