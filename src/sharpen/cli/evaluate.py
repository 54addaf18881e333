"""`sharpen evaluate`: a model on a benchmark, with intervals, alone or against another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from sharpen.cli.shared import AsJson, Pairs, end_with
from sharpen.types import SharpenError

Model = Annotated[
    str,
    Option(help="Folder, run, adapter, name, http://host/v1#model, vllm+http://…, baseline:gold."),
]
Benchmark = Annotated[str, Option(help="agent_benchmark:test, bfcl:PATH, needle:8000 ...")]


def evaluate(
    overrides: Annotated[Pairs, Argument(help="Any setting as key=value, such as seed=1.")] = None,
    model: Model = "smollm2-135m",
    benchmark: Benchmark = "agent_benchmark:test",
    metrics: Annotated[str, Option(help="Names with commas; the benchmark's own by default.")] = "",
    limit: Annotated[int | None, Option(help="Number of items; all by default.", min=0)] = None,
    samples: Annotated[int | None, Option(help="Samples per task.", min=1)] = None,
    perturb: Annotated[str, Option(help="Of rename, reword, rekey, shuffle, distract.")] = "",
    compare: Annotated[Path | None, Option(help="Another evaluation of the items: folder.")] = None,
    output: Annotated[Path | None, Option(help="Folder of the items and results.")] = None,
    general: Annotated[bool | None, Option(help="Also the fixed set without tools.")] = None,
    user: Annotated[str | None, Option(help="Model that plays the user (tau, tau2).")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model. The same command goes on with an evaluation that was stopped.

    Example: sharpen evaluate --model runs/sft --metrics tool_accuracy,plan_success,efficiency"""
    from sharpen.config import load_yaml
    from sharpen.evals.evaluator import AgentTrainingEvaluator

    options = load_yaml(None, overrides or []) | {"own_folder": output is None}
    flags = {"limit": limit, "samples": samples, "general": general, "user": user}
    flags["perturb"] = _split_names(perturb) or None
    for name, value in flags.items():
        if value is None:
            continue
        if options.get(name, value) != value:
            raise SharpenError(f"{name}: given as --{name} and as {name}=; give one of them")
        options[name] = value
    output = output or Path("runs") / "evaluate"
    evaluator = AgentTrainingEvaluator(benchmark, output, options=options)
    evaluator.evaluate(model, metrics=_split_names(metrics) or None, compare=compare)
    show(evaluator.results)
    print(f"items and results: {evaluator.output}")
    end_with({"output": str(evaluator.output), **evaluator.results}, as_json)


def _split_names(text: str) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def show(results: dict[str, Any]) -> None:
    """A table: every metric with its interval, and what changed."""
    from sharpen.evals.intervals import Difference, Figure
    from sharpen.rewards.metrics import ALIASES

    change = results["comparison"]
    print(f"{results['model']} on {results['benchmark']}")
    tables = [("", results["metrics"], change.get("metrics") or {})]
    tables += [("general ", results["general"], change.get("general") or {})]
    for title, figures, differences in tables:
        for name, value in figures.items():
            if title and name != "accuracy":
                continue
            found = Figure(**value)
            after = differences.get(ALIASES.get(name, name))
            text = f"{found.mean:9.4f}  [{found.low:.4f}, {found.high:.4f}]  n={found.count}"
            print(f"  {title + name:26} {text}  {Difference(**after) if after else ''}".rstrip())
    for reason, count in results["left_out"].items():
        print(f"  left out {count}: {reason}")
    for reason, count in results["broken"].items():
        print(f"  {count} broken by their environment, scored as they stood: {reason}")
    if change.get("general_loss"):
        found = Difference(**change["general"]["accuracy"])
        print(f"LOSS on general items against {change['with']}: {found}")
