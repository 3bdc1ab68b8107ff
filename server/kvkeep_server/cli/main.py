"""The command line as a whole: its commands; how an error becomes a message and an exit code."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.metadata import version

import click

import kvkeep as client
from kvkeep_server.cli.admin_calls import EXIT_NO_DAEMON, NoDaemonError
from kvkeep_server.cli.bench import bench
from kvkeep_server.cli.bench_fio import EXIT_NO_FIO, NoFioError
from kvkeep_server.cli.check import check
from kvkeep_server.cli.check_offline import NotOfflineError
from kvkeep_server.cli.config import config
from kvkeep_server.cli.demo import demo
from kvkeep_server.cli.health import health
from kvkeep_server.cli.namespace_mode import namespace_mode
from kvkeep_server.cli.output import EXIT_OUTPUT, OutputError, discard, telling, to_stderr
from kvkeep_server.cli.replay import replay
from kvkeep_server.cli.serve import serve
from kvkeep_server.cli.stats import stats
from kvkeep_server.config import ConfigError
from kvkeep_server.core.errors import KVKeepError
from kvkeep_server.sim.trace import TraceError

# EX_CONFIG of sysexits.h.
EXIT_CONFIG = 78
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
# EX_TEMPFAIL.
EXIT_IN_USE = 75
# EX_DATAERR.
EXIT_DATA = 65
_EXIT_CODES = (
    (ConfigError, EXIT_CONFIG),
    (NoDaemonError, EXIT_NO_DAEMON),
    (NotOfflineError, EXIT_IN_USE),
    (TraceError, EXIT_DATA),
    (NoFioError, EXIT_NO_FIO),
    (OutputError, EXIT_OUTPUT),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("kvkeep"), prog_name="kvkeep")
def kvkeep() -> None:
    """A tiered store for the KV cache of LLM inference engines."""


for command in (bench, check, config, demo, health, namespace_mode, replay, serve, stats):
    kvkeep.add_command(command)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line (without the program's name); returns the exit code.

    Errors that kvkeep raises on purpose are one line each on standard error. Anything else is a bug
    and keeps its traceback.
    """
    try:
        with redirect_stdout(telling(sys.stdout)):
            code = kvkeep.main(args=list(arguments), prog_name="kvkeep", standalone_mode=False)
            if sys.stdout is not None:
                sys.stdout.flush()
    except OutputError as error:
        discard(sys.stdout)
        return EXIT_FAILED if error.reader_left else _fail(str(error), _exit_code(error))
    except (KVKeepError, client.KVKeepError) as error:
        return _fail(str(error), _exit_code(error))
    except click.ClickException as error:
        to_stderr(error.show)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return int(code or 0)


def _exit_code(error: Exception) -> int:
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), EXIT_FAILED)


def _fail(message: str, code: int) -> int:
    text = "\n".join(f"kvkeep: {line}" for line in message.splitlines())
    to_stderr(lambda: click.echo(text, err=True))
    return code
