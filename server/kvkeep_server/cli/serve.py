"""`kvkeep serve`: the daemon, in the foreground."""

import asyncio
import dataclasses
import logging
import random
from pathlib import Path

import click

from kvkeep_server.cli.log_lines import log_to_stderr
from kvkeep_server.cli.runtime_dir import given_directory, runtime_dir_or_default
from kvkeep_server.config import Settings, load
from kvkeep_server.config.disks import check_disks
from kvkeep_server.core.clock import SystemClock
from kvkeep_server.core.memory_limit import read_memory_limit
from kvkeep_server.daemon import Daemon

_log = logging.getLogger(__name__)


@click.command()
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="TOML file with the settings; none: a sensible default for this machine.",
)
@click.option(
    "--runtime-dir",
    metavar="DIR",
    default="",
    callback=given_directory,
    help="Directory of the sockets; goes before the file's server.runtime_dir.",
)
def serve(config_file: Path | None, runtime_dir: str) -> int:
    """Run the daemon until SIGTERM, SIGINT or SIGHUP.

    What is in ram only is written to nvme first, within server.drain_timeout; a second signal ends
    it at once. No signal reads the settings again.
    """
    settings = load(config_file, read_memory_limit()).settings
    warnings = check_disks(settings, str(config_file or "the embedded default"))
    log_to_stderr(level=settings.log.level, form=settings.log.format)
    for warning in warnings:
        _log.warning("settings", extra={"reason": warning})
    daemon = Daemon(
        settings=_placed(settings, runtime_dir), clock=SystemClock(), random=random.SystemRandom()
    )
    return asyncio.run(daemon.run())


def _placed(settings: Settings, option: str) -> Settings:
    """The settings with the directory filled in."""
    chosen = runtime_dir_or_default(option or settings.server.runtime_dir)
    return dataclasses.replace(
        settings, server=dataclasses.replace(settings.server, runtime_dir=chosen)
    )
