"""Keep copies out of the built data: across splits, and within one file.

`build.fill_file` shows every row to one `Guard`, held-out splits first.
"""

from __future__ import annotations

from sharpen.data.overlap import MAX_OVERLAP, comparable_texts, overlap_candidates
from sharpen.types import Dialog, Task
from sharpen.world.fields import Family


class Guard:
    """Remembers the rows that were admitted and refuses copies of them.

    Across splits no request may occur twice, no 13 words in a row, and no near copy. Within one
    file no request may occur twice, even with other values.
    """

    def __init__(self) -> None:
        self._split_of: dict[str, Family] = {}  # a request, or 13 words in a row → its split
        self._requests: set[tuple[str, str]] = set()  # file and request, with and without values
        # split → word → the sets of words of the rows that contain it
        self._rows_with: dict[Family, dict[str, set[frozenset[str]]]] = {}

    def admit(
        self, row: Dialog | Task, split: Family, file: str, values_count: bool = False
    ) -> bool:
        """Returns whether the row may stand in `file`, and remembers it if so.

        With `values_count`, requests of one file may differ in their values alone.
        """
        request, masked_request, words, word_runs = comparable_texts(row)
        request_in_file = request if values_count else masked_request
        if not words or (file, request_in_file) in self._requests:
            return False
        texts = [request, *word_runs]
        if any(self._split_of.get(text, split) != split for text in texts):
            return False
        if self._is_near_copy(words, split):
            return False

        for text in texts:
            self._split_of[text] = split
        self._requests |= {(file, masked_request), (file, request)}
        rows_with = self._rows_with.setdefault(split, {})
        for word in words:
            rows_with.setdefault(word, set()).add(words)
        return True

    def _is_near_copy(self, words: frozenset[str], split: Family) -> bool:
        """Returns whether a row of another split has nearly the same words."""
        for other_split, rows_with in self._rows_with.items():
            if other_split == split:
                continue
            for other_words in overlap_candidates(words, rows_with, MAX_OVERLAP):
                if len(words & other_words) > MAX_OVERLAP * len(words | other_words):
                    return True
        return False
