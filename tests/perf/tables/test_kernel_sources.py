"""A kernel counts as changed where code that it is made of is, wherever that lies."""

import subprocess

import pytest

from perf.tables import kernel_sources
from perf.tables.kernel_sources import KERNELS, Kernel, changed_since, digests_here, digests_of

KERNEL = '''\
"""What it does."""

from jenga_kernels.triton.shared import step
from jenga_kernels.triton.lib.tiles import UNUSED


@triton.jit
def one_kernel(out_ptr):
    """Program p does it."""
    step(out_ptr)  # in place


def launch():
    one_kernel[(1,)]()
'''
SHARED = (
    "WIDTH = 16\n\n\ndef step(ptr):\n    return ptr + WIDTH\n\n\ndef other(ptr):\n    return ptr\n"
)
TILES = "class Machine:\n    name: str\n\n\ndef one_tiles(machine: Machine):\n    return 64\n"


@pytest.fixture
def digests(monkeypatch):
    """Digests of a package with one kernel, changed as asked."""
    kernel = Kernel(kernels=("one_kernel",), tiles=("one_tiles",))
    monkeypatch.setattr(kernel_sources, "KERNELS", {"one": kernel})

    def of(old="", new="", **moved):
        sources = {"jenga_kernels.triton.one": KERNEL, "jenga_kernels.triton.shared": SHARED}
        sources["jenga_kernels.triton.lib.tiles"] = TILES
        sources |= moved
        return digests_of({name: text.replace(old, new) for name, text in sources.items()})["one"]

    return of


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("# in place", "# there", id="comment"),
        pytest.param("Program p does it", "Program p did it", id="docstring"),
        pytest.param("ptr + WIDTH", "(ptr\n        + WIDTH)", id="layout"),
        pytest.param("one_kernel[(1,)]()", "one_kernel[(2,)]()", id="launch"),
        pytest.param("return ptr\n", "return ptr - 1\n", id="what_it_does_not_call"),
        pytest.param("name: str", "name: str\n    cores: int", id="what_is_known_of_a_machine"),
    ],
)
def test_a_digest_leaves_out_what_a_kernel_is_not_made_of(digests, old, new):
    assert digests(old, new) == digests()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("step(out_ptr)", "step(out_ptr + 1)", id="the_kernel"),
        pytest.param("ptr + WIDTH", "ptr - WIDTH", id="what_it_calls"),
        pytest.param("WIDTH = 16", "WIDTH = 32", id="a_constant_that_this_names"),
    ],
)
def test_a_digest_changes_with_all_that_a_kernel_is_made_of(digests, old, new):
    (code, tiles), (changed, same) = digests(), digests(old, new)

    assert changed != code
    assert same == tiles


def test_tiles_have_a_digest_of_their_own(digests):
    (code, tiles), (same, changed) = digests(), digests("return 64", "return 32")

    assert same == code
    assert changed != tiles


def test_a_kernel_that_is_not_there_has_no_digest(digests):
    assert digests("one_kernel", "another_kernel")[0] == ""


def test_every_kernel_of_tables_is_in_the_package():
    assert all(code and tiles for code, tiles in digests_here().values())


def test_what_has_changed_is_told_in_a_word():
    here = digests_here()
    first, second = list(KERNELS)[:2]
    code, tiles = here[first]

    assert changed_since(here, [first, second]) == ""
    assert changed_since(here | {first: ("other", tiles)}, [first, second]) == "kernel"
    assert changed_since(here | {first: (code, "other")}, [first, second]) == "tiles"
    assert changed_since(here | {first: (code, "other")}, [second]) == ""
    assert changed_since({}, [first]) == "kernel"
    assert changed_since(None, [first]) == "unknown"


def test_digests_of_a_commit_are_read_from_git_once(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_sources, "ROOT", tmp_path)
    monkeypatch.setattr(kernel_sources, "KERNELS", {"one": Kernel(kernels=("one_kernel",))})
    package = tmp_path / "jenga_kernels" / "triton"
    package.mkdir(parents=True)
    (package / "one.py").write_text("def one_kernel():\n    pass\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "One")):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    commit = subprocess.run(
        ["git", "-C", tmp_path, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()

    found = kernel_sources.read_digests(tmp_path, [commit, "unknown"])
    monkeypatch.setattr(kernel_sources, "ROOT", tmp_path / "no repository")

    assert list(found) == [commit]
    assert found[commit]["one"][0]
    assert kernel_sources.read_digests(tmp_path, [commit, "unknown"]) == found
