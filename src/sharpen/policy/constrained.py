"""Constrained decoding: while a turn is sampled, only tokens are allowed that can still become free
text, or text and calls of the tools on offer with arguments that fit their schemas, and the end.

Calls have the compact form of `calls.py`, their keys the order of the schema. llguidance does the
work.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from sharpen.calls import CLOSE_CALL, OPEN_CALL, compact_json
from sharpen.config import one_line
from sharpen.types import SharpenError, ToolSpec

COMPACT = {"whitespace_flexible": False, "json_allow_general_unicode_escapes": False}
LARGEST = 1e18  # of a number without bounds: 1e999 would parse as infinite
FORMATS = "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uuid uri"
FORMATS += " uri-reference uri-template iri iri-reference json-pointer relative-json-pointer regex"
LITERAL = ("enum", "const", "default", "examples")  # values, not schemas
_tokenizers: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


class CallMatcher:
    """One sequence on its way through the grammar."""

    def __init__(self, matcher: Any, vocabulary: int):
        self.matcher, self.vocabulary = matcher, vocabulary

    def mask(self) -> np.ndarray:
        """Which tokens may come next: a bool each."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        if self.matcher.is_error():
            raise SharpenError(f"constrained decoding: {one_line(self.matcher.get_error())[:300]}")
        return np.unpackbits(bits, count=self.vocabulary, bitorder="little").view(bool)

    def accept(self, token: int) -> None:
        if not self.matcher.consume_token(token):
            raise SharpenError(f"constrained decoding: token {token} is not allowed here")

    @property
    def done(self) -> bool:
        """The stop token was accepted."""
        return self.matcher.is_stopped()


class CallGrammar:
    """`start()` gives a matcher for one sequence. Compiled grammars are kept, by tokenizer and
    tools. `stop_ids` end a turn; `vocabulary` is the width of the model's logits."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[ToolSpec],
        stop_ids: Container[int] | None = None,
        vocabulary: int | None = None,
    ):
        self.vocabulary = vocabulary or len(tokenizer)
        ids = range(len(tokenizer))
        stops = tuple(i for i in ids if i in stop_ids) if stop_ids else (tokenizer.eos_token_id,)
        known, key = _tokenizers.setdefault(tokenizer, {}), (stops, self.vocabulary)
        if key not in known:
            known[key] = wrapped(tokenizer, *key)
        opening, closing = (marker(known[key], tokenizer, text) for text in (OPEN_CALL, CLOSE_CALL))
        calls = (rule(tool.name, compact_json(tool.parameters), closing) for tool in tools)
        self.first = compiled(known[key], tuple(calls), opening)

    def start(self) -> CallMatcher:
        return CallMatcher(self.first.deep_copy(), self.vocabulary)


def wrapped(tokenizer: Any, stops: tuple[int, ...], vocabulary: int) -> Any:
    """The tokenizer as llguidance takes it."""
    try:
        from llguidance.hf import from_tokenizer
    except ImportError:
        fix = "pip install 'sharpen[constrained]'"
        raise SharpenError(f"constrained decoding needs llguidance: {fix}") from None
    return from_tokenizer(tokenizer, vocabulary, list(stops))


def marker(wrapper: Any, tokenizer: Any, text: str) -> str:
    """A marker in a grammar: a token of its own where the tokenizer has one, else text."""
    token = tokenizer.get_vocab().get(text)
    own = token is not None and wrapper.is_special_token(token)
    return f"<[{token}]>" if own else json.dumps(text)


@functools.lru_cache(maxsize=256)
def compiled(tokenizer: Any, calls: tuple[str, ...], opening: str) -> Any:
    """A matcher at its start, for a grammar of some calls' rules."""
    from llguidance import LLMatcher

    lines = ["start: TEXT", f"TEXT: /(?s:.*)/ & ~/(?s:.*){OPEN_CALL}(?s:.*)/"]
    if calls:
        text = opening.startswith('"')  # a lazy lexeme ends at the first marker
        lines += [f"before[lazy]: /(?s:.*){OPEN_CALL}/" if text else f"before: TEXT {opening}"]
        lines[0] += f' | before call ("\\n" {opening} call)*'
        lines += ["call: " + " | ".join(f"call_{i}" for i in range(len(calls)))]
        lines += [f"call_{i}: {rule}" for i, rule in enumerate(calls)]
    matcher = LLMatcher(tokenizer, "\n".join(lines), log_level=0)
    if matcher.is_error():
        raise SharpenError(f"constrained decoding: {one_line(matcher.get_error())[:300]}")
    return matcher


@functools.lru_cache(maxsize=8192)
def rule(name: str, parameters: str, closing: str) -> str:
    """What stands behind the opening marker in a call of one tool."""
    from llguidance import LLMatcher

    head = json.dumps(f'{{"name":{compact_json(name)},"arguments":')
    try:
        schema = json.dumps({**usable(json.loads(parameters)), "x-guidance": COMPACT})
    except (TypeError, ValueError, RecursionError) as error:
        raise SharpenError(f"tool {name}: {one_line(error)}") from None
    if problem := LLMatcher.validate_grammar(f"start: {head} %json {schema}"):
        reason = one_line(problem.split("\n   1 |")[0])[:300]
        raise SharpenError(f"tool {name}: no grammar for its schema: {reason}")
    return f'{head} %json {schema} "}}" {closing}'


def usable(schema: Any) -> Any:
    """A schema with bounds for its numbers, without what a grammar cannot count (repeated items)
    and without formats that nobody checks."""
    if isinstance(schema, list):
        return [usable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {k: v if k in LITERAL else usable(v) for k, v in schema.items()}
    if isinstance(found.get("uniqueItems"), bool):
        del found["uniqueItems"]
    if isinstance(found.get("format"), str) and found["format"] not in FORMATS.split():
        del found["format"]
    kinds = schema.get("type")
    if not {"enum", "const"} & found.keys() and "number" in (
        kinds if isinstance(kinds, list) else [kinds]
    ):
        for side, sign in (("inimum", -1), ("aximum", 1)):
            if not {f"m{side}", f"exclusiveM{side}"} & found.keys():
                found[f"m{side}"] = sign * LARGEST
    return found
