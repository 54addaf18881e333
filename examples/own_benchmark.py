"""A benchmark of your own: a function that returns tasks.

    python examples/own_benchmark.py                  # pico, a tiny random model: seconds
    python examples/own_benchmark.py smollm2-135m     # a real model

Prints the accuracy with its 95% confidence interval:

    baseline:gold: accuracy 1.00 (0.51 to 1.00)
    pico: accuracy 0.00 (0.00 to 0.49)

The same from the command line:
    sharpen evaluate --model pico --benchmark examples/own_benchmark.py:capitals
"""

import sys

from sharpen import AgentTrainingEvaluator, Task

MODEL = sys.argv[1] if len(sys.argv) > 1 else "pico"
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi"}


def capitals() -> list[Task]:
    tasks = []
    for country, city in CAPITALS.items():
        task = Task(
            id=country,
            instruction=f"What is the capital of {country}? Answer with the name only.",
            gold={"answer": city},
            kind="exact",  # how it is scored: the same text, whatever its case and punctuation
        )
        tasks.append(task)
    return tasks


if __name__ == "__main__":  # the evaluation imports this file to find `capitals`
    options = {"general": False, "max_tokens": 16}
    evaluator = AgentTrainingEvaluator(f"{__file__}:capitals", options=options)
    for model in ("baseline:gold", MODEL):
        accuracy = evaluator.evaluate(model)["accuracy"]
        interval = f"{accuracy['low']:.2f} to {accuracy['high']:.2f}"
        print(f"{model}: accuracy {accuracy['mean']:.2f} ({interval})")
