"""Reads Mooncake's traces: a JSON object a line, read one by one.

    timestamp      arrival in milliseconds, ascending
    input_length   tokens of the prompt
    output_length  tokens that were produced
    hash_ids       ids of the prompt's blocks of 512 tokens, first to last: one for each begun 512

Equal ids mean equal blocks behind equal prefixes. Files are untrusted, and of any size: all is
checked, and no more than a line is held. Blank lines are passed.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from kvkeep_server.sim.trace import TRACE_BLOCK_TOKENS, TraceError, TraceRequest

LINE_NBYTES_MAX = 16 << 20
_ID_MAX = (1 << 64) - 1
# 2^32 seconds of milliseconds.
_NUMBER_MAX = (1 << 32) * 1000 - 1
_FIX = "give one JSON object a line, as kvkeep_server/sim/mooncake.py describes"


def read_mooncake(path: Path) -> Iterator[TraceRequest]:
    """Yields the requests in order of arrival, each checked when it is read.

    Raises:
        TraceError: The file cannot be read, or a line is no such object.
    """
    before_s, number, any_request = 0.0, 0, False
    try:
        with path.open("rb") as file:
            while line := file.readline(LINE_NBYTES_MAX + 1):
                number += 1
                if line.isspace() and len(line) <= LINE_NBYTES_MAX:
                    continue
                any_request = True
                request = _request(f"{path}:{number}", line, before_s)
                before_s = request.arrival_s
                yield request
    except OSError as error:
        raise TraceError(f"{path}", error.strerror, "a readable file", _FIX) from error
    if not any_request:
        raise TraceError(f"{path}", "empty", "at least one request", _FIX)


def _request(where: str, line: bytes, before_s: float) -> TraceRequest:
    if len(line) > LINE_NBYTES_MAX:
        raise TraceError(where, "a longer line", f"at most {LINE_NBYTES_MAX} bytes", _FIX)
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(where, _text(line), f"a JSON object ({error})", _FIX) from error
    if not isinstance(fields, dict):
        raise TraceError(where, _text(line), "a JSON object", _FIX)
    arrival_s = _number(where, fields, "timestamp", (int, float)) / 1000
    if arrival_s < before_s:
        allowed = f"at least {before_s * 1000:g}, that of the line before"
        raise TraceError(f"{where}: timestamp", fields["timestamp"], allowed, "sort the trace")
    tokens = int(_number(where, fields, "input_length", (int,)))
    return TraceRequest(
        arrival_s=arrival_s,
        blocks=_ids(where, fields.get("hash_ids", "missing"), -(-tokens // TRACE_BLOCK_TOKENS)),
        hint=0,
        output_tokens=int(_number(where, fields, "output_length", (int,))),
        session=-1,
        input_tokens=tokens,
    )


def _text(line: bytes) -> str:
    """Its beginning, as it stands in the file."""
    return line[:60].decode(errors="replace").rstrip("\n")


def _number(
    where: str, fields: dict[str, object], name: str, kinds: tuple[type, ...]
) -> int | float:
    value = fields.get(name, "missing")
    # JSON knows neither nan nor inf, but Python's reader does.
    if isinstance(value, kinds) and not isinstance(value, bool):
        assert isinstance(value, int | float)
        if 0 <= value <= _NUMBER_MAX:
            return value
    kind = "a whole number" if kinds == (int,) else "a number"
    allowed = f"{kind} from 0 to {_NUMBER_MAX}"
    raise TraceError(f"{where}: {name}", value, allowed, _FIX)


def _ids(where: str, value: object, count: int) -> list[int]:
    allowed = f"{count} whole numbers from 0 to {_ID_MAX}, one for each begun 512 tokens"
    if not isinstance(value, list) or len(value) != count:
        found = f"{len(value)} entries" if isinstance(value, list) else value
        raise TraceError(f"{where}: hash_ids", found, allowed, _FIX)
    if not all(type(one) is int and 0 <= one <= _ID_MAX for one in value):
        wrong = next(one for one in value if type(one) is not int or not 0 <= one <= _ID_MAX)
        raise TraceError(f"{where}: hash_ids", wrong, allowed, _FIX)
    return value
