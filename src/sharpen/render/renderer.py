"""Dialog → token ids with a loss mask, and sampled ids → Message.

Training data, prompts of policies and reward models all come from `Renderer`. A dialog becomes runs
of text: what the assistant sampled is trained, the rest is not. Every run is tokenised on its own,
because a run boundary is where sampling began: so trained ids look exactly like sampled ids.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np

from sharpen.calls import parse_message
from sharpen.render.special_text import SpecialText, special_tokens
from sharpen.render.templates import (
    HERMES_GENERATION_PROMPT,
    Run,
    check_dialog,
    choose_template,
    hermes_runs,
    not_append_only_error,
)
from sharpen.rows import message_to_wire, tool_to_wire
from sharpen.types import Datum, Dialog, Json, Message, RowError, SharpenError

_BATCH_SIZE = 256  # dialogs tokenised together
_END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
_TOOL_LINE_START = '{"name":'
# the boundary between two lines of our tools block
_TOOL_LINE_BOUNDARY = re.compile(r"(?<=\}\n)(?=\{\"name\":|</tools>)|(?<=<tools>\n)(?=\{\"name\":)")
MAX_KNOWN_LINES = 20_000  # tool lines whose ids are cached

_T = TypeVar("_T")


class Renderer:
    """Renders dialogs for one tokenizer.

    `template` is "model" (the model's own chat template), "hermes" (ours), or "auto": the model's
    own if it supports tools, otherwise ours.
    """

    def __init__(self, tokenizer: Any, template: str = "auto"):
        if not getattr(tokenizer, "is_fast", False):
            reason = "only fast tokenizers are supported; the model folder needs a tokenizer.json"
            raise SharpenError(f"{tokenizer.name_or_path or 'tokenizer'}: {reason}")
        self.tokenizer = tokenizer
        self.template = choose_template(tokenizer, template)  # None is ours
        self.special = special_tokens(tokenizer)
        self._special_text = SpecialText(tokenizer, self.special)
        stops = (tokenizer.eos_token, *_END_OF_TURN_TOKENS)
        self.stop_ids = frozenset(self.special[token] for token in stops if token in self.special)
        if not self.stop_ids:
            raise SharpenError(f"{tokenizer.name_or_path}: the tokenizer has no end-of-turn token")
        _check_segmentation(tokenizer)
        self._splits_tool_lines = _can_split_tool_lines(tokenizer)
        self._tool_line_ids: dict[str, list[int]] = {}  # a cache: the same tools come again

    def render(self, dialogs: Iterable[Dialog]) -> Iterator[Datum]:
        """Turn dialogs into training data.

        Raises RowError for a dialog that cannot be rendered or has no token to train on.
        """
        for batch in batched(dialogs, _BATCH_SIZE):
            yield from self._tokenise([(dialog, self._cut_runs(dialog)[:-1]) for dialog in batch])

    def plain(self, text: Any, where: str, max_length: int) -> list[Datum]:
        """Turn a text for continued pre-training into data in which every token carries loss.

        A long text is cut into pieces. Each begins with the last token of the one before it, which
        is untrained there.
        """
        if not isinstance(text, str) or not text.strip():
            raise RowError(where, "text: expected words")
        text_ids = self.encode([self._special_text.protect(text)])[0]
        ids = np.array([*text_ids, self.tokenizer.eos_token_id], np.int32)
        pieces = []
        for start in range(0, len(ids) - 1, max_length - 1):
            piece_ids = ids[start : start + max_length]
            mask = np.ones(len(piece_ids), bool)
            if start > 0:
                mask[0] = False
            pieces.append(Datum(piece_ids, mask, where))
        return pieces

    def prompt(self, dialog: Dialog) -> list[int]:
        """Returns ids that end where the assistant's next turn begins."""
        return self.encode([self._text_with_generation_prompt(dialog)])[0]

    def continuation(self, before: Dialog, new: Sequence[Message]) -> list[int]:
        """Returns the ids from the assistant's last sampled token to the start of its next turn.

        `before` ends with the sampled turn, and `new` are the messages after it. The next prompt is
        the last prompt + the sampled ids + this continuation: no sampled token is tokenised again.
        """
        # The text of the sampled turn does not matter, only what the template puts after it.
        if self.template is None:  # our template does not look at earlier turns
            last_turn = Dialog((Message("assistant"), *new))
            text, _ = hermes_runs(last_turn, self._special_text.protect)[-1]
            return self.encode([text + HERMES_GENERATION_PROMPT])[0]
        after = replace(before, messages=(*before.messages, *new))
        known_text = "".join(text for text, _ in self._cut_runs(before)[:-1])
        full_text = self._text_with_generation_prompt(after)
        if not full_text.startswith(known_text):
            raise not_append_only_error(before.id, len(before.messages))
        return self.encode([full_text[len(known_text) :]])[0]

    def parse(self, ids: Sequence[int]) -> Message:
        """Turn sampled ids into the assistant's message; the stop token ends the content."""
        end = len(ids)
        for index, token in enumerate(ids):
            if token in self.stop_ids:
                end = index
                break
        text = self.tokenizer.decode(
            list(ids[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return parse_message(text)

    # Text ------------------------------------------------------------------------------------

    def _cut_runs(self, dialog: Dialog) -> list[Run]:
        """Returns untrained and trained runs in turn; the last is the text after the last turn."""
        check_dialog(dialog)
        if self.template is None:
            return hermes_runs(dialog, self._special_text.protect)
        return self._template_runs(dialog)

    def _text_with_generation_prompt(self, dialog: Dialog) -> str:
        """Returns the whole dialog as text, up to the start of the assistant's next turn."""
        check_dialog(dialog)
        if self.template is None:
            runs = hermes_runs(dialog, self._special_text.protect)
            return "".join(text for text, _ in runs) + HERMES_GENERATION_PROMPT
        messages, tools = self._to_wire(dialog)
        return self._apply_template(messages, tools, generation_prompt=True)

    def _template_runs(self, dialog: Dialog) -> list[Run]:
        """Cut a dialog into runs by the model's own template.

        An assistant turn is what the template adds after the generation prompt.
        """
        messages, tools = self._to_wire(dialog)
        full_text = self._apply_template(messages, tools, generation_prompt=False)
        runs: list[Run] = []
        position = 0
        for index, message in enumerate(dialog.messages):
            if message.role != "assistant":
                continue
            before = self._apply_template(messages[:index], tools, generation_prompt=True)
            after = self._apply_template(messages[: index + 1], tools, generation_prompt=False)
            if not (full_text.startswith(after) and after.startswith(before)):
                raise not_append_only_error(dialog.id, index)
            start = len(before)
            end = self._end_of_turn(after, start)
            runs.append((full_text[position:start], False))
            runs.append((full_text[start:end], message.trained))
            position = end
        runs.append((full_text[position:], False))
        return runs

    def _end_of_turn(self, text: str, start: int) -> int:
        """Returns where the stop token ends of the turn that begins at `start` and ends the text.

        Templates write more after it, such as a line break, which is never sampled.
        """
        ends = []
        for token, index in self.special.items():
            if index in self.stop_ids:
                end = text.rfind(token, start) + len(token)
                if end > start:
                    ends.append(end)
        return max(ends, default=len(text))

    def _apply_template(
        self, messages: list[Json], tools: list[Json] | None, generation_prompt: bool
    ) -> str:
        """Run the model's own template; what it raises becomes a one-line error."""
        if not messages:
            raise SharpenError("a dialog cannot begin with the assistant in this model's template")
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                chat_template=self.template,
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # a template can raise anything, in its author's own words
            raise SharpenError(f"chat template: {' '.join(str(error).split())}") from error

    def _to_wire(self, dialog: Dialog) -> tuple[list[Json], list[Json] | None]:
        """Returns messages and tools as templates take them, with special-token text protected."""
        protect_all = self._special_text.protect_all
        messages = [protect_all(message_to_wire(message)) for message in dialog.messages]
        tools = [protect_all(tool_to_wire(tool)) for tool in dialog.tools]
        return messages, tools or None

    # Ids -------------------------------------------------------------------------------------

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn texts into ids. Special tokens in a text are tokens, sentinels plain characters."""
        pieces_of_texts = [self._split_pieces(text) for text in texts]
        all_pieces = chain.from_iterable(pieces_of_texts)
        distinct = dict.fromkeys(piece for piece in all_pieces if isinstance(piece, str))
        if len(self._tool_line_ids) > MAX_KNOWN_LINES:
            self._tool_line_ids.clear()
        unknown = [text for text in distinct if text not in self._tool_line_ids]
        backend = self.tokenizer.backend_tokenizer
        encodings = backend.encode_batch_fast(unknown, add_special_tokens=False)
        ids_of_text: dict[str, list[int]] = {}
        for text, encoding in zip(unknown, encodings, strict=True):
            ids_of_text[text] = encoding.ids
            if text.startswith(_TOOL_LINE_START):
                self._tool_line_ids[text] = ids_of_text[text]
        result = []
        for pieces in pieces_of_texts:
            ids: list[int] = []
            for piece in pieces:
                if isinstance(piece, int):
                    ids += self._special_text.literal_ids(piece)
                elif piece in ids_of_text:
                    ids += ids_of_text[piece]
                else:
                    ids += self._tool_line_ids[piece]
            result.append(ids)
        return result

    def _split_pieces(self, text: str) -> list[str | int]:
        """Cut a text into texts to encode and numbers of sentinels.

        The line of a tool becomes a piece of its own where that changes no token. The same tools
        come again and again, and so are encoded once.
        """
        pieces: list[str | int] = []
        for index, part in enumerate(self._special_text.split(text)):
            is_sentinel = index % 2 == 1
            if is_sentinel:
                pieces.append(int(part))
            elif self._splits_tool_lines and _TOOL_LINE_START in part:
                pieces += _TOOL_LINE_BOUNDARY.split(part)
            elif part:
                pieces.append(part)
        return pieces

    def _tokenise(self, rows: Sequence[tuple[Dialog, list[Run]]]) -> Iterator[Datum]:
        """Encode the runs of several dialogs in one call of the tokenizer."""
        try:
            encoded = iter(self.encode([text for _, runs in rows for text, _ in runs]))
        except (TypeError, UnicodeEncodeError):
            for dialog, runs in rows:
                _check_unicode(dialog.id, runs)
            raise
        for dialog, runs in rows:
            ids_of_runs = [next(encoded) for _ in runs]
            self._check_round_trip(runs, ids_of_runs, dialog.id)
            trained = np.array([trained for _, trained in runs], bool)
            mask = np.repeat(trained, [len(run_ids) for run_ids in ids_of_runs])
            if not mask.any():
                raise RowError(dialog.id, "no token to train on: no assistant message is trained")
            ids = np.array(list(chain.from_iterable(ids_of_runs)), np.int32)
            yield Datum(ids, mask, dialog.id, dialog.task_type)

    def _check_round_trip(self, runs: list[Run], ids_of_runs: list[list[int]], where: str) -> None:
        """Check that trained text comes back from its ids: some tokenizers drop characters."""
        texts = []
        ids_of_texts = []
        for (text, trained), run_ids in zip(runs, ids_of_runs, strict=True):
            if trained:
                texts.append(self._special_text.unprotect(text))
                ids_of_texts.append(run_ids)
        backend = self.tokenizer.backend_tokenizer
        decoded_texts = backend.decode_batch(ids_of_texts, skip_special_tokens=False)
        for text, decoded in zip(texts, decoded_texts, strict=True):
            if decoded != text:
                index = _first_difference(text, decoded)
                raise RowError(where, f"the tokenizer cannot write {text[index : index + 1]!r}")


def _check_segmentation(tokenizer: Any) -> None:
    """Raise for a tokenizer that changes the start of every text, such as by adding a blank.

    Runs are tokenised separately, so each would begin with that change.
    """
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    if encode("a\n") + encode("b") != encode("a\nb"):
        raise SharpenError(
            f"{tokenizer.name_or_path}: the tokenizer changes the beginning of every text, "
            "so trained and sampled ids would differ; it is not supported"
        )


def _can_split_tool_lines(tokenizer: Any) -> bool:
    """Whether the lines of our tools block give the same ids separately as together."""
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    lines = ["<tools>\n", '{"name":"a","x":{}}\n', '{"name":"b"}\n', "</tools>\n"]
    separate_ids: list[int] = []
    for line in lines:
        separate_ids += encode(line)
    return encode("".join(lines)) == separate_ids


def _check_unicode(where: str, runs: list[Run]) -> None:
    """Raise an error that names the row if a text is not Unicode, such as half a surrogate pair."""
    for text, _ in runs:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(where, f"text that is not Unicode: {error.reason}") from None


def _first_difference(text: str, other: str) -> int:
    """Returns the first index at which two texts differ; the length of `other` if none does."""
    for index, (character, other_character) in enumerate(zip(text, other, strict=False)):
        if character != other_character:
            return index
    return len(other)


def batched(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Cut any iterable into lists of at most `size` items."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
