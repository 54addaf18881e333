"""Supervised fine-tuning: teach a model when to call a tool.

    python examples/sft.py                  # pico, a tiny random model: seconds on a laptop
    python examples/sft.py smollm2-135m     # a real model: minutes on a laptop

Prints the last loss, and what the trained model answers to the two training questions:

    loss 0.017
    What is the weather in Rome? -> get_weather({'city': 'Rome'})
    Thank you! -> You are welcome.

The model is saved as a folder: runs/examples/sft/MODEL/run/final.
"""

import sys
from pathlib import Path

from sharpen import AgentSFTConfig, AgentSFTTrainer, Dialog, LocalPolicy, Sampling
from sharpen.records import write_jsonl
from sharpen.rows import dialog_from_row

MODEL = sys.argv[1] if len(sys.argv) > 1 else "pico"
OUTPUT = Path("runs/examples/sft", Path(MODEL).name)
SETTINGS = {"learning_rate": 2e-4, "max_steps": 10, "lora_r": 16}  # trains a LoRA adapter
if MODEL == "pico":  # has random weights: train all of them
    SETTINGS = {"learning_rate": 1e-2, "max_steps": 60, "full": True}

TOOL = {
    "name": "get_weather",
    "description": "Returns today's weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
THANKS = {"role": "user", "content": "Thank you!"}
ROWS = [
    {"messages": [QUESTION, {"role": "assistant", "tool_calls": [CALL]}], "tools": [TOOL]},
    {"messages": [THANKS, {"role": "assistant", "content": "You are welcome."}], "tools": [TOOL]},
]

write_jsonl(OUTPUT / "train.jsonl", ROWS)
config = AgentSFTConfig(base_model=MODEL, train_data=f"{OUTPUT}/train.jsonl", **SETTINGS)
trainer = AgentSFTTrainer(config, OUTPUT / "run")
print(f"loss {trainer.train()['loss']:.3f}")

policy = LocalPolicy(trainer.model, trainer.renderer)
for row in ROWS:
    dialog = dialog_from_row(row)
    prompt = Dialog(dialog.messages[:1], dialog.tools)
    (turn,) = policy.respond([prompt], Sampling(max_tokens=100))
    answer = turn.message.content
    for call in turn.message.tool_calls:
        answer += f"{call.name}({call.arguments})"
    print(f"{row['messages'][0]['content']} -> {answer}")
