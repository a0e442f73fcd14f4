"""Check the English of docstrings and comments: `python -m tests.plain_english [PATH ...]`.

It finds patterns that a reader has to decode: first words without a noun, people's pronouns for
requests and pages, and long sentences. It prints one line for each and exits with 1 if there are
any. Code, error messages and the pages of `docs/` are not read.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

PATHS = ("jenga", "jenga_kernels", "perf")
"""What is checked where no path is given."""

MOST_WORDS = 30
"""Words of a sentence. Names in code, numbers and shapes count as one each."""

PATTERNS = {
    r"^(What|Whatever|Which|Who|Whoever|Whose)\b(?!.*\?$)": "begin with a noun or a verb",
    r"^(Where|When)\b(?=[^,]*$)": "begin with a noun or a verb",
    r"^(Of|Beside|Besides|But)\b": "begin with a noun or a verb",
    r"^Note (that|how|what|which|where|when|whether|one|the|a)\b": "write Record or Mark",
    r"\b(who|whom|whoever|nobody|somebody)\b": "name the request, the page or the user",
    r"\bbut for\b": "write except",
    r"\bin place of\b": "write instead of",
    r"\bOf (which|whom|these|those|the latter)\b": "name the thing",
}
"""Patterns, and what to write instead. Those with `^` are about a text's first word."""

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Source):$")
ENTRY = re.compile(r"^\s+[\w*.\[\], `]+: ")


def main(arguments: list[str]) -> int:
    """Print what is found in files and folders, and count it."""
    paths = [Path(each) for each in arguments] or [ROOT / each for each in PATHS]
    num_found = 0
    for path in paths:
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            for line, message in faults(file.read_text(encoding="utf-8")):
                num_found += 1
                sys.stdout.write(f"{file}:{line}: {message}\n")
    return 1 if num_found else 0


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Find faults in a module's texts: their line, and a message."""
    for line, text in sorted(texts(source)):
        for part in parts(text):
            for pattern, advice in PATTERNS.items():
                found = re.search(pattern, part)
                if found:
                    yield line, f"{found[0]!r} in {part[:60]!r}: {advice}"
            for sentence in re.split(r"(?<=[.?!;:])\s+(?=[A-Z`(a-z])", part):
                num_words = len(re.sub(r"`[^`]*`|\[[^\]]*\]", "x", sentence).split())
                if num_words > MOST_WORDS:
                    yield line, f"{num_words} words in {sentence[:60]!r}: cut the sentence"


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Get the docstrings of a module, of its constants too, and its blocks of comments."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value.value
                if isinstance(value, str):
                    yield statement.lineno, value
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(
            r"#( ?(type|pyright|noqa|ruff)\b|!)", token.string
        ):
            continue
        stands_alone = token.line.lstrip().startswith("#")
        if block and not (stands_alone and token.start[0] == last + 1):
            yield start, "\n".join(block)
            block = []
        if not block:
            start = token.start[0]
        block.append(token.string.lstrip("# "))
        last = token.start[0]
    if block:
        yield start, "\n".join(block)


def parts(text: str) -> Iterator[str]:
    """Cut a text into paragraphs, entries of lists and of sections; leave code out."""
    lines: list[str] = []
    for line in [*text.expandtabs().splitlines(), ""]:
        stripped = line.strip()
        is_code = re.match(r"(>>>|\.\.\. |\$ |\|)", stripped) or re.match(r"\s{8,}\S+\s{2,}", line)
        begins = ENTRY.match(line) or re.match(r"[-*] |\d+\. ", stripped)
        if not stripped or is_code or begins or SECTION.match(stripped):
            if lines:
                yield " ".join(lines)
            lines = []
        if stripped and not is_code and not SECTION.match(stripped):
            entry = ENTRY.match(line)
            lines.append(line[entry.end() :].strip() if entry else re.sub(r"^[-*] ", "", stripped))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
