"""``make bench-peers``: kvkeep beside Mooncake's shared-memory client and a Redis over a unix
socket, in one run.

For each block size every store starts fresh in its own process, and the rounds interleave: each
round asks every store in turn (another one first each time) for the same batches. A round's figure
is the bytes of a batch over the median time of its batches; the ratio is the median over the rounds
of kvkeep's figure over Mooncake's in the same round, so that a slow phase of the machine hits both.
Puts compare what Commit does with what batch_put_from does: both find their source filled, in
shared memory.

Exit status 1 when a bound is missed, a row is missing (a store that failed), or a byte was wrong.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
KIB, MIB = 1 << 10, 1 << 20
REPLY_S = 120.0

# kvkeep's GB/s over Mooncake's, at least.
BOUNDS = {
    ("get", 57 * KIB): 2.0,
    ("get", 2 * MIB): 1.0,
    ("put", 57 * KIB): 0.9,
    ("put", 2 * MIB): 0.8,
}
PEERS = ("kvkeep", "mooncake", "redis")
REFERENCE = "mooncake"


@dataclass(frozen=True)
class Scale:
    working_set_nbytes: int
    source_nbytes: int
    put_rounds: int
    get_rounds: int
    batch_blocks: int = 64

    def batches(self, block_nbytes: int) -> int:
        """A multiple of the put rounds, at least one batch a round."""
        wanted = self.working_set_nbytes // (block_nbytes * self.batch_blocks)
        return max(1, wanted // self.put_rounds) * self.put_rounds


FULL = Scale(2048 * MIB, 256 * MIB, put_rounds=8, get_rounds=12)
QUICK = Scale(192 * MIB, 64 * MIB, put_rounds=2, get_rounds=3)


@dataclass
class Series:
    """Seconds of each batch, a list a round."""

    rounds: list[list[float]] = field(default_factory=list)

    def gbps(self, batch_nbytes: int) -> list[float]:
        return [batch_nbytes / statistics.median(seconds) / 1e9 for seconds in self.rounds]

    def p99_ms(self) -> float:
        seconds = sorted(s for one in self.rounds for s in one)
        return seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))] * 1e3


@dataclass(frozen=True)
class Row:
    """One line of the table; ``ratio`` is over the reference's row of the same kind and size."""

    peer: str
    operation: str
    block_nbytes: int
    gbps: float
    p99_ms: float
    ratio: float | None
    bound: float | None

    @property
    def holds(self) -> bool:
        return self.bound is None or (self.ratio is not None and self.ratio >= self.bound)


class PeerFailedError(Exception):
    """A store's process failed; the message says how."""


class PeerProcess:
    """The process of one store: start, ask, stop."""

    def __init__(self, name: str, block_nbytes: int, scale: Scale, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self._mine, theirs = socket.socketpair()
        self._mine.settimeout(REPLY_S)
        arguments = {
            "fd": theirs.fileno(),
            "block-nbytes": block_nbytes,
            "batch-blocks": scale.batch_blocks,
            "batches": scale.batches(block_nbytes),
            "source-nbytes": scale.source_nbytes,
            "directory": directory,
        }
        command = [str(_python(name)), str(HERE / f"{name}_peer.py")]
        command += [f"--{key}={value}" for key, value in arguments.items()]
        with theirs, (directory / "peer.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(name),
            )
        self._stream = self._mine.makefile("rw", encoding="ascii")

    def receive(self) -> dict[str, Any]:
        try:
            line = self._stream.readline()
        except TimeoutError:
            line = ""
        answer = (
            json.loads(line) if line else {"error": f"no answer within {REPLY_S:.0f} s or exited"}
        )
        if "error" in answer:
            raise PeerFailedError(f"{self.name}: {answer['error']}\n{self._log_tail()}")
        return answer

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        try:
            self._stream.write(json.dumps({"do": operation, **arguments}) + "\n")
            self._stream.flush()
        except OSError as error:
            raise PeerFailedError(f"{self.name}: {error}\n{self._log_tail()}") from error
        return self.receive()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
        self._mine.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(10)

    def _log_tail(self) -> str:
        logs = sorted(self.directory.glob("*.log"))
        tails = (path.read_text(errors="replace")[-600:] for path in logs)
        return "\n".join(
            f"--- {path.name}\n{tail}" for path, tail in zip(logs, tails, strict=True) if tail
        )


def _python(name: str) -> Path:
    return (
        Path(sys.executable) if name == "kvkeep" else ROOT / ".venv-peers" / name / "bin" / "python"
    )


def _environment(name: str) -> dict[str, str]:
    """Mooncake needs libraries that ``run.sh`` may have unpacked; nobody else shall see those."""
    libraries = os.environ.get("MOONCAKE_LIBRARIES", "") if name == "mooncake" else ""
    return {**os.environ, **({"LD_LIBRARY_PATH": libraries} if libraries else {})}


@contextlib.contextmanager
def running(
    peers: tuple[str, ...], block_nbytes: int, scale: Scale
) -> Iterator[dict[str, PeerProcess]]:
    """The stores' processes, open and warm; one that fails to start is reported and left out."""
    directory = Path(tempfile.mkdtemp(prefix="kvkeep-bench-"))
    processes: dict[str, PeerProcess] = {}
    try:
        for name in peers:
            (directory / name).mkdir()
            processes[name] = PeerProcess(name, block_nbytes, scale, directory / name)
            with _reported(processes, name):
                processes[name].receive()
                processes[name].ask("warm")
        yield processes
    finally:
        for process in processes.values():
            process.close()
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _reported(processes: dict[str, PeerProcess], name: str) -> Iterator[None]:
    """A failing store loses its rows; the others go on."""
    try:
        yield
    except PeerFailedError as error:
        print(f"FAILED {error}", file=sys.stderr)
        processes.pop(name).close()


def measure(
    processes: dict[str, PeerProcess], batches: int, scale: Scale
) -> dict[tuple[str, str], Series]:
    """{(peer, operation): Series} of one block size; a store with a wrong byte loses its rows."""
    series: dict[tuple[str, str], Series] = {}
    a_round = batches // scale.put_rounds
    for number in range(scale.put_rounds):
        ids = list(range(number * a_round, (number + 1) * a_round))
        _round(processes, series, "put", ids, number, scale)
    chosen = random.Random(5)
    for number in range(scale.get_rounds):
        ids = chosen.sample(range(batches), min(a_round * 2, batches))
        _round(processes, series, "get", ids, number, scale)
    for name in list(processes):
        with _reported(processes, name):
            for batch in {0, batches // 2, batches - 1}:
                answer = processes[name].ask("verify", batch=batch)
                if answer != {"found": scale.batch_blocks, "wrong": 0}:
                    raise PeerFailedError(f"{name}: batch {batch} came back as {answer}")
    return {key: value for key, value in series.items() if key[0] in processes}


def _round(
    processes: dict[str, PeerProcess],
    series: dict[tuple[str, str], Series],
    operation: str,
    ids: list[int],
    number: int,
    scale: Scale,
) -> None:
    names = list(processes)
    turn = number % max(1, len(names))
    for name in names[turn:] + names[:turn]:
        with _reported(processes, name):
            answer = processes[name].ask(operation, batches=ids)
            expected = len(ids) * scale.batch_blocks
            if answer["blocks"] != expected:
                raise PeerFailedError(
                    f"{name}: {operation} did {answer['blocks']} of {expected} blocks"
                )
            series.setdefault((name, operation), Series()).rounds.append(answer["seconds"])


def rows_of(
    series: dict[tuple[str, str], Series], block_nbytes: int, batch_nbytes: int
) -> list[Row]:
    rows = []
    for (peer, operation), measured in sorted(
        series.items(), key=lambda item: (item[0][1], item[0][0])
    ):
        gbps = measured.gbps(batch_nbytes)
        reference = series.get((REFERENCE, operation))
        ratio = None
        if reference is not None:
            pairs = zip(gbps, reference.gbps(batch_nbytes), strict=False)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        bound = BOUNDS.get((operation, block_nbytes)) if peer == "kvkeep" else None
        rows.append(
            Row(
                peer,
                operation,
                block_nbytes,
                statistics.median(gbps),
                measured.p99_ms(),
                ratio,
                bound,
            )
        )
    return rows


def verdict(rows: list[Row]) -> list[str]:
    """One sentence a failure; empty = everything holds."""
    there = {(row.peer, row.operation, row.block_nbytes) for row in rows}
    missing = [
        f"missing: {peer} {operation} {_size(nbytes)}"
        for operation, nbytes in BOUNDS
        for peer in PEERS
        if (peer, operation, nbytes) not in there
    ]
    missed = [
        f"missed: {row.operation} {_size(row.block_nbytes)} is {row.ratio or 0:.2f} x {REFERENCE},"
        f" >= {row.bound} wanted"
        for row in rows
        if not row.holds
    ]
    return missing + missed


def table(rows: list[Row]) -> str:
    lines = [
        f"{'':4} {'block':>8}  {'store':<9} {'GB/s':>7} {'p99 ms':>9} {'x ' + REFERENCE:>11}  bound"
    ]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        bound = (
            "" if row.bound is None else f">= {row.bound:<4} {'holds' if row.holds else 'MISSED'}"
        )
        lines.append(
            f"{row.operation:4} {_size(row.block_nbytes):>8}  {row.peer:<9} {row.gbps:7.2f}"
            f" {row.p99_ms:9.2f} {ratio:>11}  {bound}".rstrip()
        )
    return "\n".join(lines)


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB}MiB" if nbytes % MIB == 0 else f"{nbytes // KIB}KiB"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does everything work?")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    rows: list[Row] = []
    for nbytes in sorted({size for _, size in BOUNDS}):
        print(f"{_size(nbytes)}: starting {arguments.peers}", file=sys.stderr)
        with running(tuple(arguments.peers.split(",")), nbytes, scale) as processes:
            series = measure(processes, scale.batches(nbytes), scale)
        rows += rows_of(series, nbytes, nbytes * scale.batch_blocks)
    failures = verdict(rows)
    settings = {**dataclasses.asdict(scale), "cpus": os.cpu_count(), "load1": os.getloadavg()[0]}
    if arguments.json:
        print(json.dumps({"settings": settings, "rows": [dataclasses.asdict(row) for row in rows]}))
    else:
        print(settings)
        print(table(rows))
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
