"""mkdocs hook: links from docs/ to other files of the repository become the file's name, which a site does not have."""

import re
from typing import Any

_OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+((?:infra|gyre_core|tests|tasks|flows|examples|changelog\.d)[^)#]*|[A-Z]+\.md)\)"
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """`[text](../infra/x.yaml)` as `text (infra/x.yaml)`."""

    def named(match: re.Match[str]) -> str:
        text, path = match[1], match[2]
        return text if path.endswith(text) else f"{text} (`{path}`)"

    return _OUTSIDE.sub(named, markdown)
