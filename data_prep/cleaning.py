"""Cleaning: what parts words that BERT's own cleaning would glue together, in one place for all who tokenize.

- White space (each character of `str.isspace`: tabs, NEL, U+2028, the no-break space), one or a run: one space.
- Control characters (NUL and the like) and ZERO WIDTH SPACE: a space. BERT's own cleaning deletes them, which makes
  one unknown word of two known ones.
- Symbols and emoji (U+2190 to U+2BFF, U+1F000 to U+1FBFF): each a word of its own, so that the "glad" before an
  emoji is still known. The two letters of a flag stay together, and a symbol with its combining marks, variation
  selectors and skin tone.

`tokenizer.py` writes CONTROLS and SYMBOLS into tokenizer.json, so every program that loads it gives the same ids as
the build. `clean` does the first two for the build alone, which splits sentences before it tokenizes; the tokenizer
then finds nothing left to replace.

All else is left to BERT's own rules: accents, Chinese characters, soft hyphens, joiners, U+FEFF, U+FFFD. The ranges
are spelled out, so that the result does not depend on the Unicode tables of a Python version.
"""

from __future__ import annotations

import re

PARTING = "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u200b"  # control characters that are no white space, and one more
SYMBOL = "\u2190-\u2bff\U0001f000-\U0001fbff"
FLAG = "\U0001f1e6-\U0001f1ff"  # letters, two of which are a flag
MARK = "\u0300-\u036f\u20d0-\u20ff\ufe0e\ufe0f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f"
# For tokenizer.json. Its readers have other regular expressions than Python's: these use what all of them know.
CONTROLS = "[\x00-\x1f\x7f-\x9f\u200b]"
SYMBOLS = f"[{FLAG}][{FLAG}]|[{SYMBOL}][{MARK}]*"
# All that is neither white space (but U+0020) nor PARTING. A range can be counted in a fast loop, where a search for
# what is outside of it asks about each character: most text is proved clean by this alone.
ORDINARY = " -~\xa1-\u167f\u1681-\u1fff\u200c-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff\u3001-\U0010ffff"

_is_ordinary = re.compile(f"[{ORDINARY}]*").fullmatch
_parting = re.compile(f"[{PARTING}]")


def clean(text: str) -> tuple[str, int]:
    """The text with exactly one space between words and none at its ends, and how many of PARTING were replaced.

    What is clean comes back as it is: ``clean(clean(text)[0]) == (clean(text)[0], 0)``.
    """
    changed = 0
    if not _is_ordinary(text):
        text, changed = _parting.subn(" ", " ".join(text.split()))
    while "  " in text:
        text = text.replace("  ", " ")
    return text.strip(" "), changed
