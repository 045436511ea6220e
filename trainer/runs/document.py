"""The page of runs as one HTML document that loads nothing: its styles and scripts are in it, and their hashes, too.

A server sends the document without data, and it asks for them. With data in it, it is a file to mail around.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

from data_prep.atomic import replacing
from trainer.errors import TrainerError

FOLDER = Path(__file__).with_name("page")
_PARTS = re.compile(r'<link rel="stylesheet" href="([\w.]+)">|<script src="([\w.]+)"></script>')
_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:"


def document(data: Any = None) -> tuple[str, str]:
    """The page, and its Content-Security-Policy, which allows only the scripts and styles in it.

    With ``data``, a tree for JSON, the policy is in the document, and allows no connection at all.
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inline(part: re.Match[str]) -> str:
        style, script = part.groups()
        tag, text = ("style", _read(style)) if style else ("script", _read(script))
        hashes[tag].append(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<{tag}>{text}</{tag}>"

    page = _PARTS.sub(inline, _read("index.html"))
    policy = "; ".join([_POLICY, *(f"{tag}-src {' '.join(found)}" for tag, found in hashes.items())])
    if data is None:
        return page, f"{policy}; connect-src 'self'; frame-ancestors 'none'"
    head, mark, rest = page.partition("<!-- data -->")
    assert mark
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return head + meta + f'<script type="application/json" id="data">{_json(data)}</script>' + rest, policy


def write_page(path: Path, data: Any) -> None:
    """Write the page with its data as one file, whole or not at all. Raises TrainerError if it cannot be written."""
    try:
        with replacing(path) as file:
            file.write(document(data)[0].encode())
    except OSError as error:
        raise TrainerError(f"{path} cannot be written: {error.strerror}") from None


def _read(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")


def _json(data: Any) -> str:
    """JSON in which nothing ends the script that contains it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
