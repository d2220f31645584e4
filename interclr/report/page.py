"""The page: fixed HTML, style and script from this folder, and everything about the run as one block of JSON.

Names and labels are data. They reach the page only inside the JSON, in which no character can end the block, and the
script puts them into the document as text. A content security policy allows this one script and style and no network.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import Any


def render(content: dict[str, Any]) -> str:
    style, script = _file("page.css"), _file("page.js")
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    )
    parts = {"{{policy}}": policy, "{{style}}": style, "{{script}}": script, "{{content}}": to_json(content)}
    page = _file("page.html")
    # Split at the marks once, so that a mark inside the content is left alone.
    for mark in parts:
        assert page.count(mark) == 1, mark
    pieces: list[str] = []
    for mark in sorted(parts, key=page.index):
        before, _, page = page.partition(mark)
        pieces += [before, parts[mark]]
    return "".join([*pieces, page])


def to_json(content: Any) -> str:
    """Plain ASCII JSON in which nothing can end a ``<script>`` element or a line of one; NaN is an error."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return (resources.files("interclr.report") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
