"""A hook of MkDocs: a line that is only a link to an example is followed by the example's text."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1]

_LINK = re.compile(r"^\[(examples/\w+\.py)\]\(\1\)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Get a page with the files to which its lines link. MkDocs calls this for each page."""
    return _LINK.sub(_with_file, markdown)


def _with_file(link: re.Match[str]) -> str:
    text = (DOCS / link[1]).read_text(encoding="utf-8")
    return f"{link[0]}\n\n```python\n{text}```"
