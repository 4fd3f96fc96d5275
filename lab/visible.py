"""Text from elsewhere as a terminal may show it: letters, and nothing that a terminal obeys."""

from __future__ import annotations


def visible(text: str) -> str:
    """The text with control characters, surrogates and marks that turn the direction of writing spelled out."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )
