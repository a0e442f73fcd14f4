"""The layout is the architecture: what docs and pyproject say of it is what the files are."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("jenga", "jenga_kernels")

MOST_MODULES = 16
"""Modules of a folder that a reader can still survey, not counting its `__init__`."""


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def documented_tree():
    """Get the files that the tree in docs/architecture.md names, as paths from the root.

    A line names a folder, or files of one folder; what follows the names is their explanation.
    """
    section = text_of("docs/architecture.md").split("## Files")[1]
    files, folders = [], []
    for line in section.split("```")[1].strip("\n").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        for name in line.split():
            if name.endswith("/"):
                folders.append(name.rstrip("/"))
                break
            if not name.endswith(".py"):
                break
            files.append("/".join([*folders, name]))
    return files


def modules_of(package):
    """Get the files of a package as paths from the root.

    Left out are `__init__`s, and references, which have their operations' names.
    """
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py" and "reference" not in path.parts
    }


def launcher_files():
    """Get the files of `jenga_kernels` that are no kernels, references or checks."""
    folder = ROOT / "jenga_kernels"
    return [
        path
        for path in sorted(folder.rglob("*.py"))
        if path.relative_to(folder).parts[0] not in {"checks", "reference", "triton"}
        and path.name != "__init__.py"
    ]


def operation_names():
    """Get the modules of `jenga_kernels` that hold a public function of their own name."""
    return [
        path.stem
        for path in launcher_files()
        if re.search(rf"^def {path.stem}\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_documented_tree_is_the_files(package):
    named = [name for name in documented_tree() if name.startswith(f"{package}/")]

    assert sorted(named) == sorted(modules_of(package))


@pytest.mark.parametrize("top", [*PACKAGES, "perf", "tests"])
def test_no_folder_has_more_modules_than_a_reader_can_survey(top):
    paths = [path for path in (ROOT / top).rglob("*.py") if path.name != "__init__.py"]
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in paths)

    assert len(counts) > 1
    assert {name: count for name, count in counts.items() if count > MOST_MODULES} == {}


def test_every_operation_has_a_reference_and_every_reference_an_operation():
    references = {
        path.stem
        for path in (ROOT / "jenga_kernels" / "reference").rglob("*.py")
        if path.name != "__init__.py"
    }

    assert set(operation_names()) == references
    assert references


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (
            ["jenga.manager", "jenga.planning.planner", "jenga.models", "jenga.cli"],
            {"torch", "triton"},
        ),
        (
            ["jenga.manager", "jenga.planning.planner", "jenga.models", "jenga.cli"],
            {"vllm", "jenga_kernels"},
        ),
        (["jenga.vllm_plugin"], {"vllm", "torch", "triton"}),
        (
            ["jenga_kernels.attention.paged_attention", "jenga_kernels.trial_runs"],
            {"jenga", "vllm"},
        ),
        (["jenga_kernels"], {"torch", "triton"}),
    ],
    ids=[
        "floors_need_no_torch",
        "floors_need_no_engine",
        "plugin_is_light",
        "kernels_alone",
        "exports_are_light",
    ],
)
def test_importing_brings_in_no_more_than_its_floor(modules, forbidden):
    script = f"import {', '.join(modules)}, sys; print(*sys.modules)"

    process = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert forbidden & set(process.stdout.split()) == set()


def test_entry_points_name_functions_that_exist():
    (plugin,) = entry_points(group="vllm.general_plugins", name="jenga")
    (command,) = entry_points(group="console_scripts", name="jenga")

    assert (plugin.value, command.value) == ("jenga.vllm_plugin:register", "jenga.cli:main")
    assert callable(plugin.load())
    assert callable(command.load())


def test_changelog_begins_with_the_version_in_hand():
    version = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]

    headings = re.findall(r"^## \[(.+?)\]", text_of("CHANGELOG.md"), re.MULTILINE)

    assert headings[0] in {"Unreleased", version}
    assert "Unreleased" not in headings[1:]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/testing.md"])
def test_documents_name_targets_the_makefile_has(document):
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))

    named = set(
        re.findall(r"`?make ([a-z-]+)`?", "".join(re.findall(r"`[^`]+`", text_of(document))))
    )

    assert named
    assert named <= targets


def test_docs_describe_the_environment_variables_the_package_reads():
    from jenga.vllm_plugin.settings.environment import KNOWN_VARIABLES

    text = text_of("docs/configuration.md")
    rows = re.findall(r"^\| `(JENGA_\w+)` \|.*\| `(JENGA_\w+)=\S+` \|$", text, re.MULTILINE)

    assert {name for name, _ in rows} == KNOWN_VARIABLES
    assert all(name == example for name, example in rows)


def test_makefile_installs_a_vllm_that_the_plugin_supports():
    from jenga.vllm_plugin.patches.patch import series_of

    (version,) = re.findall(r"^VLLM_VERSION := (.+)$", text_of("Makefile"), re.MULTILINE)

    assert series_of(version)


@pytest.mark.parametrize("path", launcher_files(), ids=lambda path: path.stem)
def test_every_launch_says_that_products_and_sums_are_fused(path):
    # What Triton does where nothing is said changes with its version.
    source = path.read_text(encoding="utf-8")
    launches = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.endswith("kernel")
    ]
    if path.name == "launches.py":  # it launches what others describe, if kernels run at all
        assert len(launches) == 2
        return
    assert not launches
    launches = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"Launch", "launch"}
    ]
    for launch in launches:
        names = {keyword.arg for keyword in launch.keywords}
        is_in_a_mapping = names & {None, "constants"} and '"enable_fp_fusion": True' in source
        assert "enable_fp_fusion" in names or is_in_a_mapping, f"{path}:{launch.lineno}"


# Owners of a request's fields

TABLES, PREFIX, ADMISSION = "jenga/tables/", "jenga/prefix/", "jenga/admission/"
MANAGER = "jenga/manager.py"

FIXED = "jenga/tables/request.py"
"""Owner of fields that only the constructor sets."""

FIELD_OWNERS = {
    "Request": {
        **dict.fromkeys(("branch_tokens", "checkpoints", "facts", "hit_tokens"), FIXED),
        **dict.fromkeys(("is_packed", "name", "owner", "pages"), FIXED),
        **dict.fromkeys(("grows_at", "shrinks_at"), TABLES),
        "expected_tokens": ADMISSION,
        **dict.fromkeys(("commits_at", "committed_tokens", "last_step"), MANAGER),
        **dict.fromkeys(("num_processed_tokens", "num_tokens", "prefix_hashes"), MANAGER),
    },
    "RequestPages": dict.fromkeys(
        (
            *("has_missing", "max_tokens", "num_committed", "num_found", "num_given_up"),
            *("release_at", "small_pages"),
        ),
        TABLES,
    ),
    "RequestCheckpoints": dict.fromkeys(
        (
            *("answer", "last_checkpoint", "num_passed", "pending", "plan", "points_past"),
            "skipped_answer",
        ),
        PREFIX,
    ),
}

CHANGING = {"append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}
"""Methods that change a list or a dictionary."""


def field_of(node):
    """Get the name of a request's field that an expression is, or is an item of."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if not isinstance(node, ast.Attribute):
        return None
    base = ast.unparse(node.value)
    is_request = base in {"request", "other", "own"} or base.endswith((".pages", ".checkpoints"))
    return node.attr if is_request else None


def aliases_in(function):
    """Get the local names that a function gives to fields of requests, with the fields."""
    field_by_name = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            both_tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if both_tuples else [(target, value)]
            for name, part in pairs:
                if isinstance(name, ast.Name) and field_of(part):
                    field_by_name[name.id] = field_of(part)
    return field_by_name


def target_of(node):
    """Get the expression that a node of a syntax tree changes, or None."""
    if isinstance(node, ast.Attribute | ast.Subscript):
        return node if isinstance(node.ctx, ast.Store | ast.Del) else None
    if isinstance(node, ast.AugAssign):
        return node.target
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value if node.func.attr in CHANGING else None
    return None


def changed_fields(source):
    """Get the fields of requests that a module changes, also by a local name for a field."""
    changed = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            aliases = aliases_in(function)
            for target in filter(None, map(target_of, ast.walk(function))):
                changed.add(field_of(target))
                changed.add(aliases.get(ast.unparse(target).split("[")[0]))
    return changed - {None}


def test_every_field_of_a_request_has_an_owner():
    from jenga.tables import request

    for name, owners in FIELD_OWNERS.items():
        assert set(getattr(request, name).__slots__) == set(owners)


def test_fields_of_a_request_are_changed_by_their_owners_alone():
    owner_of = {field: owner for owners in FIELD_OWNERS.values() for field, owner in owners.items()}
    changed_by = {
        path.relative_to(ROOT).as_posix(): changed_fields(path.read_text(encoding="utf-8"))
        for path in (ROOT / "jenga").rglob("*.py")
        if path.parent.name in {"jenga", "tables", "prefix", "admission", "eviction", "arena"}
        and path.name not in {"engine_scheduler.py", "request.py"}
    }

    strangers = {
        (path, field)
        for path, fields in changed_by.items()
        for field in fields & owner_of.keys()
        if not path.startswith(owner_of[field])
    }
    assert strangers == set()
    # Every field that changes after the start is seen to change.
    seen = set().union(*changed_by.values())
    assert {field for field, owner in owner_of.items() if owner != FIXED} <= seen


@pytest.mark.parametrize(
    ("statement", "field"),
    [
        ("request.num_tokens = 1", "num_tokens"),
        ("request.pages.num_found[0] += 1", "num_found"),
        ("request.checkpoints.plan[1] = 2", "plan"),
        ("del request.pages.small_pages[0][1:]", "small_pages"),
        ("request.checkpoints.pending.pop(1)", "pending"),
        ("pages, first = request.pages.small_pages[0], 1; pages.extend([1])", "small_pages"),
        ("own = request.pages; own.max_tokens[1] = 2", "max_tokens"),
        ("plan = request.checkpoints.plan; plan[1] = 2", "plan"),
    ],
)
def test_a_change_of_a_field_is_seen_however_it_is_written(statement, field):
    assert changed_fields(f"def change(request):\n    {statement}") == {field}
    assert changed_fields(f"def read(request):\n    return request.{field}") == set()
