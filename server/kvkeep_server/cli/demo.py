"""`kvkeep demo`: a recorded hour of coding agents, a daemon that is killed halfway, every byte
checked."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path

import click
from rich.console import Console

import kvkeep
from kvkeep_server.cli.bench_daemon import DaemonProcess, Tables
from kvkeep_server.cli.demo_crash import Crash, crash
from kvkeep_server.cli.progress import Progress
from kvkeep_server.cli.replay_engine import Replay, replay_spec
from kvkeep_server.core.clock import SystemClock
from kvkeep_server.sim.trace import Trace, TraceRequest, read_trace

BLOCK_TOKENS = 128
BLOCK_NBYTES = BLOCK_TOKENS * 890  # the global KV of DeepSeek-V4.1-Flash: 890 bytes a token
# KV of sliding-window layers at the end of a prompt: 140 tokens of 528 bytes a layer, for 8 layers.
STATE_NBYTES = 140 * 528 * 8
# All blocks of the trace take 3.8 GB.
DISK = "5GiB"
SEGMENT = "64MiB"
CALL_S = 60.0  # a busy machine is slow, and that is not what the demo shows

INTRODUCTION = """\
Before a language model can answer, its engine computes keys and values (KV) for every token of the
prompt: the "prefill". Most prompts begin like an earlier one: a coding agent sends its whole
conversation again at each step. kvkeep keeps that KV outside the engine, in blocks named by a hash
of all tokens up to their end. The engine asks how much of a prompt is there, copies that, and
computes only the rest.
"""
SETTING = """\
Here: {requests} recorded requests of {sessions} coding agents ({minutes:.0f} minutes of traffic, \
replayed as fast as it goes)
against a daemon with {ram} of RAM and at most {disk} of disk. Blocks are as large as those of
DeepSeek-V4.1-Flash: {tokens} tokens, {nbytes:,} bytes. At the end of each prompt there is a state
as well ({state:,} bytes: the KV of sliding-window layers), which lives in RAM only, because an
engine can compute it again from a short replay. All bytes are generated from names, so each one
that is read back can be checked. For every request: look up, read and check what is stored,
"compute" and store the rest, and wait until that is on the disk. Halfway the daemon dies.
"""
KILLING = "\nHalf of it is done: SIGKILL to the daemon, process {pid}."
KILLED = """\
It was started again on the same directory. The client lived on, and attached again.
  What was in RAM died with the process. {died}
  {came_back:,} of {on_nvme:,} blocks that had been acknowledged as on disk came back.
  It served again after {serving_s:.1f} s, and had all of its index after {recovered_s:.1f} s.
"""
NOTHING_DIED = "Nothing was only there."
DIED = "{blocks:,} blocks were only there: the states, as was said."
OTHERS_DIED = "{blocks:,} blocks were only there, as their stores had been told, or states."
SUMMARY = """
Prefill saved   {hit_ratio:.1%} of all prompt tokens were found: {hit_tokens:,} of {asked_tokens:,}.
                At {rate:,} tokens a second an accelerator would need {spared} for them,
                and needs {rest} for the rest. (--prefill-rate sets this assumption.)
Speed           A look-up took {lookup_ms:.2f} ms and no call to the daemon. One thread read and
                checked {read_gbs:.1f} GB/s, and generated and stored on disk {store_gbs:.1f} GB/s.
RAM is finite   It held {in_ram} of {stored}. What left it stayed on disk: {from_nvme:,} of the
                blocks that were found came from there. (--ram sets the size.) A cache that never
                forgets would have found {unlimited:.1%}.
States          {states:,} prompts went on from a state that was found. For the others
                {replayed:,} of the tokens that were found come with a replay: no more than the
                last {window} of each have to be computed again. The kill took all states.
SIGKILL         {came_back:,} of {on_nvme:,} blocks came back, and {after_kill:,} times one was read
                from disk after it instead of computed.
"""
WRONG = "Wrong bytes were read. That must never be: please report it."
LOST = "Not all that had been acknowledged as on disk came back."
NOTHING_READ = (
    "Nothing was read from disk after the kill, so this did not show what it is for: the requests"
    " behind it had nothing in common with those before. Take more of them (--requests)."
)


@click.command()
@click.option(
    "--requests", type=click.IntRange(2), help="Stop after so many requests; none: replay all."
)
@click.option("--ram", default="1GiB", show_default=True, help="The daemon's ram.size.")
@click.option(
    "--directory",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default="/var/tmp",  # noqa: S108 - a directory of its own is made there
    show_default=True,
    help=f"Where the daemon's disk is, for a while: at most {DISK}.",
)
@click.option(
    "--prefill-rate",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Prompt tokens that an accelerator computes in a second, for the summary.",
)
def demo(requests: int | None, ram: str, directory: Path, prefill_rate: int) -> int:
    """Show what kvkeep is for: a real trace, a daemon that is killed, every byte checked.

    Exit code 1 when a byte was wrong, a block that had been acknowledged as on disk did not come
    back, or nothing came from there after the kill.
    """
    logging.getLogger("kvkeep").setLevel(logging.ERROR)  # that the session is lost, it says itself
    with as_file(files("kvkeep_server.cli") / "demo_data" / "coding_agents.npz") as path:
        trace = read_trace(path)
    count = min(requests or len(trace), len(trace))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(INTRODUCTION)
    console.print(
        SETTING.format(
            requests=count,
            sessions=len(set(trace.sessions[:count].tolist())),
            minutes=float(trace.arrival_s[count - 1]) / 60,
            ram=ram,
            disk=DISK,
            tokens=BLOCK_TOKENS,
            nbytes=BLOCK_NBYTES,
            state=STATE_NBYTES,
        )
    )
    with _daemon(ram, directory) as (daemon, client):
        course = Course(daemon, client, console)
        course.run(trace, count)
        summary, totals = course.summary(prefill_rate), course.totals
    console.print(summary)
    if course.shortfall:
        console.print(course.shortfall + "\n")
    console.print(f"{totals.verified} blocks verified, {totals.wrong} wrong")
    return 1 if course.shortfall else 0


@contextmanager
def _daemon(ram: str, disk: Path) -> Iterator[tuple[DaemonProcess, kvkeep.Client]]:
    """A daemon that lives as long as the context, and a client of it. What it leaves is removed."""
    with (
        tempfile.TemporaryDirectory(prefix="kvkeep-demo-") as sockets,
        tempfile.TemporaryDirectory(prefix="kvkeep-demo-", dir=disk.resolve()) as kept,
        DaemonProcess(Path(sockets), _tables(ram, kept)) as daemon,
        kvkeep.connect(sockets, client_name="kvkeep demo", timeout_s=CALL_S) as client,
    ):
        yield daemon, client


def _tables(ram: str, kept: str) -> Tables:
    return {
        "ram": {"size": ram},
        "nvme": {"directories": [kept], "max": DISK, "segment": SEGMENT},
        "sessions": {"staging_total_max": "128MiB"},  # one client: not more than 2 GiB in all
        "log": {"level": "warning"},
    }


@dataclass(slots=True)
class Unlimited:
    """What a cache that never evicts would have found.

    Attributes:
        asked: Blocks of the trace, of 512 tokens.
        found: Of them, those that came before: equal ids are equal whole prefixes.
    """

    seen: set[int] = field(default_factory=set)
    asked: int = 0
    found: int = 0

    def add(self, request: TraceRequest) -> None:
        """One more request."""
        self.asked += len(request.blocks)
        self.found += sum(block in self.seen for block in request.blocks)
        self.seen.update(request.blocks)


class Course:
    """The demo as it goes: requests, the kill, and what is to be said of both.

    Args:
        daemon: Runs.
        client: Of it.
        console: Where it is shown.

    Attributes:
        totals: Of all requests.
    """

    def __init__(self, daemon: DaemonProcess, client: kvkeep.Client, console: Console) -> None:
        """See the class."""
        self._daemon = daemon
        self._client = client
        self._console = console
        self._clock = SystemClock()
        hasher = kvkeep.chain_hash.KvkeepBlake2b(BLOCK_TOKENS)
        names = ("demo", "DeepSeek-V4.1-Flash")
        state = kvkeep.Group.state(
            "state", tokens_per_block=BLOCK_TOKENS, block_nbytes=STATE_NBYTES
        )
        spec = replay_spec(
            hasher=hasher, block_nbytes=BLOCK_NBYTES, ranks=1, names=names, states=[state]
        )
        self._replay = Replay(
            namespace=client.open_namespace(spec),
            ranks=1,
            hasher=hasher,
            clock=self._clock,
            check_one_in=1,
            ack="nvme",
        )
        self.totals = self._replay.totals
        self._unlimited = Unlimited()
        self._crash: Crash | None = None
        self._from_nvme_before = 0

    def run(self, trace: Trace, count: int) -> None:
        """Replays the first `count` requests, and kills the daemon after half of them.

        Raises:
            KVKeepError: The daemon does not start again.
        """
        with Progress(self._console, self._clock, count=count, rows=self._rows) as progress:
            for number, request in enumerate(islice(trace.requests(), count)):
                if number == count // 2:
                    self._kill()
                self._replay.run(request)
                self._unlimited.add(request)
                progress.update(self.totals.requests)

    def _kill(self) -> None:
        self._console.print(KILLING.format(pid=self._daemon.pid))
        self._from_nvme_before = self.totals.blocks_from_nvme
        cost = self._crash = crash(self._daemon, self._client, self._clock)
        died = DIED if cost.on_nvme >= self.totals.blocks_stored else OTHERS_DIED
        died = died.format(blocks=cost.in_ram_only) if cost.in_ram_only else NOTHING_DIED
        self._console.print(KILLED.format(died=died, **asdict(cost)))

    @property
    def _after_kill(self) -> int:
        """Blocks that came from nvme after the kill."""
        return self.totals.blocks_from_nvme - self._from_nvme_before if self._crash else 0

    @property
    def shortfall(self) -> str:
        """What was not as it should be: every byte right, and what was on disk outlives the daemon
        and is read again. A sentence, or nothing."""
        if self.totals.wrong:
            return WRONG
        if self._crash is None or self._crash.lost:
            return LOST
        return "" if self._after_kill > 0 else NOTHING_READ

    def _rows(self) -> list[tuple[str, str]]:
        totals, stats = self.totals, self._client.stats()
        return [
            ("hit ratio", f"{totals.hit_ratio:.1%}"),
            ("prefill tokens saved", f"{totals.tokens_saved:,}"),
            ("found in ram", _blocks(totals.blocks_hit - totals.blocks_from_nvme)),
            ("found on nvme", _blocks(totals.blocks_from_nvme)),
            ("of that after SIGKILL", _blocks(self._after_kill)),
            ("states found in ram", f"{totals.states_verified + totals.states_wrong:,}"),
            ("wrong", f"{totals.wrong} blocks"),
            ("stored", _blocks(totals.blocks_stored)),
            ("in ram now", _blocks(stats.pool.blocks)),
            ("on nvme now", _blocks(stats.nvme.blocks)),
        ]

    def summary(self, prefill_rate: int) -> str:
        """What came of it, when it is over."""
        totals, unlimited, died = self.totals, self._unlimited, self._crash
        asked_tokens = totals.blocks_asked * BLOCK_TOKENS
        seconds = {step: latencies.total_s for step, latencies in totals.latencies.items()}
        return SUMMARY.format(
            hit_tokens=totals.tokens_saved,
            asked_tokens=asked_tokens,
            hit_ratio=totals.hit_ratio,
            rate=prefill_rate,
            spared=_duration(totals.tokens_saved / prefill_rate),
            rest=_duration((asked_tokens - totals.tokens_saved) / prefill_rate),
            lookup_ms=1000 * seconds["lookup"] / max(1, totals.requests),
            read_gbs=_rate(totals.blocks_hit, seconds["acquire"] + seconds["read"]),
            store_gbs=_rate(totals.blocks_stored, seconds["store"]),
            in_ram=_gigabytes(self._client.stats().pool.blocks),
            stored=_gigabytes(totals.blocks_stored),
            from_nvme=totals.blocks_from_nvme,
            states=totals.states_verified,
            replayed=totals.tokens_replayed,
            window=BLOCK_TOKENS,
            unlimited=unlimited.found / max(1, unlimited.asked),
            after_kill=self._after_kill,
            on_nvme=died.on_nvme if died else 0,
            came_back=died.came_back if died else 0,
        )


def _blocks(blocks: int) -> str:
    return f"{blocks:,} blocks, {_gigabytes(blocks)}"


def _gigabytes(blocks: int) -> str:
    return f"{blocks * BLOCK_NBYTES / 1e9:.2f} GB"


def _rate(blocks: int, seconds: float) -> float:
    return blocks * BLOCK_NBYTES / 1e9 / max(seconds, 1e-9)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
