"""The reward of choosing among the tools on offer, where gold knows tools and no arguments."""

from __future__ import annotations

from sharpen.types import Score, Task, Trajectory


class ToolChoiceReward:
    """1 if exactly gold's tools are called, whatever their arguments."""

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        called = {call.name for turn in trajectory.turns for call in turn.message.tool_calls}
        right = called == set(task.gold["tools"])
        feedback = "" if right else f"called {sorted(called)}"
        return Score(float(right), {"right": float(right)}, feedback, solved=right)
