"""The settings: one TOML file, or none, becomes one frozen tree that is checked once.

Only `cli` and `daemon` see this module; everything below gets plain values. A field here is the
whole truth about a key: its default, what is allowed, what it means; `kvkeep config reference`
prints it. Attributes carry their unit last (`ttl_s`, `size_nbytes`); in the file it is in the value
("30s", "2GiB").
"""

import dataclasses
import ipaddress
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep_server.config.clients import (
    LeaseSettings,
    LimitSettings,
    PinSettings,
    ServerSettings,
    SessionSettings,
)
from kvkeep_server.config.keys import PAGE_NBYTES, GiB, KiB, MiB
from kvkeep_server.config.operators import LogSettings, MetricsSettings
from kvkeep_server.config.remote import RemoteSettings
from kvkeep_server.config.tiers import IndexSettings, NvmeSettings, RamSettings
from kvkeep_server.core.errors import KVKeepError
from kvkeep_server.core.memory_limit import (
    INDEX_ROW_NBYTES,
    PROCESS_NBYTES,
    MemoryLimit,
    MemoryPlan,
    pool_nbytes_auto,
    staging_nbytes_auto,
)
from kvkeep_server.core.quantities import format_size, show_size, show_size_up, size_at_most
from kvkeep_server.core.settings_file import read_settings
from kvkeep_server.core.settings_kinds import (
    AUTO,
    Kind,
    Value,
    listen_address,
    nearest,
    shown,
)
from kvkeep_server.tiers.ram.slabs import auto_slab_nbytes

_PORT_MAX = 65535


class ConfigError(KVKeepError):
    """Settings that are refused.

    Attributes:
        problems: One sentence each: key, value, what is allowed, the fix.
    """

    def __init__(self, source: str, problems: tuple[str, ...]) -> None:
        """See the class; `source` names the file."""
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole tree; a table of the file each."""

    server: ServerSettings
    ram: RamSettings
    nvme: NvmeSettings
    index: IndexSettings
    sessions: SessionSettings
    leases: LeaseSettings
    pins: PinSettings
    limits: LimitSettings
    remote: RemoteSettings
    metrics: MetricsSettings
    log: LogSettings


TABLES: Mapping[str, type] = {field.name: field.type for field in dataclasses.fields(Settings)}  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the file."""

    table: str
    name: str
    attribute: str
    kind: Kind
    default: object
    meaning: str

    @property
    def path(self) -> str:
        """As it is named in messages: "ram.size"."""
        return f"{self.table}.{self.name}"


def _keys() -> Iterator[Key]:
    for table, settings_class in TABLES.items():
        for field in dataclasses.fields(settings_class):
            key, kind, default, meaning = field.metadata["facts"]
            yield Key(table, key, field.name, kind, default, meaning)


# Every key by path, in the order of the reference.
KEYS: Mapping[str, Key] = {key.path: key for key in _keys()}


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings; by key path where a value is from (file, default, auto); the limit for sums."""

    settings: Settings
    origins: Mapping[str, str]
    memory: MemoryLimit

    def value(self, path: str) -> Value:
        """The effective value of a key, in its Python form."""
        key = KEYS[path]
        found: Value = getattr(getattr(self.settings, key.table), key.attribute)
        return found


def load(path: Path | None, memory: MemoryLimit) -> Loaded:
    """Reads and checks a file; None is the embedded default.

    Raises:
        ConfigError: The file or values in it are refused; all problems at once.
    """
    if path is None:
        return parse("", "the embedded default", memory)
    try:
        text = read_settings(path)
    except ValueError as error:
        raise ConfigError(str(path), (str(error),)) from error
    return parse(text, str(path), memory)


def parse(text: str, source: str, memory: MemoryLimit) -> Loaded:
    """Checks the text of a file, called `source` in messages. Errors as in `load`."""
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        fix = 'strings need quotes, tables are [name], a key stands once: key = "value"'
        raise ConfigError(source, (f"not valid TOML: {error}; fix: {fix}",)) from error
    values, problems = _values(tree, memory)
    if problems:
        raise ConfigError(source, tuple(problems))
    given = _flat(tree)
    origins = {path: "file" if path in given else "default" for path in KEYS}
    origins |= {path: "auto" for path, value in values.items() if value is None}
    filled = _fill_auto(values, memory)
    said = {path: _said(given.get(path), value) for path, value in filled.items()}
    problems = list(_contradictions(filled, origins, said, memory))
    if problems:
        raise ConfigError(source, tuple(problems))
    tables = {
        table: settings_class(
            **{key.attribute: filled[key.path] for key in KEYS.values() if key.table == table}
        )
        for table, settings_class in TABLES.items()
    }
    return Loaded(Settings(**tables), origins, memory)


def _flat(tree: Mapping[str, Any]) -> dict[str, object]:
    return {
        f"{table}.{name}": raw
        for table, entries in tree.items()
        if isinstance(entries, dict)
        for name, raw in entries.items()
    }


def _said(raw: object, value: object) -> str:
    """A value for a message: as the file has it, and a share of memory with what it comes to."""
    if not isinstance(value, int):
        return shown(value)
    if isinstance(raw, str) and raw.endswith("%"):
        return f"{shown(raw)} ({format_size(value)})"
    return f'"{format_size(value)}"' if raw is None or raw == AUTO else shown(raw)


def _values(
    tree: Mapping[str, Any], memory: MemoryLimit
) -> tuple[dict[str, Value | None], list[str]]:
    """Every key's value (None: auto) and what is wrong with single values."""
    problems = [
        _unknown_table(name, entries)
        for name, entries in tree.items()
        if name not in TABLES or not isinstance(entries, dict)
    ]
    given = _flat({name: entries for name, entries in tree.items() if name in TABLES})
    problems += [_unknown_key(path) for path in given if path not in KEYS]
    values: dict[str, Value | None] = {}
    for path, key in KEYS.items():
        raw = given.get(path, key.default)
        try:
            values[path] = key.kind.parse(raw, memory.nbytes)
        except ValueError as error:
            problems.append(problem(path, shown(raw), key.kind.allowed, str(error)))
    return values, problems


def problem(path: str, value: str, allowed: str, fix: str) -> str:
    """A sentence of `ConfigError`."""
    return f"{path} is {value}; allowed: {allowed}; fix: {fix}"


def _unknown_table(name: str, entries: object) -> str:
    word = shown(name)[1:-1]
    if name in TABLES:
        fix = f"write [{name}] on a line, then its keys"
        return problem(word, shown(entries), f"a table [{name}]", fix)
    tables = ", ".join(f"[{table}]" for table in TABLES)
    if not isinstance(entries, dict):
        homes = [path for path in KEYS if path.endswith(f".{name}")]
        fix = f"move it to {' or '.join(homes)}" if homes else "put it into one of the tables"
        return f"{word} is a key outside of a table; allowed: {tables}; fix: {fix}"
    meant = nearest(name, list(TABLES))
    fix = f"did you mean [{meant}]?" if meant else "remove it"
    return f"[{word}] is not a table of this file; allowed: {tables}; fix: {fix}"


def _unknown_key(path: str) -> str:
    table, _, name = path.partition(".")
    names = [key.name for key in KEYS.values() if key.table == table]
    meant = nearest(name, names)
    homes = [key.path for key in KEYS.values() if key.name == name]
    guesses = [f"{table}.{meant}"] if meant else homes
    fix = f"did you mean {' or '.join(guesses)}?" if guesses else "remove it"
    word = shown(path)[1:-1]
    return f"{word} is not a key; allowed in [{table}]: {', '.join(names)}; fix: {fix}"


def _fill_auto(values: Mapping[str, Value | None], memory: MemoryLimit) -> dict[str, Any]:
    """Puts sizes in the place of "auto", each from those above it."""
    filled: dict[str, Any] = dict(values)

    def fill(path: str, nbytes: int) -> None:
        if filled[path] is None:
            filled[path] = max(PAGE_NBYTES, nbytes // PAGE_NBYTES * PAGE_NBYTES)

    fill("ram.size", pool_nbytes_auto(memory.nbytes))
    pool, block = filled["ram.size"], filled["limits.block_max"] or 0
    chunk = max(64 * MiB, min(1 * GiB, pool // 16), 2 * (filled["ram.slab"] or block))
    fill("ram.chunk", min(1 * GiB, chunk // (2 * MiB) * 2 * MiB))
    fill("ram.slab", min(filled["ram.chunk"], max(auto_slab_nbytes(pool), block + PAGE_NBYTES - 1)))
    fill("pins.max", pool // 4)
    fill("nvme.prefetch_max", min(1 * GiB, pool // 8))
    fill("nvme.queue", max(MiB, min(256 * MiB, pool // 8)))
    fill("limits.block_max", min(64 * MiB, filled["ram.slab"]))
    plan = MemoryPlan(pool, 0, filled["index.rows_initial"])
    fill("sessions.staging_total_max", staging_nbytes_auto(memory.nbytes, plan))
    fill("sessions.staging_max", min(1 * GiB, filled["sessions.staging_total_max"]))
    fill("sessions.staging", min(64 * MiB, filled["sessions.staging_max"]))
    fill("remote.staging_total_max", filled["sessions.staging_total_max"] // 2)
    return filled


def _contradictions(
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    said: Mapping[str, str],
    memory: MemoryLimit,
) -> Iterator[str]:
    """Values that are fine alone but not together."""
    at_most = (
        ("sessions.staging", "sessions.staging_max"),
        ("sessions.staging_max", "sessions.staging_total_max"),
        ("remote.staging_total_max", "sessions.staging_total_max"),
        ("ram.slab", "ram.chunk"),
        ("ram.slab", "ram.size"),
        ("limits.block_max", "ram.slab"),
    )
    for small, large in at_most:
        if values[small] > values[large] and origins[small] != "auto":
            bound = format_size(values[large])
            yield problem(
                small,
                said[small],
                f'at most {large}, which is "{bound}" ({origins[large]})',
                f'set {small} to "{bound}" or less, or {large} to more',
            )
    # A full request is all keys at their longest, with room for the other fields.
    request_nbytes = values["limits.keys_max"] * 64 + 4 * KiB
    if request_nbytes > values["limits.message_max"]:
        yield problem(
            "limits.keys_max",
            str(values["limits.keys_max"]),
            "what fits into limits.message_max"
            f' ("{format_size(values["limits.message_max"])}") at 64 bytes a key',
            f'set limits.message_max to "{format_size(request_nbytes)}" or more',
        )
    yield from _plain_text(values)
    yield from _one_port(values)
    yield from _memory_sum(values, origins, said, memory)


def _plain_text(values: Mapping[str, Any]) -> Iterator[str]:
    listen = values["remote.listen"]
    if not listen or values["remote.insecure_beyond_loopback"]:
        return
    host, port = listen_address(listen)
    if not ipaddress.ip_address(host).is_loopback:
        yield problem(
            "remote.listen",
            f'"{listen}"',
            "an address of the loopback, since there is no encryption and no authentication yet",
            f'listen on "127.0.0.1:{port}" behind a tunnel, or set'
            " remote.insecure_beyond_loopback to true where all who reach it are trusted",
        )


def _one_port(values: Mapping[str, Any]) -> Iterator[str]:
    """Two that listen on one port; with 0 the kernel gives each its own."""
    taken, listen = values["metrics.listen"], values["remote.listen"]
    if not taken or not listen:
        return
    (one, port), (other, same) = listen_address(taken), listen_address(listen)
    hosts = {ipaddress.ip_address(one), ipaddress.ip_address(other)}
    if port == same != 0 and (len(hosts) == 1 or any(host.is_unspecified for host in hosts)):
        free = port + 1 if port < _PORT_MAX else port - 1
        yield problem(
            "remote.listen",
            f'"{listen}"',
            f'another port than that of metrics.listen, "{taken}"',
            f'set remote.listen to "{listen.rpartition(":")[0]}:{free}"',
        )


def memory_plan(settings: Settings) -> MemoryPlan:
    """What a daemon with these settings will use at most."""
    return MemoryPlan(
        settings.ram.size_nbytes,
        settings.sessions.staging_total_nbytes_max,
        settings.index.rows_initial,
    )


def _memory_sum(
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    said: Mapping[str, str],
    memory: MemoryLimit,
) -> Iterator[str]:
    parts = {path: values[path] for path in ("ram.size", "sessions.staging_total_max")}
    pool, staging = parts.values()
    plan = MemoryPlan(pool, staging, values["index.rows_initial"])
    if plan.nbytes <= memory.nbytes:
        return
    rows, chosen = values["index.rows_initial"], [p for p in parts if origins[p] == "file"]
    index = rows * INDEX_ROW_NBYTES
    if origins["index.rows_initial"] == "file" and index > max([parts[p] for p in chosen] + [0]):
        yield _too_many_rows(rows, parts, plan, memory)
        return
    # Name the part that somebody chose, the larger one if it is both.
    path = max(parts, key=lambda part: (origins[part] == "file", parts[part]))
    other = next(part for part in parts if part != path)
    room = memory.nbytes - plan.nbytes + parts[path]
    yield problem(
        path,
        said[path],
        f"what with {other} ({format_size(parts[other])}), index and process"
        f" ({show_size(plan.rest_nbytes)}) stays within {show_size(memory.nbytes)}, the"
        f" {memory.source}; free now: {show_size(memory.free_nbytes)}",
        f'set {path} to "{size_at_most(room, PAGE_NBYTES)}" or less'
        if room >= 4 * MiB
        else f"raise that limit to {show_size_up(plan.nbytes + MiB)}, or lower both",
    )


def _too_many_rows(
    rows: int, parts: Mapping[str, int], plan: MemoryPlan, memory: MemoryLimit
) -> str:
    others = ", ".join(f"{path} ({format_size(nbytes)})" for path, nbytes in parts.items())
    fitting = (memory.nbytes - plan.nbytes) // INDEX_ROW_NBYTES + rows
    return problem(
        "index.rows_initial",
        str(rows),
        f"what with {others} and process ({show_size(PROCESS_NBYTES)}) stays within"
        f" {show_size(memory.nbytes)}, the {memory.source}; free now:"
        f" {show_size(memory.free_nbytes)}",
        f"set it to {fitting} or less" if fitting >= KiB else "lower these too",
    )
