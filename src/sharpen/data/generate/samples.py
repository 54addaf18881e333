"""Rows from what is at hand (samples, ReAct text, logs, scored trajectories, renamed dialogs), rows
that a policy writes, of which only what passes a verifier is kept, and long contexts."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from sharpen.data.generate.dialog_draft import frames
from sharpen.envs.perturb import Names, fields_of
from sharpen.rewards.calls import call_problems
from sharpen.rows import dialog_to_row, tools_from_wire
from sharpen.types import (
    Dialog,
    Json,
    Message,
    Policy,
    Preference,
    Sampling,
    SharpenError,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)
from sharpen.world.fields import shared_pools
from sharpen.world.state import seeded

Verifier = Callable[[str, str], bool]  # (response, right answer) → is it right?
ODD_ONE = "One sentence above has nothing to do with the others. Which one is it?"


class ToolCallDataGenerator:
    """Samples over one set of tools, to whose schemas every call must fit."""

    def __init__(self, tools: list[Json], system: str = ""):
        self.tools = tools_from_wire(tools, "tools")
        self.tool_names, self.system = [tool.name for tool in self.tools], system

    def generate_sft_sample(
        self,
        user_query: str,
        expected_tool: str,
        expected_args: Json,
        tool_result: str,
        final_response: str,
    ) -> Json:
        """Question → call → result → answer."""
        step = {"tool": expected_tool, "args": expected_args, "result": tool_result}
        last = step | {"final_response": final_response}
        return self.generate_multi_tool_sample(user_query, [last])

    def generate_multi_tool_sample(self, user_query: str, tool_sequence: list[Json]) -> Json:
        """Steps `{"tool", "args", "result", "reasoning"?}`; the last one has `final_response`."""
        messages = []
        for number, step in enumerate(tool_sequence, 1):
            call = ToolCall(step["tool"], step["args"], f"call_{number}")
            asked = Message("assistant", step.get("reasoning", ""), (call,))
            if problems := call_problems(asked, self.tools):
                raise SharpenError(f"{user_query!r}: {'; '.join(problems)}")
            result = Message("tool", step["result"], name=call.name, tool_call_id=call.id)
            messages += [asked, result]
        if not tool_sequence or not tool_sequence[-1].get("final_response"):
            raise SharpenError(f"{user_query!r}: the last step needs a final_response")
        return self.row(user_query, messages, tool_sequence[-1]["final_response"])

    def generate_no_tool_sample(self, user_query: str, final_response: str) -> Json:
        """The tools are there and none is needed."""
        return self.row(user_query, [], final_response)

    def generate_retry_sample(
        self,
        user_query: str,
        failures: list[Json],
        tool_sequence: list[Json],
        reasoning: str = "That failed, so I try again.",
    ) -> Json:
        """Calls that fail (`{"tool", "args", "error"}`), then those that work."""
        failed = [step | {"result": json.dumps({"error": step["error"]})} for step in failures]
        told = [{"reasoning": reasoning} | step for step in [*failed[1:], tool_sequence[0]]]
        return self.generate_multi_tool_sample(user_query, [*failed[:1], *told, *tool_sequence[1:]])

    def row(self, query: str, messages: Sequence[Message], answer: str) -> Json:
        system = (Message("system", self.system),) if self.system else ()
        said = (*system, Message("user", query), *messages, Message("assistant", answer))
        return dialog_to_row(Dialog(said, self.tools))


class ReActDataGenerator:
    """Thought, Action, Action Input, Observation, Final Answer as text."""

    def generate_react_trajectory(self, question: str, trajectory: list[Json]) -> str:
        lines = []
        for number, step in enumerate(trajectory, 1):
            acting = ("action", "action_input", "observation")
            for key in ("thought", *(acting if "action" in step else ("final_answer",))):
                if key not in step:
                    raise SharpenError(f"{question!r}: step {number} has no {key}")
                text = step[key]
                text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
                lines.append(f"{key.replace('_', ' ').title()}: {text}")
        return "\n".join(lines) + "\n"

    def generate_from_logs(self, interaction_logs: list[Json]) -> list[Json]:
        """Rows from the logs that say `success`."""
        rows = []
        for log in (log for log in interaction_logs if log.get("success", False)):
            steps, question = log["trajectory"], log["question"]
            row = {"question": question}
            row["react_trajectory"] = self.generate_react_trajectory(question, steps)
            used = list(dict.fromkeys(step["action"] for step in steps if "action" in step))
            rows.append(row | {"tools_used": log.get("tools_used") or used})
        return rows


@dataclass(frozen=True, slots=True)
class Filters:
    """Which trajectories are fit to learn from."""

    min_score: float = 1.0
    max_turns: int = 12
    valid_calls: bool = True  # every call parses, is offered and fits its schema
    answered: bool = True  # the episode ended with an answer, not with a limit

    def reason(self, task: Task, trajectory: Trajectory) -> str:
        """Why a trajectory is not kept; empty if it is."""
        turns, score = trajectory.turns, trajectory.score
        cut = trajectory.stop != StopReason.ANSWERED
        said = [t.message for t in turns if t.message.tool_calls or t.message.unparsed]
        reasons = {
            "no turn": not turns,
            "score": score is None or score.value < self.min_score,
            "turns": len(turns) > self.max_turns,
            f"stopped by {trajectory.stop}": cut and self.answered,
            "invalid call": self.valid_calls and any(call_problems(m, task.tools) for m in said),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


def trajectory_to_dialog(task: Task, trajectory: Trajectory) -> Dialog:
    said = [m for turn in trajectory.turns for m in (turn.message, *turn.results)]
    score = {"score": trajectory.score.value} if trajectory.score else {}
    metadata = trajectory.metadata | score
    return Dialog((*task.messages, *said), task.tools, task.id, task.kind, metadata)


def sft_from_trajectories(
    pairs: Iterable[tuple[Task, Trajectory]], filters: Filters | None = None
) -> tuple[list[Dialog], Counter[str]]:
    """Dialogs to learn from, each once, and how many were left out for which reason."""
    kept: dict[str, Dialog] = {}
    reasons: Counter[str] = Counter()
    for task, trajectory in pairs:
        dialog = trajectory_to_dialog(task, trajectory)
        key, reason = repr(dialog.messages), (filters or Filters()).reason(task, trajectory)
        if reason or key in kept:
            reasons[reason or "duplicate"] += 1
        else:
            kept[key] = dialog
    return list(kept.values()), reasons


def preference_pair(
    task: Task, trajectories: Sequence[Trajectory], margin: float = 0.0
) -> Preference | None:
    """The best against the worst of one task's trajectories; None when they tie."""
    scored = [(t.score.value, t) for t in trajectories if t.score is not None and t.turns]
    if len(scored) < 2:
        return None
    (high, best), (low, worst) = max(scored, key=itemgetter(0)), min(scored, key=itemgetter(0))
    if high - low <= margin:
        return None
    said = [trajectory_to_dialog(task, t).messages[len(task.messages) :] for t in (best, worst)]
    return Preference(task.messages, said[0], said[1], task.tools, task.id, high, low)


def mask_functions(dialog: Dialog, seed: int = 0) -> Dialog:
    """The dialog with meaningless tool and parameter names: descriptions have to be read."""
    rng = random.Random(f"{seed}|{dialog.id}|{[tool.name for tool in dialog.tools]}")
    own = {t.name: f"func_{rng.randrange(16**4):04x}_{i}" for i, t in enumerate(dialog.tools)}
    names = Names(own, {tool.name: fields_of(tool) for tool in dialog.tools})
    messages = [m if m.role == "user" else names.outward(m) for m in dialog.messages]
    metadata: Json = dialog.metadata | {"masked": True}
    if isinstance(metadata.get("target_tools"), list):
        metadata["target_tools"] = [own.get(name, name) for name in metadata["target_tools"]]
    name = f"{dialog.id}-masked" if dialog.id else ""
    return replace(
        dialog,
        messages=tuple(messages),
        tools=tuple(map(names.tool, dialog.tools)),
        id=name,
        metadata=metadata,
    )


def replies(
    policy: Policy, prompts: Sequence[str], max_tokens: int, temperature: float, seed: int
) -> list[Turn]:
    dialogs = [Dialog((Message("user", prompt),)) for prompt in prompts]
    return policy.respond(dialogs, Sampling(max_tokens, temperature, seed=seed))


class ReasoningDataGenerator:
    """`policy` solves, `verify` decides; a local model, a server or a script will do."""

    def __init__(self, policy: Policy, verify: Verifier, max_tokens: int = 1024, seed: int = 0):
        self.policy, self.verify, self.max_tokens, self.seed = policy, verify, max_tokens, seed

    def generate_cot_data(self, questions: Sequence[str], answers: Sequence[str]) -> list[Json]:
        """`{"question", "reasoning", "answer"}` for every question that was solved."""
        if len(questions) != len(answers):
            raise SharpenError(f"{len(questions)} questions, but {len(answers)} answers")
        texts = self.solve(questions, answers, [""] * len(answers), 0.3)
        rows = zip(questions, texts, answers, strict=True)
        return [{"question": q, "reasoning": text, "answer": a} for q, text, a in rows if text]

    def generate_diverse_solutions(
        self, question: str, answer: str, n_solutions: int = 5
    ) -> list[str]:
        """Different right solutions, one try for each approach."""
        approaches = frames("reasoning")["approaches"]
        hints = [f"\n{approaches[i % len(approaches)]}" for i in range(n_solutions)]
        texts = self.solve([question] * n_solutions, [answer] * n_solutions, hints, 0.7)
        return list(dict.fromkeys(text for text in texts if text))

    def solve(
        self, questions: Sequence[str], answers: Sequence[str], hints: list[str], temperature: float
    ) -> list[str]:
        """Solutions in order; empty where one is wrong or did not come to an end."""
        prompt, found = frames("reasoning")["prompt"], []
        asked = [prompt.format(question=q) + h for q, h in zip(questions, hints, strict=True)]
        turns = replies(self.policy, asked, self.max_tokens, temperature, self.seed)
        for turn, answer in zip(turns, answers, strict=True):
            text = turn.message.content if turn.stop == StopReason.ANSWERED else ""
            found.append(text if text and self.verify(text, answer) else "")
        return found


class LongContextDataGenerator:
    """Lengths are in characters; `filler` are sentences of one's own to hide needles among."""

    def __init__(self, policy: Policy | None = None, filler: Sequence[str] = (), seed: int = 0):
        self.policy, self.filler, self.seed = policy, tuple(filler), seed

    def generate_needle_in_haystack(
        self,
        context_length: int,
        needle: str,
        needle_position: float = 0.5,
        question: str = ODD_ONE,
        answer: str | None = None,
    ) -> Json:
        """`needle` between two sentences, as near to `needle_position` (0 to 1) as they allow."""
        if not 0 <= needle_position <= 1 or context_length <= len(needle):
            asked = f"a needle of {len(needle)} characters at {needle_position} does not fit into "
            raise SharpenError(f"{asked}{context_length}: the position is between 0 and 1")
        room, passed, before, after = context_length - len(needle) - 1, 0, [], []
        for sentence in self.sentences(needle):
            if passed + len(sentence) + 1 > room:
                break
            early = passed + len(sentence) / 2 < needle_position * context_length
            (before if early else after).append(sentence)
            passed += len(sentence) + 1
        context, answer = " ".join([*before, needle, *after]), needle if answer is None else answer
        row = {"context": context, "question": question, "answer": answer}
        return row | {"needle_position": needle_position}

    def sentences(self, needle: str) -> Iterator[str]:
        rng, pools = seeded("haystack", self.seed, needle), shared_pools()
        while self.filler:
            yield rng.choice(self.filler)
        while True:
            text = rng.choice(frames("haystack"))
            yield text.format(**{name: rng.choice(pool) for name, pool in pools.items()})

    def generate_multi_doc_qa(
        self,
        documents: Sequence[str],
        question: str,
        relevant_doc_indices: Sequence[int],
        answer: str | None = None,
    ) -> Json:
        """All documents under numbered headings; indices count from 0."""
        for index in relevant_doc_indices:
            if not 0 <= index < len(documents):
                raise SharpenError(f"there is no document {index}: {len(documents)} were given")
        parts = [f"=== Document {i} ===\n{text}" for i, text in enumerate(documents, 1)]
        row: Json = {"context": "\n\n".join(parts), "question": question}
        row |= {"relevant_docs": list(relevant_doc_indices), "n_documents": len(documents)}
        return row if answer is None else row | {"answer": answer}

    def generate_long_form_completion(self, prompt: str, target_length: int) -> Json:
        """A long text by the policy, with the length it really has."""
        if self.policy is None:
            raise SharpenError("long text is written by a policy: LongContextDataGenerator(policy)")
        asked = f"{prompt}\n\nWrite about {target_length} characters."
        turn = replies(self.policy, [asked], max(16, target_length // 3), 0.7, self.seed)[0]
        text, complete = turn.message.content, turn.stop == StopReason.ANSWERED
        if not text:
            raise SharpenError(f"the policy wrote nothing for {prompt[:60]!r} ({turn.stop})")
        row: Json = {"prompt": prompt, "completion": text, "target_length": target_length}
        return row | {"length": len(text), "complete": complete}
