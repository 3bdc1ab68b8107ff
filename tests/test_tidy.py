"""Style that no linter checks: sizes, dead modules, documented names, banned calls (P21)."""

import ast
import importlib
import re
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path

import click
import grimp
import pytest

from kvkeep_server.cli.main import kvkeep
from kvkeep_server.config import KEYS

ROOT = Path(__file__).parents[1]
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500

# Modules that are started or imported from outside of both trees.
ENTRY_POINTS = {"kvkeep_server.__main__", "kvkeep", "kvkeep.torch"}


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks or would track, without generated ones."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    files = [ROOT / name for name in sorted(set(listed))]
    return [file for file in files if file.is_file() and "_pb2" not in file.name]


PYTHON = tracked("*.py")
PRODUCT = [file for file in PYTHON if file.relative_to(ROOT).parts[0] in {"client", "server"}]


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_there_is_something_to_check():
    assert len(PRODUCT) > 10
    assert Path(__file__) in PYTHON


@pytest.mark.parametrize("file", PYTHON, ids=name_of)
def test_functions_fit_a_screen(file):
    long = {
        f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in functions(file)
        if node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    }
    assert not long


def test_files_are_short():
    text_files = tracked("*.py", "*.sh", "*.proto", "pyproject.toml", "Makefile", "*.md")
    lengths = {name_of(file): len(file.read_text().splitlines()) for file in text_files}
    assert not {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX}


def test_every_package_is_one():
    """Without `__init__.py` the import contracts overlook a folder."""
    folders = {file.parent for file in PRODUCT if "examples" not in file.parts}
    assert not [name_of(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_every_module_has_an_importer():
    graph = grimp.build_graph("kvkeep", "kvkeep_server", cache_dir=None)
    unused = {
        module
        for module in graph.modules
        if not graph.find_modules_that_directly_import(module)
        and not module.startswith(("kvkeep.v1.", "kvkeep.connectors."))
        and not graph.find_children(module)
    }
    assert unused - ENTRY_POINTS == set()


@pytest.mark.parametrize("file", PRODUCT, ids=name_of)
def test_all_equals_what_is_exported(file):
    """`__all__`, where there is one, lists the public names of the module, and only those."""
    tree = ast.parse(file.read_text())
    if not any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for node in tree.body
    ):
        return
    package = name_of(file).partition("/")[2].removesuffix(".py").removesuffix("/__init__")
    module = importlib.import_module(package.replace("/", "."))
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own = {name for node in imports if _is_inside(node, module, file) for name in names(node)}
    used = {name for node in imports for name in names(node)} - own
    assert set(module.__all__) == (defined | own) - used
    assert len(module.__all__) == len(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)


def names(node: ast.ImportFrom) -> list[str]:
    return [alias.asname or alias.name for alias in node.names]


def _is_inside(node: ast.ImportFrom, module: types.ModuleType, file: Path) -> bool:
    """A package exports what it takes from its own modules, also lazily; the rest it only uses."""
    return file.name == "__init__.py" and f"{node.module}.".startswith(f"{module.__name__}.")


# ---- documentation


def commands(group: click.Command, path: str) -> Iterator[str]:
    if isinstance(group, click.Group):
        for name, command in group.commands.items():
            yield from commands(command, f"{path} {name}")
    else:
        yield path


def documentation() -> str:
    return (ROOT / "README.md").read_text() + (ROOT / "deploy/CONFIG.md").read_text()


def test_every_command_is_documented():
    text = documentation()
    assert not [path for path in commands(kvkeep, "kvkeep") if path not in text]


def test_every_command_has_a_help_line():
    def walk(command: click.Command, path: str) -> Iterator[str]:
        if not command.help:
            yield path
        for option in command.params:
            if isinstance(option, click.Option) and not option.help:
                yield f"{path} {option.opts[0]}"
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, f"{path} {name}")

    assert not list(walk(kvkeep, "kvkeep"))


def test_every_settings_key_is_read_by_somebody():
    """As `settings.<table>.<attribute>`, or `<table>.<attribute>` on a local name."""
    read = {
        (getattr(node.value, "attr", getattr(node.value, "id", "")), node.attr)
        for file in PRODUCT
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert not [key.path for key in KEYS.values() if (key.table, key.attribute) not in read]


def test_every_settings_key_is_documented():
    sections = re.split(r"^## \[(\w+)\]$", documentation(), flags=re.MULTILINE)
    documented = {
        f"{table}.{key}"
        for table, section in zip(sections[1::2], sections[2::2], strict=True)
        for key in re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    }
    assert documented == set(KEYS)


# ---- nothing executable on wire or disk (P21)

BANNED_MODULES = {
    "pickle",
    "cPickle",
    "marshal",
    "dill",
    "cloudpickle",
    "shelve",
    "joblib",
    "jsonpickle",
}
BANNED_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.load",
    "code.interact",
    "os.system",
    "os.popen",
}


def dangers(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {a.name for a in names if a.name.partition(".")[0] in BANNED_MODULES}
            case ast.ImportFrom(module=str(module)):
                if module.partition(".")[0] in BANNED_MODULES:
                    found.add(module)
            case ast.Call(func=func, keywords=keywords):
                if ast.unparse(func) in BANNED_CALLS:
                    found.add(ast.unparse(func))
                found |= {k.arg for k in keywords if _is_dangerous_keyword(k)}
    return found


def _is_dangerous_keyword(keyword: ast.keyword) -> bool:
    """`allow_pickle=` or `shell=` with anything but a plain False."""
    safe = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
    return keyword.arg in {"allow_pickle", "shell"} and not safe


@pytest.mark.promise("P21", gate=1, unit="scans")
def test_nothing_executable_on_wire_or_disk():
    found = {name_of(file): dangers(file.read_text()) for file in PRODUCT}
    assert not {name: names for name, names in found.items() if names}


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import numpy, marshal",
        "from pickle import loads",
        "import os.path\nimport cloudpickle as c",
        "eval('1')",
        "def f(x):\n    return exec(x)",
        "import yaml\nyaml.load('x')",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_a_planted_danger_is_found(planted):
    assert dangers(planted)


@pytest.mark.parametrize(
    "harmless", ["np.load(path, allow_pickle=False)", "model.eval()", "re.compile('x')"]
)
def test_harmless_code_is_not(harmless):
    assert not dangers(harmless)


# ---- what does not belong into a product

PLACES = re.compile(
    r"/work/|/root\b|/home/\w+/|shared/[A-Z]+\.md"
    r"|\b(?:DESIGN|STYLE|PROMISES|ENGINES|POLICIES|PEERS|FAULTS|CASES)(?:\.md|[\s#]+section)"
)


def test_no_paths_and_papers_of_a_workplace():
    text_files = [file for file in tracked() if file.suffix not in {".npz", ".png", ".json"}]
    named = {}
    for file in text_files:
        found = set(PLACES.findall(file.read_text(errors="replace")))
        if found and file != Path(__file__):
            named[name_of(file)] = found
    assert not named


def test_top_level_is_the_documented_one():
    top = {file.relative_to(ROOT).parts[0] for file in tracked()}
    folders = {"client", "deploy", "proto", "server", "tests"}
    files = {"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"}
    hidden = {name for name in top if name.startswith(".")}
    assert top - folders - files - hidden == set()


@pytest.mark.parametrize("file", PRODUCT, ids=name_of)
def test_every_module_says_what_it_is(file):
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    assert docstring
    assert len(docstring.splitlines()[0]) <= 100
