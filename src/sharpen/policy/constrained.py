"""Constrained decoding: sample only tokens that lead to free text or to valid tool calls.

A turn is free text, or text and calls of the tools on offer whose arguments fit their schemas.
`LocalPolicy` compiles one `CallGrammar` per set of tools; the engine asks a `CallMatcher` for the
allowed tokens of each sequence. Calls have the compact form of `calls.py`, with keys in the order
of the schema. The work is done by llguidance.
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

# options of llguidance: no blanks between JSON tokens, no \u escapes for plain characters
_COMPACT_JSON = {"whitespace_flexible": False, "json_allow_general_unicode_escapes": False}
_MAX_NUMBER = 1e18  # bound of numbers without one: 1e999 would parse as infinite
_CHECKED_FORMATS = {
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
    "ipv4", "ipv6", "uuid", "uri", "uri-reference", "uri-template", "iri", "iri-reference",
    "json-pointer", "relative-json-pointer", "regex",
}  # fmt: skip
_LITERAL_KEYWORDS = ("enum", "const", "default", "examples")  # hold values, not schemas
_MAX_REASON = 300  # characters of llguidance's text in an error message

# what llguidance makes of a tokenizer, by tokenizer, then by stop ids and vocabulary size
_wrapped_tokenizers: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


class CallMatcher:
    """The state of one sequence in the grammar."""

    def __init__(self, matcher: Any, vocabulary: int):
        self._matcher = matcher
        self._vocabulary = vocabulary

    def mask(self) -> np.ndarray:
        """Returns one bool per token: whether it may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            reason = one_line(self._matcher.get_error())[:_MAX_REASON]
            raise SharpenError(f"constrained decoding: {reason}")
        return np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(bool)

    def accept(self, token: int) -> None:
        """Move on by one sampled token."""
        if not self._matcher.consume_token(token):
            raise SharpenError(f"constrained decoding: token {token} is not allowed here")

    @property
    def done(self) -> bool:
        """Whether the stop token was accepted."""
        return self._matcher.is_stopped()


class CallGrammar:
    """A compiled grammar of text and calls of some tools; `start` gives a matcher per sequence.

    `stop_ids` end a turn. `vocabulary` is the width of the model's logits. Compiled grammars are
    cached by tokenizer and tools.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[ToolSpec],
        stop_ids: Container[int] | None = None,
        vocabulary: int | None = None,
    ):
        self._vocabulary = vocabulary or len(tokenizer)
        stops = (tokenizer.eos_token_id,)
        if stop_ids:
            stops = tuple(token for token in range(len(tokenizer)) if token in stop_ids)
        wrapped = _wrap_tokenizer(tokenizer, stops, self._vocabulary)
        opening = _marker_symbol(wrapped, tokenizer, OPEN_CALL)
        closing = _marker_symbol(wrapped, tokenizer, CLOSE_CALL)
        call_rules = []
        for tool in tools:
            call_rules.append(_call_rule(tool.name, compact_json(tool.parameters), closing))
        self._initial = _compile_grammar(wrapped, tuple(call_rules), opening)

    def start(self) -> CallMatcher:
        """Returns a matcher for a new sequence."""
        return CallMatcher(self._initial.deep_copy(), self._vocabulary)


def _wrap_tokenizer(tokenizer: Any, stops: tuple[int, ...], vocabulary: int) -> Any:
    """Returns the tokenizer as llguidance takes it; the result is cached."""
    cache = _wrapped_tokenizers.setdefault(tokenizer, {})
    key = (stops, vocabulary)
    if key not in cache:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            fix = "pip install 'sharpen[constrained]'"
            raise SharpenError(f"constrained decoding needs llguidance: {fix}") from None
        cache[key] = from_tokenizer(tokenizer, vocabulary, list(stops))
    return cache[key]


def _marker_symbol(wrapped: Any, tokenizer: Any, text: str) -> str:
    """Returns a call marker in grammar syntax: its special token if it has one, else its text."""
    token = tokenizer.get_vocab().get(text)
    if token is not None and wrapped.is_special_token(token):
        return f"<[{token}]>"
    return json.dumps(text)


@functools.lru_cache(maxsize=256)
def _compile_grammar(wrapped: Any, call_rules: tuple[str, ...], opening: str) -> Any:
    """Returns a llguidance matcher at its start, for text and calls by the given rules."""
    from llguidance import LLMatcher

    start = "start: TEXT"
    rules = [f"TEXT: /(?s:.*)/ & ~/(?s:.*){OPEN_CALL}(?s:.*)/"]
    if call_rules:
        start += f' | before call ("\\n" {opening} call)*'
        opening_is_text = opening.startswith('"')
        if opening_is_text:  # a lazy lexeme ends at the first marker
            rules.append(f"before[lazy]: /(?s:.*){OPEN_CALL}/")
        else:
            rules.append(f"before: TEXT {opening}")
        names = [f"call_{number}" for number in range(len(call_rules))]
        rules.append("call: " + " | ".join(names))
        for name, call_rule in zip(names, call_rules, strict=True):
            rules.append(f"{name}: {call_rule}")
    matcher = LLMatcher(wrapped, "\n".join([start, *rules]), log_level=0)
    if matcher.is_error():
        reason = one_line(matcher.get_error())[:_MAX_REASON]
        raise SharpenError(f"constrained decoding: {reason}")
    return matcher


@functools.lru_cache(maxsize=8192)
def _call_rule(name: str, parameters: str, closing: str) -> str:
    """Returns the grammar of what follows the opening marker in a call of one tool."""
    from llguidance import LLMatcher

    head = json.dumps(f'{{"name":{compact_json(name)},"arguments":')
    try:
        schema = json.dumps({**_usable_schema(json.loads(parameters)), "x-guidance": _COMPACT_JSON})
    except (TypeError, ValueError, RecursionError) as error:
        raise SharpenError(f"tool {name}: {one_line(error)}") from None
    problem = LLMatcher.validate_grammar(f"start: {head} %json {schema}")
    if problem:
        reason = one_line(problem.split("\n   1 |")[0])[:_MAX_REASON]  # without the quoted grammar
        raise SharpenError(f"tool {name}: no grammar for its schema: {reason}")
    return f'{head} %json {schema} "}}" {closing}'


def _usable_schema(schema: Any) -> Any:
    """Returns a schema that llguidance can compile.

    Numbers get bounds. `uniqueItems`, which a grammar cannot count, and formats that nobody checks
    are left out.
    """
    if isinstance(schema, list):
        return [_usable_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    usable = {}
    for keyword, value in schema.items():
        usable[keyword] = value if keyword in _LITERAL_KEYWORDS else _usable_schema(value)
    # a property may have the name of a keyword; its value is then a schema and not of these types
    if isinstance(usable.get("uniqueItems"), bool):
        del usable["uniqueItems"]
    if isinstance(usable.get("format"), str) and usable["format"] not in _CHECKED_FORMATS:
        del usable["format"]
    if _is_free_number(schema):
        if "minimum" not in usable and "exclusiveMinimum" not in usable:
            usable["minimum"] = -_MAX_NUMBER
        if "maximum" not in usable and "exclusiveMaximum" not in usable:
            usable["maximum"] = _MAX_NUMBER
    return usable


def _is_free_number(schema: dict[str, Any]) -> bool:
    """Whether a schema allows any number, not only listed values."""
    if "enum" in schema or "const" in schema:
        return False
    kinds = schema.get("type")
    if not isinstance(kinds, list):
        kinds = [kinds]
    return "number" in kinds
