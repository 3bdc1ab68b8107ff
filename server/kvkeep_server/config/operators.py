"""Settings of what operators see."""

from dataclasses import dataclass

from kvkeep_server.config.keys import setting
from kvkeep_server.core.settings_kinds import Choice, Listen


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The Prometheus endpoint: `/metrics`, `/healthz` and `/readyz` over HTTP."""

    listen: str = setting(
        "listen",
        Listen(),
        "",
        "Where it listens; empty: nowhere. Open to all who reach it, without encryption; it names"
        " nothing that is stored.",
    )


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is written to standard error."""

    level: str = setting(
        "level",
        Choice(("debug", "info", "warning", "error")),
        "info",
        "Least level that is written.",
    )
    format: str = setting(
        "format", Choice(("text", "json")), "text", "Lines for people, or one JSON object a line."
    )
