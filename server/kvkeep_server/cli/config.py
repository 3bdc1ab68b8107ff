"""`kvkeep config check | show | reference | metrics`: what a settings file says and could say, and
what the daemon it sets up can be asked."""

from collections.abc import Iterator
from pathlib import Path

import click

from kvkeep_server.config import KEYS, TABLES, Key, Loaded, load, memory_plan
from kvkeep_server.config.disks import check_disks
from kvkeep_server.core.memory_limit import read_memory_limit
from kvkeep_server.core.quantities import show_size
from kvkeep_server.metrics.catalog import CATALOG, series_max
from kvkeep_server.metrics.metric import Label

FILE = click.argument("file", required=False, type=click.Path(path_type=Path))


REFERENCE_HEAD = """\
# Settings

Printed by `kvkeep config reference`; do not edit. One TOML file, given with
`kvkeep serve --config FILE`; every key may be left out. Sizes are bytes or a string with a unit
(B, KiB, MiB, GiB, TiB), durations a string with a unit (ms, s, m, h, d).
`kvkeep config check FILE` checks a file against the machine, `kvkeep config show FILE` prints
what is in effect. A key that is not here is refused.
"""


METRICS_HEAD = """\
# Metrics

Printed by `kvkeep config metrics`; do not edit. Served by `/metrics` of `[metrics] listen`, in
Prometheus's text format. Label values are from the lists below, whoever calls: at most {series}
series. A histogram has `_bucket` (with `le`), `_sum` and `_count`. Counters begin at 0 when the
daemon starts. Dashboard: `deploy/grafana/kvkeep.json`; alerts: `deploy/prometheus/rules.yml`.
"""


@click.group()
def config() -> None:
    """Check, show and explain the settings and the metrics."""


@config.command()
@FILE
def check(file: Path | None) -> None:
    """Check FILE, or the embedded default, against this machine; exit code 78 if it is refused."""
    loaded = load(file, read_memory_limit())
    plan = memory_plan(loaded.settings)
    source = str(file or "the embedded default")
    warnings = check_disks(loaded.settings, source)
    click.echo(f"{source}: ok")
    click.echo(
        f"memory: ram {show_size(plan.pool_nbytes)} + staging {show_size(plan.staging_nbytes)}"
        f" + index and process {show_size(plan.rest_nbytes)} = {show_size(plan.nbytes)}"
        f" of {show_size(loaded.memory.nbytes)}, the {loaded.memory.source}"
    )
    for warning in warnings:
        click.echo(f"warning: {warning}")


@config.command()
@FILE
def show(file: Path | None) -> None:
    """Print the effective settings of FILE, or of the embedded default, as TOML.

    Behind each value stands where it came from: file, default or auto.
    """
    for line in effective(load(file, read_memory_limit())):
        click.echo(line)


@config.command()
def reference() -> None:
    """Print every key, its default and what is allowed, as Markdown."""
    for line in reference_lines():
        click.echo(line)


@config.command()
def metrics() -> None:
    """Print every metric, its labels and what it means, as Markdown."""
    for line in metrics_lines():
        click.echo(line)


def effective(loaded: Loaded) -> Iterator[str]:
    """The lines of a file that gives exactly these settings on any machine with the memory."""
    yield f"# memory limit: {show_size(loaded.memory.nbytes)}, the {loaded.memory.source}"
    for table in TABLES:
        yield ""
        yield f"[{table}]"
        for key in _keys_of(table):
            entry = f"{key.name} = {key.kind.render(loaded.value(key.path))}"
            yield f"{entry:<32} # {loaded.origins[key.path]}"


def reference_lines() -> Iterator[str]:
    """The lines of deploy/CONFIG.md."""
    yield from REFERENCE_HEAD.splitlines()
    for table, settings_class in TABLES.items():
        yield ""
        yield f"## [{table}]"
        yield ""
        yield str(settings_class.__doc__)
        yield ""
        yield "| key | default | allowed | meaning |"
        yield "|---|---|---|---|"
        for key in _keys_of(table):
            yield f"| `{key.name}` | {_default(key)} | {key.kind.allowed} | {key.meaning} |"


def metrics_lines() -> Iterator[str]:
    """The lines of deploy/METRICS.md."""
    yield from METRICS_HEAD.format(series=series_max()).splitlines()
    yield ""
    yield "| metric | type | labels | meaning |"
    yield "|---|---|---|---|"
    for metric in CATALOG.values():
        labels = ", ".join(f"`{label.name}`" for label in metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |"
    yield ""
    yield "| label | values |"
    yield "|---|---|"
    labels_by_name = {label.name: label for m in CATALOG.values() for label in m.labels}
    for label in labels_by_name.values():
        yield f"| `{label.name}` | {_values(label)} |"
    yield ""
    yield "| histogram | upper bounds of its buckets |"
    yield "|---|---|"
    for metric in CATALOG.values():
        if metric.bounds:
            bounds = ", ".join(f"{bound:g}" for bound in metric.bounds)
            yield f"| `{metric.name}` | {bounds} |"


def _values(label: Label) -> str:
    return ", ".join(f"`{value}`" for value in label.values) or "one, for the life of the process"


def _keys_of(table: str) -> Iterator[Key]:
    return (key for key in KEYS.values() if key.table == table)


def _default(key: Key) -> str:
    meaning = getattr(key.kind, "auto", "")
    if key.default == "auto" and meaning:
        return f'`"auto"`: {meaning}'
    if isinstance(key.default, bool):
        return f"`{str(key.default).lower()}`"
    return f'`"{key.default}"`' if isinstance(key.default, str) else f"`{key.default}`"
