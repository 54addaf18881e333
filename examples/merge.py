"""Model merging: train two experts and make one model of them, by a recipe in mergekit's YAML.

    python examples/merge.py                  # pico, a tiny random model: seconds on a laptop
    python examples/merge.py smollm2-135m     # a real model: minutes on a laptop

Prints the loss of each model on the data of each expert. With smollm2-135m the merged model knows
what both experts have learned; with pico it lies between them:

    base     french 6.47  numbers 8.64
    french   french 0.00  numbers 1.69
    numbers  french 2.77  numbers 0.00
    merged   french 0.01  numbers 0.00
"""

import sys
from pathlib import Path

from sharpen import AgentSFTConfig, AgentSFTTrainer
from sharpen.merge.recipe import load_recipe
from sharpen.merge.stream import MergeOptions, merge
from sharpen.models.find import find_model
from sharpen.records import write_jsonl, write_text
from sharpen.train.scoring import dev_loss

MODEL = sys.argv[1] if len(sys.argv) > 1 else "pico"
OUTPUT = Path("runs/examples/merge", Path(MODEL).name)
SETTINGS = {"learning_rate": 2e-4, "max_steps": 20}  # a LoRA adapter for each expert
if MODEL == "pico":  # has random weights: train all of them
    SETTINGS = {"learning_rate": 4e-3, "max_steps": 20, "full": True}
EXPERTS = {
    "french": {"Hello": "Bonjour", "Thank you": "Merci", "Goodbye": "Au revoir"},
    "numbers": {"One and one": "Two", "Two and two": "Four", "Three and three": "Six"},
}
RECIPE = """
merge_method: ties
base_model: {base}
models:
  - {{model: {french}, parameters: {{weight: 0.5}}}}
  - {{model: {numbers}, parameters: {{weight: 0.5}}}}
parameters: {{density: 0.8}}
"""

folders = {"base": find_model(MODEL)}
for name, answers in EXPERTS.items():
    rows = []
    for question, answer in answers.items():
        user = {"role": "user", "content": question}
        rows.append({"messages": [user, {"role": "assistant", "content": answer}]})
    write_jsonl(OUTPUT / f"{name}.jsonl", rows)
    config = AgentSFTConfig(base_model=MODEL, train_data=f"{OUTPUT}/{name}.jsonl", **SETTINGS)
    AgentSFTTrainer(config, OUTPUT / name).train()
    folders[name] = OUTPUT / name / "final"

write_text(OUTPUT / "recipe.yaml", RECIPE.format(**folders))
folders["merged"] = OUTPUT / "merged"
merge(load_recipe(OUTPUT / "recipe.yaml"), folders["merged"], MergeOptions(overwrite=True))
for name, folder in folders.items():
    french = dev_loss(folder, OUTPUT / "french.jsonl")
    numbers = dev_loss(folder, OUTPUT / "numbers.jsonl")
    print(f"{name:8} french {french:.2f}  numbers {numbers:.2f}")
