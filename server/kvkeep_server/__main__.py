"""Entry point of `kvkeep` and of `python -m kvkeep_server`. Standard library only.

`pip install kvkeep` brings this file but not the daemon's dependencies: then the answer is one
line, not a traceback.
"""

import sys

# EX_UNAVAILABLE of sysexits.h: something that the command needs is not installed.
EXIT_UNAVAILABLE = 69


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from kvkeep_server.cli.main import run  # noqa: PLC0415 - may lack its dependencies: that is the point
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in {"", "kvkeep", "kvkeep_server"}:
            raise  # a broken install or a bug, not a missing extra
        sys.stderr.write(
            f"kvkeep: the Python package '{missing}' is not installed; "
            "the command needs the daemon's dependencies: pip install 'kvkeep[server]'\n"
        )
        return EXIT_UNAVAILABLE
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
