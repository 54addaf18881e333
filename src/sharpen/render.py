"""Dialog → token ids with a loss mask, and sampled ids → Message: the only code that knows chat
templates.

A dialog becomes runs of text, each either trained (what the assistant sampled) or not, and every
run is tokenised on its own: a run boundary is where sampling began, so trained ids look exactly
like sampled ids. Special-token text inside what people and tools wrote is encoded as plain text and
cannot open or close a turn.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from itertools import chain, islice
from typing import Any

import numpy as np

from sharpen.calls import CLOSE_CALL, OPEN_CALL, assistant_text, compact_json, parse_message
from sharpen.rows import message_to_wire, tool_to_wire
from sharpen.types import Datum, Dialog, Json, Message, RowError, SharpenError, ToolSpec

# A sentinel stands for special-token text while a template runs. It starts with a Unicode
# noncharacter, which is itself protected when a text holds one, so no text can forge a sentinel.
MARK, MARK_END = "\ufdd0", "\ufdd1"
SENTINEL = re.compile(f"{MARK}(\\d+){MARK_END}")
BATCH = 256  # dialogs tokenised together
TOOL_START = '{"name":'
# between two lines of our tools block
TOOL_LINE = re.compile(r"(?<=\}\n)(?=\{\"name\":|</tools>)|(?<=<tools>\n)(?=\{\"name\":)")
MAX_KNOWN_LINES = 20_000

Run = tuple[str, bool]  # text, trained


class Renderer:
    """For one tokenizer. `template`: "model", "hermes" (ours), "auto" (ours if it has no tools)."""

    def __init__(self, tokenizer: Any, template: str = "auto"):
        if not getattr(tokenizer, "is_fast", False):
            reason = "only fast tokenizers are supported; the model folder needs a tokenizer.json"
            raise SharpenError(f"{tokenizer.name_or_path or 'tokenizer'}: {reason}")
        self.tokenizer = tokenizer
        self.template = choose_template(tokenizer, template)
        self.special = special_tokens(tokenizer)
        protected = [*sorted(self.special, key=len, reverse=True), MARK]
        self.sentinels = {text: f"{MARK}{i}{MARK_END}" for i, text in enumerate(protected)}
        self.protected = protected
        self.pattern = re.compile("|".join(map(re.escape, protected)))
        self.literal_ids = {text: encode_literally(tokenizer, text) for text in protected}
        stops = (tokenizer.eos_token, "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
        self.stop_ids = frozenset(self.special[t] for t in stops if t in self.special)
        if not self.stop_ids:
            raise SharpenError(f"{tokenizer.name_or_path}: the tokenizer has no end-of-turn token")
        check_segmentation(tokenizer)
        encode = functools.partial(tokenizer.encode, add_special_tokens=False)
        lines = ["<tools>\n", '{"name":"a","x":{}}\n', '{"name":"b"}\n', "</tools>\n"]
        self.lines_apart = encode("".join(lines)) == [i for line in lines for i in encode(line)]
        self.known_lines: dict[str, list[int]] = {}

    def render(self, dialogs: Iterable[Dialog]) -> Iterator[Datum]:
        """Dialogs → training data. One with nothing to train on, or to render, is a RowError."""
        for batch in batched(dialogs, BATCH):
            yield from self.tokenise([(d, self.cut_runs(d)[:-1]) for d in batch])

    def plain(self, text: Any, where: str, max_length: int) -> list[Datum]:
        """A text to continue pre-training on: every token carries loss. A long one is cut into
        pieces, each beginning with the last token of the one before it."""
        if not isinstance(text, str) or not text.strip():
            raise RowError(where, "text: expected words")
        end = self.tokenizer.eos_token_id
        ids = np.array([*self.encode([self.protect(text)])[0], end], np.int32)
        return [
            Datum(piece := ids[at : at + max_length], np.arange(len(piece)) >= (at > 0), where)
            for at in range(0, len(ids) - 1, max_length - 1)
        ]

    def prompt(self, dialog: Dialog) -> list[int]:
        """Ids that end where the assistant's next turn begins."""
        return self.encode([self.text(dialog, generation=True)])[0]

    def continuation(self, before: Dialog, new: Sequence[Message]) -> list[int]:
        """Ids behind the assistant's last sampled token in `before`, through `new` messages, to the
        next turn. Sampled ids + continuation is the next prompt: none is tokenised again."""
        # the text of the last turn itself does not matter, only what the template puts behind it
        if self.template is None:  # which looks at nothing that came before
            behind = hermes_runs(Dialog((Message("assistant"), *new)), self.protect)[-1][0]
            return self.encode([f"{behind}<|im_start|>assistant\n"])[0]
        after = replace(before, messages=(*before.messages, *new))
        start = "".join(text for text, _ in self.cut_runs(before)[:-1])
        full = self.text(after, generation=True)
        if not full.startswith(start):
            raise RowError(before.id, not_append_only(len(before.messages)))
        return self.encode([full[len(start) :]])[0]

    def parse(self, ids: Sequence[int]) -> Message:
        """Sampled ids → the assistant's message. From the stop token on nothing is content."""
        end = next((i for i, token in enumerate(ids) if token in self.stop_ids), len(ids))
        text = self.tokenizer.decode(
            list(ids[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return parse_message(text)

    # Text ------------------------------------------------------------------------------------

    def cut_runs(self, dialog: Dialog) -> list[Run]:
        """Untrained and trained runs in turn; the last is what stands behind the last message."""
        check_dialog(dialog)
        if self.template is None:
            return hermes_runs(dialog, self.protect)
        return self.template_runs(dialog)

    def text(self, dialog: Dialog, generation: bool = False) -> str:
        """The whole dialog as text, special-token text in contents replaced by sentinels."""
        check_dialog(dialog)
        if self.template is None:
            text = "".join(t for t, _ in hermes_runs(dialog, self.protect))
            return text + ("<|im_start|>assistant\n" if generation else "")
        return self.apply(*self.wire(dialog), generation)

    def template_runs(self, dialog: Dialog) -> list[Run]:
        """By the model's own template: a turn is what it adds behind the generation prompt."""
        wire, tools = self.wire(dialog)
        whole = self.apply(wire, tools, False)
        runs: list[Run] = []
        done = 0
        for index, message in enumerate(dialog.messages):
            if message.role != "assistant":
                continue
            before = self.apply(wire[:index], tools, True)
            after = self.apply(wire[: index + 1], tools, False)
            if not (whole.startswith(after) and after.startswith(before)):
                raise RowError(dialog.id, not_append_only(index))
            end = self.end_of_turn(after, len(before))
            runs += [
                (whole[done : len(before)], False),
                (whole[len(before) : end], message.trained),
            ]
            done = end
        return [*runs, (whole[done:], False)]

    def end_of_turn(self, text: str, start: int) -> int:
        """Behind the stop token of the turn that begins at `start`: the rest is never sampled."""
        stops = [token for token, index in self.special.items() if index in self.stop_ids]
        ends = [text.rfind(token, start) + len(token) for token in stops]
        return max((e for e in ends if e > start), default=len(text))

    def apply(self, wire: list[Json], tools: list[Json] | None, generation: bool) -> str:
        if not wire:
            raise SharpenError("a dialog cannot begin with the assistant in this model's template")
        settings = {"chat_template": self.template, "add_generation_prompt": generation}
        apply = self.tokenizer.apply_chat_template
        try:
            return apply(wire, tools=tools, tokenize=False, **settings)
        except Exception as error:  # a template can raise anything, in its maker's own words
            raise SharpenError(f"chat template: {' '.join(str(error).split())}") from error

    # Special-token text ----------------------------------------------------------------------

    def protect(self, text: str) -> str:
        if not self.pattern.search(text):
            return text
        return self.pattern.sub(lambda match: self.sentinels[match[0]], text)

    def unprotect(self, text: str) -> str:
        if MARK not in text:
            return text
        return SENTINEL.sub(lambda match: self.protected[int(match[1])], text)

    def protect_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, list):
            return [self.protect_all(item) for item in value]
        if isinstance(value, dict):
            return {self.protect(key): self.protect_all(item) for key, item in value.items()}
        return value

    def wire(self, dialog: Dialog) -> tuple[list[Json], list[Json] | None]:
        messages = [self.protect_all(message_to_wire(m)) for m in dialog.messages]
        return messages, [self.protect_all(tool_to_wire(t)) for t in dialog.tools] or None

    # Ids -------------------------------------------------------------------------------------

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts with sentinels → ids. Special tokens are tokens, but characters where protected."""
        pieces = [self.pieces(text) for text in texts]
        flat = list(dict.fromkeys(p for parts in pieces for p in parts if isinstance(p, str)))
        if len(self.known_lines) > MAX_KNOWN_LINES:
            self.known_lines.clear()
        unknown = [text for text in flat if text not in self.known_lines]
        backend = self.tokenizer.backend_tokenizer
        encoded = backend.encode_batch_fast(unknown, add_special_tokens=False)
        found = {text: encoding.ids for text, encoding in zip(unknown, encoded, strict=True)}
        self.known_lines |= {text: found[text] for text in unknown if text.startswith(TOOL_START)}
        result = []
        for parts in pieces:
            ids: list[int] = []
            for part in parts:
                if isinstance(part, int):
                    ids += self.literal_ids[self.protected[part]]
                else:
                    ids += found[part] if part in found else self.known_lines[part]
            result.append(ids)
        return result

    def pieces(self, text: str) -> list[str | int]:
        """Text to encode, and numbers of protected strings. A tool's line stands apart where that
        changes no token: the same tools come again and again, and are encoded once."""
        parts: list[str | int] = []
        for number, part in enumerate(SENTINEL.split(text) if MARK in text else (text,)):
            if number % 2:
                parts.append(int(part))
            elif self.lines_apart and TOOL_START in part:
                parts += TOOL_LINE.split(part)
            elif part:
                parts.append(part)
        return parts

    def tokenise(self, rows: Sequence[tuple[Dialog, list[Run]]]) -> Iterator[Datum]:
        try:
            encoded = iter(self.encode([text for _, runs in rows for text, _ in runs]))
        except (TypeError, UnicodeEncodeError):
            for dialog, runs in rows:
                name_bad_text(dialog.id, runs)
            raise
        for dialog, runs in rows:
            ids = [next(encoded) for _ in runs]
            said = [(run, text) for run, (text, trained) in zip(ids, runs, strict=True) if trained]
            self.check_sayable(said, dialog.id)
            mask = np.repeat(np.array([trained for _, trained in runs], bool), [*map(len, ids)])
            if not mask.any():
                raise RowError(dialog.id, "no token to train on: no assistant message is trained")
            flat = np.array([*chain.from_iterable(ids)], np.int32)
            yield Datum(flat, mask, dialog.id, dialog.task_type)

    def check_sayable(self, runs: list[tuple[list[int], str]], where: str) -> None:
        """Trained text must come back from its ids: some tokenizers drop characters."""
        ids, backend = [run for run, _ in runs], self.tokenizer.backend_tokenizer
        decoded = backend.decode_batch(ids, skip_special_tokens=False)
        for (_, text), said in zip(runs, decoded, strict=True):
            if said != (wanted := self.unprotect(text)):
                at = next((i for i, (a, b) in enumerate(zip(wanted, said)) if a != b), len(said))  # noqa: B905
                raise RowError(where, f"the tokenizer cannot write {wanted[at : at + 1]!r}")


def hermes_template() -> str:
    """Our chat template as Jinja, for tokenizers that are saved with a trained model."""
    return resources.files("sharpen").joinpath("templates/hermes.jinja").read_text("utf-8")


def choose_template(tokenizer: Any, template: str) -> str | None:
    """None for our own template, which is rendered without Jinja; else the model's Jinja source."""
    own = tokenizer.chat_template or ""
    if isinstance(own, dict):
        own = own.get("tool_use") or own.get("default") or ""
    if template not in ("auto", "model", "hermes"):
        raise SharpenError(f"template {template!r}: expected auto, model or hermes")
    if own == hermes_template():
        return None
    if template == "model" or (template == "auto" and re.search(r"\btools\b", own)):
        if OPEN_CALL not in own and OPEN_CALL not in tokenizer.get_vocab():
            reason = f"its chat template does not write calls as {OPEN_CALL}; use template=hermes"
            raise SharpenError(f"{tokenizer.name_or_path}: {reason}")
        return own
    known = special_tokens(tokenizer)
    if missing := [token for token in ("<|im_start|>", "<|im_end|>") if token not in known]:
        raise SharpenError(
            f"{tokenizer.name_or_path}: its chat template has no tools and its tokenizer lacks "
            f"{' and '.join(missing)}, which our template needs; add them as special tokens"
        )
    return None


def special_tokens(tokenizer: Any) -> dict[str, int]:
    added = tokenizer.added_tokens_decoder
    return {token.content: index for index, token in added.items() if token.special}


def encode_literally(tokenizer: Any, text: str) -> list[int]:
    """Special-token text as the characters it is made of."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if set(special_tokens(tokenizer).values()).intersection(ids):
        raise SharpenError(f"{tokenizer.name_or_path}: cannot encode {text!r} as plain text")
    return ids


def check_segmentation(tokenizer: Any) -> None:
    """Runs are tokenised apart: a blank before each text would be shown to the model."""
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    if encode("a\n") + encode("b") != encode("a\nb"):
        raise SharpenError(
            f"{tokenizer.name_or_path}: the tokenizer changes the beginning of every text, "
            "so trained and sampled ids would differ; it is not supported"
        )


# Our template ----------------------------------------------------------------------------------


def hermes_runs(dialog: Dialog, protect: Any) -> list[Run]:
    """Our template's runs; equal to `hermes.jinja`, and tested to be."""
    messages = dialog.messages
    system = protect(messages[0].content) if messages[0].role == "system" else ""
    pending = ""
    if system or dialog.tools:
        tools = protect(tools_block(dialog.tools)) if dialog.tools else ""
        joint = "\n\n" if system and tools else ""
        pending = f"<|im_start|>system\n{system}{joint}{tools}<|im_end|>\n"
    runs: list[Run] = []
    for message in messages[1:] if messages[0].role == "system" else messages:
        if message.role == "assistant":
            turn = f"{protect(assistant_text(message, dialog.id))}<|im_end|>"
            runs += [(f"{pending}<|im_start|>assistant\n", False), (turn, message.trained)]
            pending = "\n"
        elif message.role == "tool":
            content = protect(message.content)
            pending += f"<|im_start|>tool\n<tool_response>\n{content}\n</tool_response><|im_end|>\n"
        else:
            pending += f"<|im_start|>{message.role}\n{protect(message.content)}<|im_end|>\n"
    return [*runs, (pending, False)]


def tools_block(tools: tuple[ToolSpec, ...]) -> str:
    lines = "\n".join(compact_json(tool_to_wire(t)["function"]) for t in tools)
    example = f'{OPEN_CALL}{{"name":...,"arguments":{{...}}}}{CLOSE_CALL}'
    return f"<tools>\n{lines}\n</tools>\nCall a tool with {example}"


def check_dialog(dialog: Dialog) -> None:
    """What no template can say: an empty dialog, a late system message, call markers as text."""
    if not dialog.messages:
        raise RowError(dialog.id, "the dialog has no messages")
    for index, message in enumerate(dialog.messages):
        if message.role == "system" and index:
            raise RowError(dialog.id, f"messages[{index}]: a system message can only stand first")
        if message.role == "assistant" and OPEN_CALL in message.content:
            reason = f"assistant text contains {OPEN_CALL}; use tool_calls for calls"
            raise RowError(dialog.id, f"messages[{index}]: {reason}")


def not_append_only(index: int) -> str:
    return (
        f"messages[{index}]: the model's chat template is not append-only (it rewrites earlier "
        "text when a turn is added), so no loss mask is right; use template=hermes"
    )


def name_bad_text(where: str, runs: list[Run]) -> None:
    for text, _ in runs:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(where, f"text that is not Unicode: {error.reason}") from None


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
