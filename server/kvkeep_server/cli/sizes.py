"""Sizes on the command line: "1GiB", "512KiB"."""

from collections.abc import Callable

import click

from kvkeep_server.core.quantities import parse_size, show_size


def size_from(minimum: int) -> Callable[[click.Context, click.Parameter, str], int]:
    """A callback of an option that holds a size of at least so many bytes."""

    def parsed(_context: click.Context, _option: click.Parameter, value: str) -> int:
        nbytes = parse_size(value)
        if nbytes is None or nbytes < minimum:
            least = show_size(minimum)
            raise click.BadParameter(f"{value!r} is not a size of at least {least} such as 1.5GiB")
        return nbytes

    return parsed
