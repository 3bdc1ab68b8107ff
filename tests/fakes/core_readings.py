"""The metrics of a core that has no daemon around it."""

from types import SimpleNamespace

from kvkeep_server.core.clock import SystemClock
from kvkeep_server.core.histogram import DURATION_BOUNDS_S, Histogram
from kvkeep_server.metrics.collector import render
from kvkeep_server.metrics.readings import Doors, Facts, Readings
from kvkeep_server.service.streams import StreamLimits, Streams
from kvkeep_server.tiering.nvme_side import LocalTiers
from tests.fakes.scraping import Page

LIMITS = (
    "memory_limit_bytes",
    "commits_running_limit",
    "sessions_limit",
    "staging_limit_bytes",
    "namespaces_limit",
    "leases_limit",
    "pins_limit",
    "pinned_limit_bytes",
    "watchers_limit",
    "remote_sessions_limit",
    "remote_streams_limit",
)
FACTS = Facts(
    ("0.1.0", "3.11"),
    ("lru", "always", "true"),
    {f"kvkeep_{name}": 5 for name in LIMITS},
)


def readings_of(core, calls=None) -> Readings:
    durations = {("Admin/Stats", True): Histogram(DURATION_BOUNDS_S)}
    return Readings(
        service=core.service,
        tiers=LocalTiers(core.ram, core.nvme),
        doors=Doors(
            calls or SimpleNamespace(ended={("Admin/Stats", "OK"): 0}, durations=durations),
            SimpleNamespace(refused_total=3, dropped_total=4),
            Streams(limits=StreamLimits(4, 2, 1.0), clock=SystemClock()),
        ),
        loop_lag=Histogram(DURATION_BOUNDS_S),
        facts=FACTS,
    )


def page_of(core) -> Page:
    page = Page.parse(render(readings_of(core.core).take()).decode())
    page.check()
    return page
