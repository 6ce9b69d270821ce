"""The import table of docs/architecture.md, and what else every file promises. Read from the sources, nothing is run
but the proof that the front half lives without torch."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import cast

import pytest

ROOT = Path(__file__).resolve().parent.parent

FLOOR = {"values", "system", "settings", "wire"}  # for which all others stand
# Room -> rooms of ours that it may import. `kvcache.store` is a room of its own.
OURS: dict[str, set[str]] = {
    "values": set(),
    "system": {"values"},
    "embedded": set(),
    "modelfile": {"values", "system"},
    "settings": {"values", "system"},
    "wire": {"values", "settings"},
    "device": {"values", "system", "settings"},
    "kvcache": {"values"},
    "kvcache.store": {"values", "system", "kvcache", "device"},
    "scheduler": {"values", "settings"},
    "engine": {*FLOOR, "modelfile", "device", "kvcache", "kvcache.store", "scheduler"},
    "server": {*FLOOR, "modelfile", "fleet"},
    "fleet": {"values"},
    "cluster": {"values", "system", "settings"},
    "loadtest": FLOOR,
    "simulation": {"values", "settings", "wire", "device", "kvcache", "scheduler", "fleet"},
    "cli": {
        *FLOOR,
        "modelfile",
        "device",
        "kvcache",
        "kvcache.store",
        "engine",
        "server",
        "loadtest",
        "simulation",
        "scheduler",
    },
}
# Room -> what it may import beside the standard library.
THEIRS: dict[str, set[str]] = {
    "values": {"msgspec"},
    "system": set(),
    "settings": {"msgspec"},
    "wire": {"msgspec"},
    "device": {"torch", "numpy", "cuda", "xxhash"},
    "kvcache": {"msgspec", "xxhash", "numpy"},  # docs/decisions/0019-numpy-in-the-cache-books.md
    "kvcache.store": {"torch", "xxhash"},
    "scheduler": {"msgspec"},
    "engine": {"torch", "numpy", "triton", "transformers", "safetensors", "msgspec", "llguidance", "rich"},
    "server": {
        *(
            "fastapi",
            "starlette",
            "uvicorn",
            "pydantic",
            "pydantic_core",
            "msgspec",
            "structlog",
            "tokenizers",
            "jinja2",
        ),
        *("prometheus_client", "anyio", "yaml"),
    },
    "fleet": {"msgspec"},
    "cluster": {"ray", "pydantic", "httpx"},
    "loadtest": {"httpx", "httptools", "jinja2", "matplotlib", "numpy", "tokenizers", "msgspec", "yaml"},
    "embedded": set(),
    "modelfile": set(),
    "simulation": {"msgspec", "numpy"},
    "cli": {"typer", "rich", "httpx", "msgspec", "torch"},
}
# What single files may import beyond their room.
ALSO: dict[str, set[str]] = {
    "settings/config.py": {"embedded", "modelfile"},
    "modelfile/checkpoint.py": {"huggingface_hub"},
    "system/log.py": {"structlog"},
    "server/http/guarded_protocol.py": {"httptools"},
    "server/batch/upload_form.py": {"python_multipart"},
    "server/grammar/worker.py": {"llguidance"},
    "server/tracing/export.py": {"opentelemetry"},
    "simulation/simulator.py": {"engine.loop"},
    "cli/simulate_input.py": {"yaml"},
}
# The rooms of the server -> rooms of the server that they may import. The files of `server/` itself stand on top.
SERVER: dict[str, set[str]] = {
    "http": set(),
    "workers": set(),
    "text": {"workers"},
    "grammar": {"workers"},
    "client": {"text"},
    "tenancy": {"http", "client"},
    "hosting": {"client"},
    "links": {"client"},
    "control": {"http", "client", "tenancy"},
    "batch": {"http", "tenancy"},
    "metrics": {"client", "tenancy"},
    "tracing": {"client"},
    "api": {"http", "text", "grammar", "client", "tenancy", "control", "batch", "metrics", "tracing"},
    "ui": {"http", "api", "client", "tenancy", "metrics"},
}
# The rooms of the load test -> rooms of the load test that they may import; `bench`, `plan`, `evaluation` and `target`
# stand on top of them, `settings` and `machine` beside those.
LOADTEST: dict[str, set[str]] = {
    "results": set(),
    "metrics": {"results"},
    "load": {"results"},
    "client": {"results", "load"},
    "report": {"results", "metrics"},
}
# The rooms of the engine -> rooms of the engine that they may import; `loop`, `assembly` and `process` stand on top.
ENGINE: dict[str, set[str]] = {
    "forward": set(),
    "kernels": {"forward"},
    "native": {"forward"},
    "attention": {"forward", "kernels", "native"},
    "experts": {"native"},
    "models": {"forward", "kernels", "native", "attention", "experts"},
    "sampling": {"kernels", "native"},
    "step": {"forward", "kernels", "models", "sampling"},
    "memory": set(),
    "measure": {"forward", "native", "attention", "models", "sampling", "step", "memory"},
}
INNER_ROOMS = {"server": SERVER, "loadtest": LOADTEST, "engine": ENGINE}
# Files of a room without torch that verbs import when they need it.
NEEDS_TORCH = {"cli/model_facts.py"}

# Files that may catch everything: process main, engine request boundary, I/O thread body, HTTP handler.
CATCH_ALL = {
    "cluster/ray_app.py": 1,  # a call of an actor
    "engine/process.py": 1,
    "engine/step/staging.py": 1,  # the trial of kernels at the start
    "engine/step/runner.py": 2,  # the launch and the result of one step
    "kvcache/store/disk.py": 1,  # the body of the I/O threads
    "kvcache/store/mover.py": 1,  # the body of the copying threads
    "server/api/middleware.py": 1,
    "server/batch/worker.py": 1,  # the work on one batch
    "server/client/generation.py": 1,  # the handling of one report for one request
    "server/grammar/worker.py": 1,  # llguidance's reader of GBNF raises bare ones
    "server/text/tokenizer.py": 1,  # tokenizers raises a bare Exception; anything else passes through
}
READS_ENVIRONMENT = {
    "settings/config.py",
    "system/openmp.py",
    "engine/native/build.py",
    "engine/native/library.py",
}
# Files that may look at the wall clock, and what for. No timer does: it jumps.
READS_WALL_CLOCK = {
    "server/composition.py": "the `created` fields of answers",
    "server/text/template_worker.py": "the date for chat templates",
    "cli/kv.py": "how old a volume is",
    "cli/bench_serve.py": "the name of a result file",
}
_WALL_CLOCK = {"time", "time_ns", "localtime", "gmtime", "ctime", "now", "utcnow", "today"}
BESIDE = ["benchmarks", "tests", "docker", "tools"]  # folders that are no part of the package
LONG_FILES: dict[str, str] = {}  # file -> why it is one
MAX_LINES = 450


def _room(path: str) -> str:
    """Return the room of a file or of a dotted name below `tiercel`."""
    return "kvcache.store" if path.startswith(("kvcache/store/", "kvcache.store")) else re.split("[/.]", path)[0]


def _module(path: str) -> str:
    """Return the dotted name of a file."""
    return f"tiercel.{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"


PACKAGE = ROOT / "tiercel"
FILES = sorted(file.relative_to(PACKAGE).as_posix() for file in PACKAGE.glob("*/**/*.py"))  # engine/loop.py, ...


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text(encoding="utf-8"), path)


@cache
def _nodes(path: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_tree(path)))


def _imports(path: str) -> Iterator[tuple[ast.stmt, str]]:
    """Yield every import of a file with its dotted name, including those in functions and under TYPE_CHECKING."""
    for node in _nodes(path):
        match node:
            case ast.Import():
                yield from ((node, alias.name) for alias in node.names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield from ((node, f"{module}.{alias.name}") for alias in node.names)
            case ast.ImportFrom():
                yield node, "."
            case _:
                pass


def _is_within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _calls(names: set[str]) -> list[str]:
    """Return every call of one of these functions as file:line."""
    return [
        f"{path}:{node.lineno}"
        for path in FILES
        for node in _nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def _reads(names: set[str]) -> list[str]:
    """Return every use of one of these dotted names as file:line."""
    last = {name.rsplit(".", 1)[1] for name in names}
    return [
        f"{path}:{node.lineno}"
        for path in FILES
        for node in _nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in last and ast.unparse(node) in names
    ]


def test_every_room_is_in_the_table() -> None:
    folders = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert folders | {"kvcache.store"} == set(OURS)
    assert {file.name for file in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


def _may_import(path: str, name: str) -> bool:
    room, (top, _, rest) = _room(path), name.partition(".")
    if top == "tiercel":
        return rest == "__version__" or _room(rest) in {room, *OURS[room]} or _is_within(rest, ALSO.get(path, set()))
    return top in sys.stdlib_module_names or top in THEIRS[room] | ALSO.get(path, set())


def test_imports_follow_the_table() -> None:
    wrong = [
        f"{path}:{node.lineno} imports {name}"
        for path in FILES
        for node, name in _imports(path)
        if not _may_import(path, name)
    ]
    assert not wrong


@pytest.mark.parametrize("room", INNER_ROOMS)
def test_the_rooms_within_a_room_import_one_way(room: str) -> None:
    table = INNER_ROOMS[room]
    assert {file.parent.name for file in (PACKAGE / room).glob("*/__init__.py")} == set(table)
    wrong = [
        f"{path}:{node.lineno} imports {name}"
        for path in FILES
        if path.startswith(f"{room}/") and path.count("/") > 1
        for node, name in _imports(path)
        if _is_within(name, {f"tiercel.{room}"})
        and name.split(".")[2] not in table[path.split("/")[1]] | {path.split("/")[1]}
    ]
    assert not wrong


@cache
def _graph() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports, in functions and under TYPE_CHECKING too."""
    modules = {name: path for path in FILES for name in [_module(path)]}
    return {
        module: {
            target
            for _, name in _imports(path)
            for target in (name, name.rpartition(".")[0])
            if target in modules and target != module
        }
        for module, path in modules.items()
    }


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = _graph()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_folder_imports_itself_by_way_of_others() -> None:
    # A folder below a room of a room, such as loadtest/load/datasets, belongs to that room.
    folder_by_module = {_module(path): "/".join(path.split("/")[:-1][:2]) for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, targets in _graph().items():
        folder = folder_by_module[module]
        graph.setdefault(folder, set()).update({folder_by_module[target] for target in targets} - {folder})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_inside_functions_state_a_reason() -> None:
    silent = [
        f"{path}:{node.lineno}"
        for path in FILES
        for function in _nodes(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom) and not _is_explained(path, node.lineno - 1)
    ]
    assert not silent


def _is_explained(path: str, index: int) -> bool:
    """A `# lazy: reason` on the line itself, or above it before any line that is no import and no comment."""
    lines = (PACKAGE / path).read_text(encoding="utf-8").splitlines()
    if "# lazy:" in lines[index]:
        return True
    for line in reversed(lines[:index]):
        if line.strip().startswith("# lazy:"):
            return True
        if not line.strip().startswith(("#", "import ", "from ")):
            return False
    return False


def test_imports_are_absolute_and_explicit() -> None:
    assert not [
        f"{path}:{node.lineno}" for path in FILES for node, name in _imports(path) if name == "." or name.endswith(".*")
    ]
    assert not _calls({"__import__"})


def test_nothing_unpickles_or_evaluates() -> None:
    assert not _calls({"eval", "exec", "compile"})
    banned = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    assert not [f"{path} imports {name}" for path in FILES for _, name in _imports(path) if _is_within(name, banned)]
    assert not _reads({"torch.load", "torch.save", "torch.hub"})


def test_the_environment_is_read_in_the_known_places_only() -> None:
    names = {"os.environ", "os.environb", "os.getenv"}
    found = _reads(names) + [f"{path}: {name}" for path in FILES for _, name in _imports(path) if name in names]
    assert not [place for place in found if place.split(":")[0] not in READS_ENVIRONMENT]


def test_no_timer_uses_the_wall_clock() -> None:
    modules = {"time", "datetime", "datetime.datetime", "date", "datetime.date"}
    found = _reads({f"{module}.{name}" for module in modules for name in _WALL_CLOCK})
    found += [f"{path}:{node.lineno}" for path in FILES for node, name in _imports(path) if name.startswith("time.")]
    assert not [place for place in found if place.split(":")[0] not in READS_WALL_CLOCK]


def _catch_alls(path: str) -> list[int]:
    caught = [
        (node.lineno, "" if node.type is None else ast.unparse(node.type))
        for node in _nodes(path)
        if isinstance(node, ast.ExceptHandler)
    ]
    return [line for line, kind in caught if not kind or re.search(r"\b(Base)?Exception\b", kind)]


def test_every_exception_is_caught_in_the_known_places_only() -> None:
    found = {path: len(lines) for path in FILES if (lines := _catch_alls(path))}
    assert {path: count for path, count in found.items() if count > CATCH_ALL.get(path, 0)} == {}


def _silent_handlers(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of handlers that end the work with a peer for what it sent, and do not say what that was."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None and "WireError" in ast.unparse(node.type):
            parts = [part for line in node.body for part in ast.walk(line)]
            is_told = any(isinstance(part, ast.Name) and part.id == node.name for part in parts)
            if not is_told and not any(isinstance(part, ast.Raise | ast.Return) and _value(part) for part in parts):
                yield node.lineno


def _value(statement: ast.AST) -> ast.expr | None:
    return statement.value if isinstance(statement, ast.Return) else cast(ast.Raise, statement).exc


def test_no_frame_of_a_peer_is_refused_in_silence() -> None:
    assert not [f"{path}:{line}" for path in FILES for line in _silent_handlers(_tree(path))]


@pytest.mark.parametrize(("body", "is_silent"), [("close()", True), ("return", True), ("log(error)", False)])
def test_a_silent_refusal_is_found(body: str, is_silent: bool) -> None:
    tree = ast.parse(f"def f():\n try: read()\n except (OSError, WireError) as error:\n  {body}")
    assert bool(list(_silent_handlers(tree))) == is_silent


# Main modules of a daemon: everything that they import may run while it serves.
DAEMONS = {
    "tiercel.cli.serve",
    "tiercel.cli.engine",
    "tiercel.engine.__main__",
    "tiercel.server.text.template_worker",
    "tiercel.server.grammar.worker",
    "tiercel.cluster.ray_app",
}
_STREAMS = "system/standard_streams.py"  # writes to standard output and standard error for all of them
_BUILD = "engine/native/build.py"  # a program of the build: the package's build runs it before anything is installed
_WRITERS = {"print", "rprint", "echo", "secho", "pprint", "print_exc", "print_exception", "print_stack", "print_tb"}
_WRITERS |= {"StreamHandler", "basicConfig", "showwarning", "breakpoint", "input"}  # the log has a handler of its own


def _reachable(modules: set[str]) -> set[str]:
    """Return the files of these modules and of everything that they import, with the packages around them."""
    graph, found = _graph(), set[str]()
    left = set(modules)
    while left:
        module = left.pop()
        found.add(module)
        left |= graph[module] - found
    return {path for path in FILES if _module(path) in found}


def _unguarded_writes(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that write to a standard stream, or take one, by any other way than `standard_streams.py`."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="sys"), attr="stdout" | "stderr" | "__stdout__" | "__stderr__"):
                yield node.lineno
            case ast.ImportFrom(module="sys", names=names) if any("std" in alias.name for alias in names):
                yield node.lineno
            case ast.Call(func=ast.Name(id=name)) if name in _WRITERS:
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if name in _WRITERS:
                if not (name == "print" and module not in {"rich", "builtins"}):
                    yield node.lineno
            case ast.Call(func=ast.Name(id="Console") | ast.Attribute(attr="Console")):
                if "file" not in {keyword.arg for keyword in node.keywords}:
                    yield node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="write" | "writev" | "dup2"), args=[fd, *_]):
                if isinstance(fd, ast.Constant):
                    yield node.lineno
            case ast.Call(
                func=ast.Name(id="open") | ast.Attribute(attr="fdopen"), args=[ast.Constant(value=int()), *_]
            ):
                yield node.lineno
            case _:
                pass


def test_no_write_for_people_decides_about_serving() -> None:
    """A full disk or a reader that has ended must lose a line, not the daemon."""
    files = _reachable(DAEMONS) - {_STREAMS, _BUILD}
    assert len(files) > 300  # the whole daemon
    assert not [f"{path}:{line}" for path in sorted(files) for line in _unguarded_writes(_tree(path))]


@pytest.mark.parametrize(
    "line",
    [
        "print(1)",
        "sys.stdout.write('x')",
        "stream = sys.stderr",
        "from sys import stdout",
        "typer.echo('x')",
        "Console(stderr=True)",
        "rich.print(1)",
        "logging.StreamHandler()",
        "os.write(2, b'x')",
        "open(1, 'w')",
        "traceback.print_exc()",
    ],
)
def test_a_write_for_people_is_found(line: str) -> None:
    assert list(_unguarded_writes(ast.parse(line)))


def _lenient_listings(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that list a folder in a way that takes an unreadable one for an empty one."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="glob" | "rglob" | "iglob"):
                yield node.lineno
            case ast.ImportFrom(module="glob"):
                yield node.lineno
            case ast.Attribute(attr="walk" | "fwalk", value=value) if ast.unparse(value) != "ast":
                yield node.lineno
            case _:
                pass


def test_an_unreadable_folder_is_never_an_empty_one() -> None:
    """The daemon does without files that do not exist. It must not take those of an unreadable folder for such."""
    files = _reachable(DAEMONS)
    assert not [f"{path}:{line}" for path in sorted(files) for line in _lenient_listings(_tree(path))]


@pytest.mark.parametrize(
    "line", ["folder.glob('*')", "Path('a').rglob('*')", "glob.iglob('*')", "from glob import glob", "os.walk('a')"]
)
def test_a_lenient_listing_is_found(line: str) -> None:
    assert list(_lenient_listings(ast.parse(line)))


def test_classes_are_named_by_what_they_are() -> None:
    names = [node.name for path in FILES for node in _nodes(path) if isinstance(node, ast.ClassDef)]
    assert not [name for name in names if name.endswith(("Mixin", "Impl")) or re.match(r"Base[A-Z]", name)]


def test_no_two_classes_share_a_name() -> None:
    """Classes of one name in two rooms are taken for each other. A private class may share its name with another."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_files_have_one_reason_to_exist() -> None:
    lines = {path: len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {path: count for path, count in lines.items() if count > MAX_LINES and path not in LONG_FILES}


def test_package_files_hold_a_docstring_and_names_only() -> None:
    allowed = ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.Expr
    packages = [path for path in FILES if path.endswith("__init__.py")]
    assert not [path for path in packages if not ast.get_docstring(_tree(path))]
    assert not [path for path in packages if not all(isinstance(node, allowed) for node in _tree(path).body)]


_WITHOUT_TORCH = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ImportError(f"{name} was imported")

refused = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Refuse())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def _modules(room: str) -> list[str]:
    return [_module(path) for path in FILES if _room(path) == room and path not in NEEDS_TORCH]


def _import_without_torch(modules: list[str], *others: str) -> str:
    refused = ",".join(("torch", "triton", "transformers", *others))
    command = [sys.executable, "-c", _WITHOUT_TORCH, refused, *modules]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stderr


@pytest.mark.parametrize(
    ("rooms", "others"),
    [((*FLOOR, "fleet", "scheduler", "server"), ("numpy",)), (("kvcache", "simulation", "cli", "loadtest"), ())],
)
def test_the_rooms_live_without_torch(rooms: tuple[str, ...], others: tuple[str, ...]) -> None:
    """The second ones work on arrays, or a room that they import does (decision 19), or count results."""
    assert _import_without_torch([module for room in rooms for module in _modules(room)], *others) == ""


def test_a_client_process_of_the_load_test_starts_without_numpy() -> None:
    """Importing numpy would add a tenth of a second to the start of every process."""
    assert _import_without_torch(["tiercel.loadtest.client.worker"], "numpy") == ""


def test_the_simulated_device_lives_without_torch() -> None:
    wanted = {"tiercel.device.base", "tiercel.device.sim"}
    assert _import_without_torch(sorted(wanted & set(_modules("device"))), "numpy") == ""


def test_the_dependencies_are_few() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert len(project["project"]["dependencies"]) <= 20


LINKS = {"server", "kvcache", "scheduler"}


def test_three_rooms_can_be_opened_from_the_top_level() -> None:
    """docs/decisions/0022-one-package.md: they are links, and nothing else is."""
    command = ["git", "ls-files", "-s"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    tracked = {line.split("\t")[1] for line in listed if line.startswith("120000")}
    assert tracked in (LINKS, set())  # an unpacked archive is no repository
    assert {path.name: os.readlink(path) for path in ROOT.iterdir() if path.is_symlink()} == {
        name: f"tiercel/{name}" for name in LINKS
    }


def test_no_room_is_imported_by_its_bare_name() -> None:
    """A stranger's `loadtest.py` on PYTHONPATH would be imported in its place."""
    rooms = "|".join({name.split(".")[0] for name in OURS})
    bare = re.compile(rf"^\s*(from|import) ({rooms})\b|\bimport (\w+, )+({rooms})\.", re.MULTILINE)
    files = [*map(PACKAGE.joinpath, FILES), *(file for folder in BESIDE for file in (ROOT / folder).rglob("*.py"))]
    assert not [str(file) for file in files if bare.search(file.read_text(encoding="utf-8"))]


_RIDDLES = re.compile(
    r"(What|How|Who|Whom|Whose|Where|Why|Of|As|Until|Never|Those|Whoever|Nobody|Somebody|So)\b"
)  # a docstring that begins so does not name its subject


def test_docstrings_name_their_subject() -> None:
    found: list[str] = []
    for path in FILES:
        for node in _nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and _RIDDLES.match(text):
                    found.append(f"{path}: {text.splitlines()[0]}")
    assert not found
