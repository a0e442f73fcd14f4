"""Links, outputs of commands and figures in README and docs are what they should be."""

import io
import json
import re
import runpy
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from jenga.cli import main
from jenga.vllm_plugin.patches.patch import SUPPORTED_VERSIONS
from perf.tables import doc_figures
from perf.tables.recipe_plans import RECIPES, ROWS, STOCK, plan_row, read_rows

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LONGEST_README = 150
"""Lines of README; the rest belongs to docs."""


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def text_of(path):
    return path.read_text(encoding="utf-8")


def prose_of(path):
    """Get a page without its blocks of code and its code spans."""
    text = re.sub(r"^ *```.*?^ *```$", "", text_of(path), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def glossary():
    """Get the words of the glossary, in order."""
    table = text_of(ROOT / "docs/concepts.md").partition("| word | meaning |\n|---|---|\n")[2]
    return re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)


def sources():
    """Get the texts of all modules of the manager and of the plugin."""
    return [text_of(path) for path in sorted((ROOT / "jenga").rglob("*.py"))]


def links_of(path):
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose_of(path))


def anchors_of(path):
    """Get the anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^ *```.*?^ *```$", "", text_of(path), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    words = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in words]


def printed(arguments):
    """Get the lines that `jenga` prints, and fail where it does."""
    output = io.StringIO()
    with redirect_stdout(output):
        assert main(arguments) == 0
    return output.getvalue().splitlines()


def consoles():
    """Yield the commands in console blocks of all pages, each with the output shown."""
    for path in PAGES:
        for block in re.findall(r"^```console\n\$ ([^`]*?)^```", text_of(path), re.MULTILINE):
            command, *lines = block.splitlines()
            yield pytest.param(command, lines, id=f"{name_of(path)}: {command}")


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(path):
    broken = []
    for link in links_of(path):
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)

    assert not broken


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_pages_of_docs_link_to_pages_of_docs_alone(path):
    # The site has no other files.
    if "docs" not in path.relative_to(ROOT).parts:
        return
    for link in links_of(path):
        if not re.match(r"https?://|#", link):
            target = (path.parent / link.partition("#")[0]).resolve()
            assert target.is_relative_to(ROOT / "docs"), link


def test_every_page_of_docs_is_in_the_sites_navigation():
    config = text_of(ROOT / "docs" / "site" / "mkdocs.yml").split("\nnav:\n")[1]

    named = re.findall(r"(\S+\.md)$", config, re.MULTILINE)

    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(pages)


def test_the_site_shows_the_text_of_examples_as_it_is_in_their_files():
    folder = ROOT / "docs" / "site"
    assert "hooks:\n  - included_files.py" in text_of(folder / "mkdocs.yml")
    on_page_markdown = runpy.run_path(str(folder / "included_files.py"))["on_page_markdown"]
    page = text_of(ROOT / "docs" / "layer-types.md")

    shown = re.findall(r"```python\n(.*?)```", on_page_markdown(page, page=None), re.DOTALL)

    examples = [text_of(path) for path in sorted((ROOT / "docs" / "examples").glob("*.py"))]
    assert len(examples) > 1
    assert [text for text in shown if text in examples] == examples


def test_readme_leads_to_every_page_that_is_no_lab_note():
    linked = {link.partition("#")[0] for link in links_of(ROOT / "README.md")}
    through_index = {f"docs/{link}" for link in links_of(ROOT / "docs" / "index.md")}

    pages = {name_of(path) for path in (ROOT / "docs").glob("*.md")} - {"docs/index.md"}

    assert pages <= linked | through_index
    assert "docs/index.md" in linked


def test_readme_lists_the_versions_of_vllm_that_are_served():
    rows = re.findall(r"^\| (\d+\.\d+) \|", text_of(ROOT / "README.md"), re.MULTILINE)

    assert tuple(rows) == SUPPORTED_VERSIONS


def test_the_table_of_operations_names_every_operation():
    text = text_of(ROOT / "docs" / "kernels.md").split("## Operations")[1].split("\n## ")[0]
    rows = "".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
    operations = {
        path.stem
        for path in (ROOT / "jenga_kernels" / "reference").rglob("*.py")
        if path.name != "__init__.py"
    }

    assert set(re.findall(r"`(\w+)`", rows)) == operations


def test_readme_is_short():
    assert len(text_of(ROOT / "README.md").splitlines()) <= LONGEST_README


@pytest.mark.parametrize(("command", "lines"), consoles())
def test_commands_print_what_a_page_shows(command, lines):
    program, *arguments = shlex.split(command)
    assert program == "jenga"
    if any(line.startswith("vLLM's planner") for line in lines):
        pytest.importorskip("vllm", reason="vLLM is not installed")
    else:
        arguments.append("--without-vllm")

    output = "\n".join(["", *printed(arguments), ""])

    # A line of three dots stands for any lines, also for none.
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(f"{line}\n") for line in lines)
    assert re.fullmatch(pattern, output[1:]), output


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.model)
def test_plans_of_recipes_are_those_of_the_rows(recipe):
    (row,) = (row for row in read_rows(ROWS) if row["model"] == recipe.model)
    del row["machine"], row["systems"][STOCK]

    assert plan_row(recipe, with_vllm=False) == row


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.model)
def test_plans_of_vllm_are_those_of_the_rows(recipe):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    (row,) = (row for row in read_rows(ROWS) if row["model"] == recipe.model)

    assert plan_row(recipe, with_vllm=True)["systems"] == row["systems"]


def test_every_recipe_has_a_command_for_its_model():
    text = text_of(ROOT / "docs" / "recipes.md")
    commands = re.findall(r"^vllm serve (\S+) (.*)$", text, re.MULTILINE)

    known = {line.split()[0]: line.split()[1] for line in printed(["plan", "--list"])[1:]}
    served = dict(commands)

    for recipe in RECIPES:
        options = served[known[recipe.model]]
        assert "--attention-backend JENGA_TRITON" in options
        found = re.search(r"--tensor-parallel-size (\d+)", options)
        assert int(found[1] if found else 1) == recipe.num_gpus


def test_requests_that_fit_with_histories_are_those_of_the_page():
    text = text_of(ROOT / "docs" / "recurrent-states.md")
    rows = re.findall(r"^\| (\S+) \| (one|two) H200 \| (\d+) \| (\d+) \|$", text, re.MULTILINE)

    assert rows
    for model, ranks, without, with_history in rows:
        arguments = ["plan", model, "--gpu", "H200", "--tp", str(["one", "two"].index(ranks) + 1)]
        arguments += ["--draft-tokens", "3", "--length", "8192", "--without-vllm", "--json"]
        counted = [
            json.loads("\n".join(printed([*arguments, *further])))["systems"][0]["fits"][0]
            for further in (["--history-tokens", "0"], [])
        ]
        assert [fit["num_requests"] for fit in counted] == [int(without), int(with_history)]


def test_figures_are_those_of_the_rows():
    wrong = doc_figures.write(checks_only=True)

    assert not wrong, "python -m perf.tables.doc_figures draws them"


def test_figures_are_drawn_anew(tmp_path):
    assert doc_figures.write(checks_only=False, folder=tmp_path) == list(doc_figures.FIGURES)
    assert doc_figures.write(checks_only=True, folder=tmp_path) == []


@pytest.mark.parametrize("name", doc_figures.FIGURES)
def test_figures_are_whole_and_have_a_title(name):
    root = ET.parse(doc_figures.IMAGES / name).getroot()

    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.find("{http://www.w3.org/2000/svg}title").text


def test_words_of_the_glossary_are_in_order_and_occur_in_the_code():
    # Words of identifiers are joined by underscores or by capitals.
    text = re.sub(r"(?<=[a-z])(?=[A-Z])|[_\s-]+", " ", " ".join(sources())).lower()
    words = glossary()

    assert words == sorted(set(words))
    unused = [
        word for word in words if not re.search(rf"\b{re.escape(word.replace('-', ' '))}", text)
    ]
    assert not unused


def test_words_that_docstrings_define_are_in_the_glossary():
    defined = {
        word
        for text in sources()
        for docstring in re.findall(r'"""(.*?)"""', text, re.DOTALL)
        for word in re.findall(r"(?<![*\w`])\*([a-z]+(?: [a-z]+)*)\*(?![*\w`])", docstring)
    }
    # A page that a checkpoint pins is pinned.
    words = {*glossary(), "pinned"}

    assert {"loose", "rank", "in use"} <= defined
    assert not defined - words
