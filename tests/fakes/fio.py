"""A program that passes for fio: it writes down how it was called, and reports a rate."""

import json
import os
import sys

SCRIPT = """#!{python}
import json, sys
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("fio-3.99")
    sys.exit(0)
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + "\\n")
if {code}:
    sys.exit("no such device")
options = dict(a[2:].split("=", 1) for a in arguments if "=" in a)
rates = {rates!r}
rate = rates.get(int(options["bs"]), {rate})
side = "write" if options["rw"] == "write" else "read"
print("note: a line before the report")
print(json.dumps({{"jobs": [{{side: {{"bw_bytes": rate}}}}]}}))
"""


class FakeFio:
    """Puts the program into a directory.

    Attributes:
        path: For the environment's PATH: nothing else is on it.
    """

    def __init__(self, directory, *, code=0, rate=10**9, rates=None):
        directory.mkdir(exist_ok=True)
        self._log = directory / "calls"
        self.path = str(directory)
        script = directory / "fio"
        script.write_text(
            SCRIPT.format(
                python=sys.executable, log=str(self._log), code=code, rate=rate, rates=rates or {}
            )
        )
        os.chmod(script, 0o755)

    @property
    def calls(self):
        """The options of each run, `--name=value` as a dict."""
        lines = self._log.read_text().splitlines()
        return [dict(a[2:].split("=", 1) for a in json.loads(line) if "=" in a) for line in lines]
