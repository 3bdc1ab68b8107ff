"""Every arrow that the import contracts forbid turns them red; every exception in them is green.

The arrows are generated from the contracts in pyproject.toml, also for modules that do not exist
yet, and checked by import-linter itself on a graph that holds one planted import. One violation of
each contract is also planted in a copy of the real tree, where `lint-imports` must fail.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from importlinter.application.use_cases import read_user_options
from importlinter.configuration import configure
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract

ROOT = Path(__file__).parents[2]
TYPES = {
    "layers": LayersContract,
    "forbidden": ForbiddenContract,
    "acyclic_siblings": AcyclicSiblingsContract,
}

configure()
OPTIONS = read_user_options(str(ROOT / "pyproject.toml"))
CONTRACTS = {contract["name"]: contract for contract in OPTIONS.contracts_options}
ROOT_PACKAGES = OPTIONS.session_options["root_packages"]

Arrow = tuple[str, str]
# The imports that break a contract together: one, or two for a cycle.
Violation = tuple[Arrow, ...]


def layer_names(contract: dict) -> list[list[str]]:
    """Layers from the top; modules of one layer may not see each other."""
    container = contract["containers"][0]
    return [
        [f"{container}.{name.strip().strip('()')}" for name in layer.split("|")]
        for layer in contract["layers"]
    ]


LAYERS = layer_names(next(c for c in CONTRACTS.values() if c["type"] == "layers"))
SERVER_LAYERS = [name for layer in LAYERS for name in layer]
CLIENT_MODULES = [
    "kvkeep",
    "kvkeep.transport",
    "kvkeep.torch",
    "kvkeep.v1",
    "kvkeep.connectors",
]


def planted(module: str) -> str:
    """A module inside a package; the few layers that are single modules stand for themselves."""
    single = {"__main__", "daemon", "config", "transport", "torch"}
    return module if module.rpartition(".")[2] in single else f"{module}.planted"


def exceptions(contract: dict) -> list[Arrow]:
    """The imports that a contract ignores, with a real module for each pattern."""
    arrows = [tuple(entry.split(" -> ")) for entry in contract.get("ignore_imports", [])]
    return [
        (importer.replace(".**", ".planted"), imported.replace(".**", ".planted"))
        for importer, imported in arrows
    ]


def forbidden_by_layers(contract: dict) -> Iterator[Violation]:
    layers = layer_names(contract)
    for height, layer in enumerate(layers):
        for importer in layer:
            above = [module for higher in layers[:height] for module in higher]
            beside = [module for module in layer if module != importer]
            yield from (((planted(importer), planted(module)),) for module in above + beside)


def forbidden_by_list(contract: dict) -> Iterator[Violation]:
    allowed = set(exceptions(contract))
    for source in contract["source_modules"]:
        for importer in SERVER_LAYERS if source == "kvkeep_server" else CLIENT_MODULES:
            for name in contract["forbidden_modules"]:
                inside = CLIENT_MODULES if name == "kvkeep" else SERVER_LAYERS
                internal = [name, *map(planted, inside)] if name in ROOT_PACKAGES else [name]
                for imported in internal:
                    if (planted(importer), imported) not in allowed:
                        yield ((planted(importer), imported),)


def forbidden_as_cycle(contract: dict) -> Iterator[Violation]:
    assert contract["ancestors"] == ROOT_PACKAGES
    for package in [*CLIENT_MODULES, *SERVER_LAYERS]:
        one = planted(package)
        if one != package:
            yield (one, f"{package}.other"), (f"{package}.other", one)


GENERATORS = {
    "layers": forbidden_by_layers,
    "forbidden": forbidden_by_list,
    "acyclic_siblings": forbidden_as_cycle,
}


def violations(contract: dict) -> list[Violation]:
    return list(GENERATORS[contract["type"]](contract))


def graph_with(*arrows: Arrow) -> grimp.ImportGraph:
    """All layers and client modules, with nothing imported but these."""
    graph = grimp.ImportGraph()
    modules = {*ROOT_PACKAGES, *SERVER_LAYERS, *CLIENT_MODULES}
    modules |= {planted(module) for module in modules - set(ROOT_PACKAGES)}
    for module in sorted(modules):
        graph.add_module(module)
    for importer, imported in arrows:
        external = imported.partition(".")[0] not in ROOT_PACKAGES
        if imported not in graph.modules:
            graph.add_module(imported, is_squashed=external)
        if importer not in graph.modules:
            graph.add_module(importer)
        graph.add_import(importer=importer, imported=imported, line_number=1, line_contents="-")
    return graph


def is_kept(contract: dict, graph: grimp.ImportGraph) -> bool:
    options = {key: value for key, value in contract.items() if key not in {"name", "type"}}
    checker = TYPES[contract["type"]](contract["name"], OPTIONS.session_options, options)
    return bool(checker.check(graph, verbose=False).kept)


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS)
def test_a_clean_graph_is_green(contract):
    assert is_kept(contract, graph_with())


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS)
def test_every_forbidden_arrow_is_red(contract):
    assert violations(contract)
    assert not [arrows for arrows in violations(contract) if is_kept(contract, graph_with(*arrows))]


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS)
def test_every_exception_is_green(contract):
    assert is_kept(contract, graph_with(*exceptions(contract)))


def test_downward_imports_are_green():
    contract = next(c for c in CONTRACTS.values() if c["type"] == "layers")
    arrows = [
        (planted(importer), planted(imported))
        for height, layer in enumerate(LAYERS)
        for importer in layer
        for lower in LAYERS[height + 1 :]
        for imported in lower
    ]
    assert is_kept(contract, graph_with(*arrows))


def test_a_stray_top_level_module_is_red():
    contract = next(c for c in CONTRACTS.values() if c["type"] == "layers")
    graph = graph_with()
    graph.add_module("kvkeep_server.helpers")
    assert not is_kept(contract, graph)


def test_every_arrow_is_covered():
    """The generator must not silently shrink: all pairs of layers, each way it is forbidden."""
    found = violations(next(c for c in CONTRACTS.values() if c["type"] == "layers"))
    heights = [len(layer) for layer in LAYERS]
    above = sum(count * sum(heights[:height]) for height, count in enumerate(heights))
    beside = sum(count * (count - 1) for count in heights)
    assert len(found) == len(set(found)) == above + beside


def file_of(module: str) -> Path:
    """Where a module lies, relative to the repository."""
    tree = "server" if module.startswith("kvkeep_server") else "client"
    return Path(tree, module.replace(".", "/")).with_suffix(".py")


def one_real_violation(contract: dict) -> Violation:
    """The first that needs only new modules in packages that really exist."""
    for arrows in violations(contract):
        modules = {module for arrow in arrows for module in arrow}
        internal = [module for module in modules if module.partition(".")[0] in ROOT_PACKAGES]
        fits = all((ROOT / file_of(module).parent / "__init__.py").exists() for module in internal)
        if fits and arrows[0][0].endswith(".planted"):
            return arrows
    raise AssertionError(f"no violation of {contract['name']!r} can be planted")


@pytest.fixture
def lint(tmp_path):
    """`lint-imports` on a copy of the real tree, which lies in tmp_path."""
    ignored = shutil.ignore_patterns("__pycache__", "*.npz")
    for tree in ("server/kvkeep_server", "client/kvkeep"):
        shutil.copytree(ROOT / tree, tmp_path / tree, ignore=ignored)
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{tmp_path}/server:{tmp_path}/client", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_the_real_tree_is_green(lint):
    ended = lint()
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("name", CONTRACTS)
def test_planted_in_the_real_tree_it_turns_the_gate_red(name, lint, tmp_path):
    arrows = one_real_violation(CONTRACTS[name])
    for _, imported in arrows:
        if imported.endswith((".planted", ".other")):
            (tmp_path / file_of(imported)).write_text("")
    for importer, imported in arrows:
        (tmp_path / file_of(importer)).write_text(f"import {imported}\n")
    ended = lint()
    assert ended.returncode != 0, f"{arrows}: {ended.stdout}"
    assert f"{name} BROKEN" in " ".join(ended.stdout.split())
