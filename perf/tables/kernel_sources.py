"""Digests of kernels' code, which tell whether a kernel has changed since a commit.

A digest covers a kernel's functions and everything that they name, over all modules of
`jenga_kernels`. It leaves out comments, docstrings and layout. A second digest covers the functions
that choose tiles. The code that launches a kernel is in neither.

Digests of old commits are read from git once. They are stored beside the rows, in `kernels.json`,
so that tables need no history. After a change of `KERNELS`, delete that file: the next table makes
it anew. A renamed function counts as changed.
"""

import ast
import functools
import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "jenga_kernels"
FILE_NAME = "kernels.json"
DIGEST_CHARACTERS = 12
MACHINE = ("Machine", "machine_of")
"""Names left out of digests: a new field changes a kernel only if something reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Names of the functions that one kernel of a table is made of.

    Attributes:
        kernels: Functions that are launched.
        tiles: Functions that choose their tiles.
    """

    kernels: tuple[str, ...]
    tiles: tuple[str, ...] = ()


KERNELS = {
    "attention_decode": Kernel(
        kernels=("attention_decode_kernel", "attention_splits_kernel"), tiles=("attention_tiles",)
    ),
    "attention_prefill": Kernel(kernels=("attention_prefill_kernel",), tiles=("attention_tiles",)),
    "attention_prefill_hopper": Kernel(
        kernels=("attention_prefill_hopper_kernel",), tiles=("specialized_tiles",)
    ),
    "latent_decode_hopper": Kernel(
        kernels=("latent_decode_hopper_kernel", "attention_splits_kernel"),
        tiles=("specialized_latent_tiles",),
    ),
    "latent_prefill": Kernel(kernels=("latent_prefill_kernel",), tiles=("latent_tiles",)),
    "state_update": Kernel(kernels=("state_update_kernel",), tiles=("state_update_tiles",)),
    "state_scan_channels": Kernel(
        kernels=("state_scan_channels_kernel",), tiles=("channel_scan_tiles",)
    ),
    "state_scan_hopper": Kernel(
        kernels=(
            "state_scan_hopper_kernel",
            "state_scan_specialized_kernel",
            "segment_states_hopper_kernel",
            "pass_states_kernel",
        ),
        tiles=("hopper_scan_tiles", "are_lone", "scan_segment_tokens"),
    ),
    "state_replay_token": Kernel(
        kernels=("replay_weights_kernel", "state_replay_token_kernel"),
        tiles=("token_replay_tiles",),
    ),
    "state_replay": Kernel(
        kernels=("state_replay_kernel", "state_replay_products_kernel"),
        tiles=("state_replay_tiles",),
    ),
    "delta_scan of heads": Kernel(
        kernels=("delta_chunks_heads_kernel", "delta_scan_kernel", "delta_scan_hopper_kernel"),
        tiles=("delta_scan_tiles", "has_hopper_delta_scan", "hopper_programs"),
    ),
    "delta_scan of channels": Kernel(
        kernels=("delta_chunks_channels_kernel", "delta_scan_hopper_kernel"),
        tiles=("delta_scan_tiles", "has_hopper_delta_scan", "hopper_programs"),
    ),
    "delta_update": Kernel(kernels=("delta_update_kernel",), tiles=("delta_update_tiles",)),
    "delta_replay": Kernel(
        kernels=("delta_replay_kernel", "delta_replay_products_kernel"),
        tiles=("delta_replay_tiles",),
    ),
    "causal_conv": Kernel(kernels=("causal_conv_kernel",), tiles=("conv_tiles",)),
    "conv_update": Kernel(kernels=("conv_update_kernel",), tiles=("conv_update_tiles",)),
    "kv_store": Kernel(kernels=("kv_store_kernel",), tiles=("copy_tiles", "line_elements")),
    "latent_store": Kernel(kernels=("latent_store_kernel",), tiles=("copy_tiles",)),
    "page_copy": Kernel(kernels=("page_copy_kernel",), tiles=("page_tiles",)),
    "page_clear": Kernel(kernels=("page_clear_kernel",), tiles=("page_tiles",)),
    "attention_merge": Kernel(kernels=("attention_merge_kernel",), tiles=("copy_tiles",)),
    "token_scores": Kernel(kernels=("token_scores_kernel",), tiles=()),
    "pack_slots": Kernel(kernels=("pack_slots_kernel",), tiles=("copy_tiles",)),
    "dequantise_pages": Kernel(kernels=("dequantise_pages_kernel",), tiles=("copy_tiles",)),
}
"""Name of a kernel in tables -> its functions."""

Digests = dict[str, tuple[str, str]]
"""Kernel -> digests of its code and of its choice of tiles; "" if the commit does not have it."""


@dataclass(frozen=True, slots=True)
class _Module:
    """Top-level definitions of a module, and the names that it imports from the package."""

    definitions: dict[str, list[ast.stmt]]
    imports: dict[str, tuple[str, str]]


def digests_of(sources: Mapping[str, str]) -> Digests:
    """Compute the digests of all kernels of a package.

    Args:
        sources: Module name -> its source text.
    """
    modules = {name: _read(source) for name, source in sources.items()}
    return {
        name: (_digest(modules, kernel.kernels), _digest(modules, kernel.tiles))
        for name, kernel in KERNELS.items()
    }


@functools.cache
def digests_here() -> Digests:
    """Compute the digests of the kernels in this checkout."""
    return digests_of(
        {
            _module_name(path.relative_to(ROOT).as_posix()): path.read_text(encoding="utf-8")
            for path in (ROOT / PACKAGE).rglob("*.py")
        }
    )


def digests_at(commit: str) -> Digests | None:
    """Compute the digests of a commit's kernels; None if git does not know the commit."""
    listed = _git("ls-tree", "-r", "--name-only", commit, PACKAGE)
    if listed is None:
        return None
    names = [name for name in listed.split() if name.endswith(".py")]
    return digests_of(
        {_module_name(name): _git("show", f"{commit}:{name}") or "" for name in names}
    )


def read_digests(folder: Path, commits: Iterable[str]) -> dict[str, Digests]:
    """Return the digests of commits, from the folder's file or else from git.

    New digests are added to the file. A commit that neither knows is left out.
    """
    path = folder / FILE_NAME
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = {
        commit: {name: (code, tiles) for name, (code, tiles) in digests.items()}
        for commit, digests in kept.items()
    }
    wanted = dict.fromkeys(commits)
    new: dict[str, Digests] = {}
    for commit in wanted:
        if commit not in found and (digests := digests_at(commit)) is not None:
            new[commit] = digests
    if new:
        found |= new
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return {commit: found[commit] for commit in wanted if commit in found}


def changed_since(then: Digests | None, kernels: Iterable[str]) -> str:
    """Return what has changed in kernels: "kernel", "tiles", "" or "unknown".

    "tiles" means that the kernels are the same, but not the functions that choose their tiles.
    These may still choose the same tiles for the shape in question.
    """
    if then is None:
        return "unknown"
    here, places = digests_here(), set[int]()
    for name in kernels:
        old = then.get(name, ("", ""))
        places |= {place for place in (0, 1) if old[place] != here[name][place]}
    return "kernel" if 0 in places else "tiles" if places else ""


def _digest(modules: Mapping[str, _Module], names: tuple[str, ...]) -> str:
    """Compute the digest of the named functions and of everything in the package that they name."""
    waiting: list[tuple[str, str]] = []
    for name in names:
        homes = [home for home, module in modules.items() if name in module.definitions]
        if not homes:
            return ""
        waiting += [(home, name) for home in homes]
    texts: dict[tuple[str, str], str] = {}
    while waiting:
        home, name = waiting.pop()
        module = modules.get(home)
        if module is None or (home, name) in texts or name in MACHINE:
            continue
        if name in module.definitions:
            found = module.definitions[name]
            texts[home, name] = "".join("".join(_tokens(node)) for node in found)
            named = {
                each.id for node in found for each in ast.walk(node) if isinstance(each, ast.Name)
            }
            waiting += [(home, each) for each in sorted(named)]
        elif name in module.imports:
            waiting.append(module.imports[name])
    # Modules' names are left out, so that code that only moved counts as the same.
    ordered = sorted(f"{name} {text}" for (_, name), text in texts.items())
    return hashlib.sha256("\n".join(ordered).encode()).hexdigest()[:DIGEST_CHARACTERS]


def _read(source: str) -> _Module:
    tree = ast.parse(source)
    definitions: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        for name in _defined(node):
            definitions.setdefault(name, []).append(node)
    imports = {
        each.asname or each.name: (node.module, each.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        for each in node.names
        if node.module
    }
    return _Module(definitions, imports)


def _defined(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Assign():
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def _tokens(node: object) -> Iterator[str]:
    """Write a tree in the same way in all releases of Python, without docstrings."""
    if isinstance(node, list):
        yield "["
        for each in node:
            yield from _tokens(each)
        yield "]"
    elif isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for field, value in ast.iter_fields(node):
            has_docstring = (
                field == "body"
                and isinstance(node, ast.FunctionDef | ast.ClassDef)
                and ast.get_docstring(node, clean=False) is not None
            )
            # Releases of Python differ in their empty fields, and in their contexts.
            if value is None or value == [] or field in {"ctx", "kind", "type_comment"}:
                continue
            yield f" {field}="
            yield from _tokens(value[1:] if has_docstring else value)
        yield ")"
    else:
        yield repr(node)


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
