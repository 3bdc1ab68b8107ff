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
