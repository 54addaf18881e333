"""What is measured besides the training samples of online RL: greedy answers to the dev tasks, the
user's callback, and the gate that a run has to pass before its first step. `OnlineTrainer` calls
it."""

from __future__ import annotations

from collections.abc import Sequence

from sharpen.kinds import environment_by_name
from sharpen.scored_rollout import (
    NOT_THE_MODELS_FAULT,
    PlaySettings,
    mean_scores,
    play_and_score,
    summarize_reasons,
)
from sharpen.train.callback import Callback, EvaluationContext, call_back
from sharpen.train.config.online import RLConfig
from sharpen.types import Json, Policy, Reward, Sampling, SharpenError, Task, TokenPolicy

# the figure that the gate compares, the first one that the dev tasks have
_GATE_FIGURES = ("tool_accuracy", "exact_call")


class DevEvaluation:
    """Measures a policy on the dev tasks and by the callback."""

    def __init__(
        self,
        config: RLConfig,
        dev_tasks: Sequence[Task],
        reward: Reward,
        callback: Callback | None = None,
    ):
        self.config = config
        self.dev_tasks = dev_tasks
        self.callback = callback
        make_environment = environment_by_name(config.env)
        self.how = PlaySettings(
            reward=reward,
            sampling=Sampling(
                config.max_tokens, 0.0, config.top_p, 0, constrained=config.constrained
            ),
            make_environment=make_environment,
            max_turns=config.max_turns,
            reward_workers=config.reward_workers,
            excluded_stops=NOT_THE_MODELS_FAULT,  # cut-off and long answers count here
        )

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether to measure after this step."""
        return step % self.config.eval_steps == 0 or step == total_steps

    def evaluate(self, context: EvaluationContext) -> Json:
        """Returns the figures of the dev tasks and of the callback; `metric` is the one by which
        weights are compared."""
        row: Json = {}
        if self.dev_tasks:
            row |= self.measure(context.policy)
        if self.callback:
            row |= call_back(self.callback, context)
        return row

    def measure(self, policy: Policy | TokenPolicy) -> Json:
        """Returns the mean score of greedy answers to the dev tasks, of its parts, and the share of
        tasks that are solved."""
        groups = play_and_score(policy, self.dev_tasks, self.how)
        samples = [sample for group in groups for sample in group.samples]
        dropped = [reason for group in groups for reason in group.dropped]
        if not samples:
            raise SharpenError(
                f"{self.config.dev_data}: no dev task could be scored: {summarize_reasons(dropped)}"
            )
        means = mean_scores(samples)
        row: Json = {"metric": means.pop("")}
        for name, value in means.items():
            row[f"eval_{name}"] = value
        if dropped:
            row["eval_dropped"] = len(dropped)
            row["eval_dropped_why"] = summarize_reasons(dropped)
        return row

    def check_gate(self, policy: Policy | TokenPolicy, train_tasks: Sequence[Task]) -> None:
        """Refuse a policy that still calls tools wrongly: RL would drill its mistakes."""
        config = self.config
        has_tools = any(task.tools for task in self.dev_tasks or train_tasks)
        if not config.min_dev_score or not has_tools:
            return
        if not self.dev_tasks:
            print("gate: not measured, there is no dev_data")
            return
        row = self.measure(policy)
        name = _gate_figure(row)
        if row[name] < config.min_dev_score:
            raise SharpenError(
                f"gate: {name} is {row[name]:.3f} on {config.dev_data}, below "
                f"{config.min_dev_score}; train the model with SFT first, or start anyway with "
                "--force (min_dev_score=0)"
            )
        print(f"gate: {name} {row[name]:.3f} on {config.dev_data}")


def _gate_figure(row: Json) -> str:
    """The name of the figure that the gate compares."""
    for name in row:
        if name.endswith(_GATE_FIGURES):
            return name
    return "metric"
