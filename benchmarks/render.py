"""Speed of rendering dialogs into ids and masks, in tokens per second.

python benchmarks/render.py                                 # random dialogs: no two tools alike
python benchmarks/render.py --data OUT/agent_sft/train.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import time

from sharpen.models.load import load_tokenizer
from sharpen.records import read_jsonl
from sharpen.render import Renderer
from sharpen.rows import dialog_from_row
from sharpen.types import Dialog, Message, ToolCall, ToolSpec

TEXT = """flight invoice meeting please order find cancel the a to for in tomorrow customer status
account update with list of available rooms price under between confirm booking number delivery"""
WORDS = TEXT.split()
TOOLS = 6
PARAMETERS = 3


def make_sentence(rng: random.Random, count: int) -> str:
    """Returns random words."""
    return " ".join(rng.choices(WORDS, k=count))


def make_tool(rng: random.Random, index: int) -> ToolSpec:
    """Returns a tool with three parameters and a name of its own."""
    name = f"{rng.choice(WORDS)}_{rng.choice(WORDS)}_{index}"
    description = make_sentence(rng, 12)
    properties = {}
    for number in range(PARAMETERS):
        parameter = f"{rng.choice(WORDS)}_{number}"
        properties[parameter] = {"type": "string", "description": make_sentence(rng, 8)}
    schema = {"type": "object", "properties": properties, "required": []}
    return ToolSpec(name, description, schema)


def make_dialog(rng: random.Random) -> Dialog:
    """Returns a dialog of about 900 tokens: six tools, two calls with results, two answers."""
    tools = tuple(make_tool(rng, index) for index in range(TOOLS))
    messages = [Message("user", make_sentence(rng, 30))]
    for _ in range(2):
        arguments = {"query": make_sentence(rng, 6), "limit": rng.randrange(50)}
        item = {"id": rng.randrange(10**6), "name": make_sentence(rng, 4)}
        result = json.dumps({"items": [item] * 4})
        messages.append(Message("assistant", "", (ToolCall(tools[0].name, arguments),)))
        messages.append(Message("tool", result))
        messages.append(Message("assistant", make_sentence(rng, 40)))
        messages.append(Message("user", make_sentence(rng, 12)))
    return Dialog(tuple(messages[:-1]), tools)


def main() -> None:
    """Render the dialogs once and print the speed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", help="JSONL file of dialogs instead of random ones")
    options = parser.parse_args()
    renderer = Renderer(load_tokenizer(options.model))
    if options.data:
        dialogs = [dialog_from_row(row.value) for row in read_jsonl(options.data)]
    else:
        rng = random.Random(0)
        dialogs = [make_dialog(rng) for _ in range(options.rows)]
    started = time.perf_counter()
    tokens = sum(len(datum.ids) for datum in renderer.render(dialogs))
    seconds = time.perf_counter() - started
    speed = tokens / seconds
    mean_length = tokens // len(dialogs)
    print(f"{len(dialogs)} dialogs of {mean_length} tokens: {speed:,.0f} tokens per second")
    print(json.dumps({"rows": len(dialogs), "tokens": tokens, "tokens_per_s": speed}))


if __name__ == "__main__":
    main()
