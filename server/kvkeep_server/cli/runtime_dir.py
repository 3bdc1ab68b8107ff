"""Where the sockets are when nobody said.

The one place of the server that looks at the environment.
"""

import os

import click
from click.core import ParameterSource

from kvkeep_server.core.settings_kinds import Directory


def runtime_dir_or_default(given: str) -> str:
    """The directory of the sockets.

    Args:
        given: From the command line or the settings; "" for the default of this user, which is the
            same as that of `kvkeep.connect()`.

    Raises:
        click.UsageError: The directory cannot hold a socket.
    """
    chosen = given or _default()
    try:
        return Directory().parse(chosen, 0)
    except ValueError as error:
        raise click.UsageError(f"the runtime directory is {chosen!r}: {error}") from error


def given_directory(context: click.Context, option: click.Parameter, value: str) -> str:
    """Of an option that may be left out: "" is what a shell makes of a variable that is not set."""
    given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    if given and not value:
        raise click.BadParameter("it is empty; name a directory, or leave the option out")
    return value


runtime_dir_option = click.option(
    "--runtime-dir",
    metavar="DIR",
    default="",
    callback=given_directory,
    help="Directory of the daemon's sockets.",
)


def _default() -> str:
    session = os.environ.get("XDG_RUNTIME_DIR", "")  # noqa: TID251 - see the module
    if session.startswith("/"):
        return f"{session}/kvkeep"
    return f"/tmp/kvkeep-{os.getuid()}"  # noqa: S108 - the daemon refuses somebody else's directory
