"""Reads the text of a settings file, within bounds."""

from pathlib import Path

from kvkeep_server.core.quantities import format_size

FILE_NBYTES_MAX = 1 << 20


def read_settings(path: Path) -> str:
    """The text of the file.

    Raises:
        ValueError: It cannot be read, or is no text; what is wrong, and the fix.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_NBYTES_MAX + 1)
        if len(content) <= FILE_NBYTES_MAX:
            return content.decode()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; fix: name a readable TOML file, or none"
        raise ValueError(problem) from error
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 at byte {error.start}; fix: save the file as UTF-8"
        raise ValueError(problem) from error
    raise ValueError(f"is larger than {format_size(FILE_NBYTES_MAX)}; fix: name a TOML file")
