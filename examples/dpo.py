"""Preference optimisation (DPO): prefer a tool call over a made-up answer.

    python examples/dpo.py                  # pico, a tiny random model: seconds on a laptop
    python examples/dpo.py smollm2-135m     # a real model: minutes on a laptop

Prints the share of pairs whose chosen answer has the higher reward, before and after training, and
the mean difference of the two rewards (the margin):

    before: 0% of the pairs ranked right, margin 0.00
    after: 100% of the pairs ranked right, margin 1.75

The model is saved as a folder: runs/examples/dpo/MODEL/run/final.
"""

import sys
from pathlib import Path

from sharpen import DPOConfig, DPOTrainer
from sharpen.records import read_jsonl, write_jsonl

MODEL = sys.argv[1] if len(sys.argv) > 1 else "pico"
OUTPUT = Path("runs/examples/dpo", Path(MODEL).name)
LEARNING_RATE = 1e-2 if MODEL == "pico" else 1e-4
STEPS = 8
GUESSES = {"Rome": "Sunny.", "Oslo": "It must be snowing.", "Lima": "Warm, I guess."}
TOOL = {
    "name": "get_weather",
    "description": "Returns today's weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}

pairs = []
for city, guess in GUESSES.items():
    call = {"function": {"name": "get_weather", "arguments": {"city": city}}}
    pair = {
        "prompt": [{"role": "user", "content": f"What is the weather in {city}?"}],
        "chosen": [{"role": "assistant", "tool_calls": [call]}],
        "rejected": [{"role": "assistant", "content": guess}],
        "tools": [TOOL],
    }
    pairs.append(pair)

write_jsonl(OUTPUT / "pairs.jsonl", pairs)
config = DPOConfig(
    base_model=MODEL,
    train_data=f"{OUTPUT}/pairs.jsonl",
    lora_r=16,
    learning_rate=LEARNING_RATE,
    max_steps=STEPS,
)
DPOTrainer(config, OUTPUT / "run").train()

steps = [row.value for row in read_jsonl(OUTPUT / "run/metrics.jsonl")]
for name, step in (("before", steps[0]), ("after", steps[-1])):
    print(f"{name}: {step['accuracy']:.0%} of the pairs ranked right, margin {step['margin']:.2f}")
