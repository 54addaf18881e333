"""How fast dialogs become ids and masks.

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


def sentence(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def make_dialog(chance: random.Random) -> Dialog:
    """About 900 tokens: six tools with three parameters each, two calls with results, two
    answers."""
    tools = tuple(
        ToolSpec(
            f"{chance.choice(WORDS)}_{chance.choice(WORDS)}_{i}",
            sentence(chance, 12),
            {
                "type": "object",
                "properties": {
                    f"{chance.choice(WORDS)}_{j}": {
                        "type": "string",
                        "description": sentence(chance, 8),
                    }
                    for j in range(3)
                },
                "required": [],
            },
        )
        for i in range(6)
    )
    messages = [Message("user", sentence(chance, 30))]
    for _ in range(2):
        call = ToolCall(
            tools[0].name, {"query": sentence(chance, 6), "limit": chance.randrange(50)}
        )
        result = json.dumps(
            {"items": [{"id": chance.randrange(10**6), "name": sentence(chance, 4)}] * 4}
        )
        messages += [Message("assistant", "", (call,)), Message("tool", result)]
        messages += [
            Message("assistant", sentence(chance, 40)),
            Message("user", sentence(chance, 12)),
        ]
    return Dialog(tuple(messages[:-1]), tools)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", help="JSONL file of dialogs instead of random ones")
    options = parser.parse_args()
    renderer = Renderer(load_tokenizer(options.model))
    chance = random.Random(0)
    if options.data:
        dialogs = [dialog_from_row(row.value) for row in read_jsonl(options.data)]
    else:
        dialogs = [make_dialog(chance) for _ in range(options.rows)]
    started = time.perf_counter()
    tokens = sum(len(datum.ids) for datum in renderer.render(dialogs))
    seconds = time.perf_counter() - started
    mean = tokens // len(dialogs)
    print(f"{len(dialogs)} dialogs of {mean} tokens: {tokens / seconds:,.0f} tokens a second")
    print(json.dumps({"rows": len(dialogs), "tokens": tokens, "tokens_per_s": tokens / seconds}))


if __name__ == "__main__":
    main()
