"""Text cleaning, shared by everything that tokenizes: it separates words that BERT's own cleaning would glue together.

- A run of whitespace (characters of `str.isspace`: tabs, NEL, U+2028, the no-break space) becomes one space.
- Control characters (such as NUL) and ZERO WIDTH SPACE become a space. BERT's own cleaning deletes them, which turns
  two known words into one unknown word.
- Each symbol or emoji (U+2190 to U+2BFF, U+1F000 to U+1FBFF) becomes a separate word, so that "glad" before an emoji
  is still known. The two letters of a flag stay together, and so does a symbol with its combining marks, variation
  selectors and skin tone.

`tokenizer.py` writes CONTROLS and SYMBOLS into tokenizer.json, so every program that loads it produces the same ids
as the build. The build needs the first two rules earlier, because it splits sentences before it tokenizes: it calls
`clean`, and the tokenizer then finds nothing left to replace.

Everything else is left to BERT's own rules: accents, Chinese characters, soft hyphens, joiners, U+FEFF, U+FFFD. The
ranges are explicit, so that the result does not depend on the Unicode tables of a Python version.
"""

from __future__ import annotations

import re

PARTING = "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u200b"  # control characters except whitespace, and ZERO WIDTH SPACE
SYMBOL = "\u2190-\u2bff\U0001f000-\U0001fbff"
FLAG = "\U0001f1e6-\U0001f1ff"  # regional indicator letters; two of them form a flag
MARK = "\u0300-\u036f\u20d0-\u20ff\ufe0e\ufe0f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f"
# For tokenizer.json. Its readers use other regex engines than Python's; these patterns work in all of them.
CONTROLS = "[\x00-\x1f\x7f-\x9f\u200b]"
SYMBOLS = f"[{FLAG}][{FLAG}]|[{SYMBOL}][{MARK}]*"
# Everything except PARTING and whitespace other than U+0020. Matching a range is a fast loop; searching for
# characters outside it tests each one. Most text is shown to be clean by this match alone.
ORDINARY = " -~\xa1-\u167f\u1681-\u1fff\u200c-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff\u3001-\U0010ffff"

_is_ordinary = re.compile(f"[{ORDINARY}]*").fullmatch
_parting = re.compile(f"[{PARTING}]")


def clean(text: str) -> tuple[str, int]:
    """The text with exactly one space between words and none at its ends; and how many PARTING characters it replaced.

    Clean text is returned unchanged: ``clean(clean(text)[0]) == (clean(text)[0], 0)``.
    """
    changed = 0
    if not _is_ordinary(text):
        text, changed = _parting.subn(" ", " ".join(text.split()))
    while "  " in text:
        text = text.replace("  ", " ")
    return text.strip(" "), changed
