"""`kvkeep stats`: what a daemon holds and what it did, for operators."""

import json
from collections.abc import Iterator
from threading import Event

import click
from rich.console import Console
from rich.live import Live

from kvkeep_server.cli.admin_calls import AdminCalls
from kvkeep_server.cli.runtime_dir import runtime_dir_option
from kvkeep_server.cli.stats_text import as_dict, as_text
from kvkeep_server.core.clock import SystemClock


@click.command()
@runtime_dir_option
@click.option("--watch", is_flag=True, help="Show it again every --interval, with rates.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two looks of --watch.",
)
@click.option("--json", "as_machine", is_flag=True, help="Print one JSON object a look.")
def stats(*, runtime_dir: str, watch: bool, interval: float, as_machine: bool) -> None:
    """Show what a daemon holds: tiers, hits, misses by reason, namespaces, sessions, leases."""
    with AdminCalls(runtime_dir) as admin:
        if as_machine:
            for _ in _looks(interval if watch else 0):
                click.echo(json.dumps(as_dict(admin.stats(), admin.namespaces())))
            return
        if not watch:
            click.echo(as_text(admin.runtime_dir, admin.stats(), admin.namespaces()))
            return
        _watch(admin, interval)


def _watch(admin: AdminCalls, interval_s: float) -> None:
    clock, before = SystemClock(), None
    console = Console(highlight=False, markup=False)
    with Live(console=console, auto_refresh=False) as live:
        for _ in _looks(interval_s):
            now = clock.monotonic_s(), admin.stats()
            since = (now[0] - before[0], before[1]) if before else None
            text = as_text(admin.runtime_dir, now[1], admin.namespaces(), since)
            live.update(text, refresh=True)
            before = now


def _looks(interval_s: float) -> Iterator[None]:
    """Once, or again and again."""
    pause = Event()
    yield
    while interval_s:
        pause.wait(interval_s)
        yield
