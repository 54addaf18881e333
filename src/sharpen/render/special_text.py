"""Keep special-token text that people and tools wrote from acting as special tokens.

`renderer.py` replaces such text by sentinels before a chat template runs, and encodes the sentinels
afterwards as the plain characters that they stand for. So no message, tool result or schema can
open or close a turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from sharpen.types import SharpenError

# A sentinel starts with a Unicode noncharacter. The noncharacter itself is replaced as well where a
# text contains it, so no text can forge a sentinel.
_MARK = "\ufdd0"
_MARK_END = "\ufdd1"
_SENTINEL = re.compile(f"{_MARK}(\\d+){_MARK_END}")


class SpecialText:
    """Replaces a tokenizer's special-token text by sentinels, and finds them again."""

    def __init__(self, tokenizer: Any, special: Iterable[str]):
        # longest first: a special token may be the beginning of another
        self._texts = [*sorted(special, key=len, reverse=True), _MARK]
        self._literal_ids = [_encode_literally(tokenizer, text) for text in self._texts]
        self._sentinels = {}
        for number, text in enumerate(self._texts):
            self._sentinels[text] = f"{_MARK}{number}{_MARK_END}"
        self._pattern = re.compile("|".join(re.escape(text) for text in self._texts))

    def protect(self, text: str) -> str:
        """Replace special-token text by sentinels."""
        if not self._pattern.search(text):
            return text
        return self._pattern.sub(lambda match: self._sentinels[match[0]], text)

    def unprotect(self, text: str) -> str:
        """Replace sentinels by the text that they stand for."""
        if _MARK not in text:
            return text
        return _SENTINEL.sub(lambda match: self._texts[int(match[1])], text)

    def protect_all(self, value: Any) -> Any:
        """Protect every string of a JSON value, keys included."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, list):
            return [self.protect_all(item) for item in value]
        if isinstance(value, dict):
            return {self.protect(key): self.protect_all(item) for key, item in value.items()}
        return value

    def split(self, text: str) -> Sequence[str]:
        """Cut a text at its sentinels: plain text and sentinel numbers in turn."""
        if _MARK not in text:
            return (text,)
        return _SENTINEL.split(text)

    def literal_ids(self, number: int) -> list[int]:
        """Returns the ids of the plain characters that a sentinel stands for."""
        return self._literal_ids[number]


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the text and id of every special token."""
    added = tokenizer.added_tokens_decoder
    return {token.content: index for index, token in added.items() if token.special}


def _encode_literally(tokenizer: Any, text: str) -> list[int]:
    """Encode special-token text as the plain characters that it consists of."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if set(special_tokens(tokenizer).values()).intersection(ids):
        raise SharpenError(f"{tokenizer.name_or_path}: cannot encode {text!r} as plain text")
    return ids
