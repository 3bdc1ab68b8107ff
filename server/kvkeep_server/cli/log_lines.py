"""Log lines on standard error: an event's constant text and its fields, for people or as JSON."""

import datetime as dt
import json
import logging
import sys

# What every record has; the rest are the fields of the event, given with `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Names of errors of protobuf and of gRPC: see `_News`.
_TOLD = frozenset({"DecodeError", "ExecuteBatchError"})
_NO_TEXT = "calls came with metadata that is no text"
_SELDOM_S = 60.0


def log_to_stderr(*, level: str, form: str) -> None:
    """Sends every logger to standard error.

    Args:
        level: Name of the least level that is written.
        form: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_News())
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _News:
    """A filter of what gRPC logs with a traceback though a peer alone brings it about: whoever may
    connect could fill the log, and with what he sent.

    That a message was no protobuf its caller was told, and that a connection ended under an answer
    is the end of a client. Of metadata that is no text there is one line in a while.
    """

    def __init__(self) -> None:
        """Of one handler."""
        self._unsaid = 0
        self._again_s = 0.0

    def __call__(self, record: logging.LogRecord) -> bool:
        """Whether it is to be written."""
        kind = record.exc_info[0] if record.exc_info else None
        if kind is None or not record.name.startswith("grpc"):
            return True
        if kind is UnicodeDecodeError:
            return self._said_seldom(record)
        return kind.__name__ not in _TOLD

    def _said_seldom(self, record: logging.LogRecord) -> bool:
        self._unsaid += 1
        if record.created < self._again_s:
            return False
        record.msg, record.args, record.exc_info, record.exc_text = _NO_TEXT, (), None, None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.times = self._unsaid
        self._unsaid, self._again_s = 0, record.created + _SELDOM_S
        return True


class TextLines(logging.Formatter):
    """`2026-01-02T03:04:05.678Z INFO event key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback follows on lines of its own."""
        fields = "".join(f" {name}={_word(value)}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The fields of the event beside time, level, logger and event."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    moment = dt.datetime.fromtimestamp(record.created, tz=dt.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _word(value: object) -> str:
    """A field's value; in quotes and escaped unless it is one plain word."""
    text = str(value)
    return (
        text
        if text.isprintable() and text and " " not in text and '"' not in text
        else json.dumps(text)
    )
