"""Cleaning of a paragraph before it is split: only what would otherwise cost BERT's tokenizer words.

- White space (each character of `str.isspace`: tabs, NEL, U+2028, the no-break space), one or a run: one space.
- Control characters (NUL and the like) and ZERO WIDTH SPACE: a space. They part words; BERT's own cleaning deletes
  them, which glues two known words into an unknown one.
- Symbols and emoji (U+2190 to U+2BFF, U+1F000 to U+1FBFF): each a word of its own, so that the "glad" before an
  emoji is still known. What Unicode joins stays together: a flag, and a symbol with its combining marks, variation
  selectors, skin tone, tags, and ZERO WIDTH JOINER with the next symbol (which BERT's own cleaning then deletes).

All else is left to the tokenizer: accents, Chinese characters, soft hyphens, other joiners, U+FEFF, U+FFFD. The
ranges are spelled out, so that the result does not depend on the Unicode tables of a Python version.
"""

from __future__ import annotations

import re

PARTING = "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u200b"  # control characters that are no white space, and one more
SYMBOL = "\u2190-\u2bff\U0001f000-\U0001fbff"
FLAG = "\U0001f1e6-\U0001f1ff"  # letters, two of which are a flag
MARK = "\u0300-\u036f\u20d0-\u20ff\ufe0e\ufe0f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f"
# All that is neither white space (but U+0020) nor PARTING nor SYMBOL. A range can be counted in a fast loop, where
# a search for what is outside of it asks about each character: most text is proved clean by this alone.
ORDINARY = (
    " -~\xa1-\u167f\u1681-\u1fff\u200c-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u218f\u2c00-\u2fff"
    "\u3001-\U0001efff\U0001fc00-\U0010ffff"
)

_is_ordinary = re.compile(f"[{ORDINARY}]*").fullmatch
_parting = re.compile(f"[{PARTING}]")
_sequence = re.compile(f"[{SYMBOL}](?:(?<=[{FLAG}])[{FLAG}]|[{MARK}]*(?:\u200d[{SYMBOL}][{MARK}]*)*)")


def clean(text: str) -> tuple[str, int]:
    """The text with exactly one space between words and none at its ends, and how many characters were changed.

    White space is not counted; a symbol is, if a space had to be put beside it, with all that it is joined to.
    What is clean comes back as it is: ``clean(clean(text)[0]) == (clean(text)[0], 0)``.
    """
    changed = 0
    if not _is_ordinary(text):
        text = " ".join(text.split())
        if not _is_ordinary(text):
            text, changed = _part(text)
    while "  " in text:
        text = text.replace("  ", " ")
    return text.strip(" "), changed


def _part(text: str) -> tuple[str, int]:
    """Text without white space but U+0020, with spaces for what parts words and around symbols; their number."""
    text, parted = _parting.subn(" ", text)
    glued = sum(len(match[0]) for match in _sequence.finditer(text) if _is_glued(match))
    return _sequence.sub(r" \g<0> ", text), parted + glued


def _is_glued(match: re.Match[str]) -> bool:
    start, end = match.span()
    before, after = match.string[max(start - 1, 0) : start], match.string[end : end + 1]
    return before not in ("", " ") or after not in ("", " ")
