"""A daemon that writes down every path that it touches, as the interpreter's audit hooks see it.

    python -m tests.e2e.audited_daemon FILE serve ...

One JSON list a line: the event and its arguments, as far as they are text.
"""

import json
import os
import sys

from kvkeep_server.__main__ import main

# What takes a path, or ends in a call that does.
_EVENTS = {"open", "ctypes.dlopen", "socket.bind", "socket.connect", "subprocess.Popen"}
_FAMILIES = ("os.", "shutil.", "glob.", "pathlib.", "tempfile.", "sqlite3.")


def record(fd: int) -> None:
    def hook(event: str, args: tuple) -> None:
        if event in _EVENTS or event.startswith(_FAMILIES):
            texts = [os.fsdecode(arg) if isinstance(arg, bytes) else str(arg) for arg in args]
            os.write(fd, json.dumps([event, *texts]).encode() + b"\n")

    sys.addaudithook(hook)


if __name__ == "__main__":
    record(os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    sys.exit(main())
