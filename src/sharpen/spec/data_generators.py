"""The frontier techniques document's generators of training rows.

Rows from what is at hand (hand-written samples, ReAct steps, logs) and rows that a policy writes,
which are kept only if a verifier accepts them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from sharpen.data.generate.haystack import DEFAULT_QUESTION, needle_in_haystack
from sharpen.data.generate.policy_samples import ask_policy
from sharpen.data.generate.sets import frames
from sharpen.rewards.calls import call_problems
from sharpen.rows import dialog_to_row, tools_from_wire
from sharpen.types import Dialog, Json, Message, Policy, SharpenError, StopReason, ToolCall

_Verifier = Callable[[str, str], bool]  # (response, right answer) → is it right?
_REASONING_TEMPERATURE = 0.3
_DIVERSE_TEMPERATURE = 0.7
_LONG_FORM_TEMPERATURE = 0.7
_CHARACTERS_PER_TOKEN = 3
_MIN_LONG_FORM_TOKENS = 16


class ToolCallDataGenerator:
    """Makes rows over one set of tools (section 2.2). Every call has to fit its tool's schema.

    Calls are `tool_calls` of a message, not text in it, and no tool list is written into a system
    message: the renderer adds both in the form that the model knows. The samples without a call
    and with a retry are not in the document's class, but on its checklist (section 2.4).
    """

    def __init__(self, tools: list[Json], system: str = ""):
        self.tools = tools_from_wire(tools, "tools")
        self.tool_names = [tool.name for tool in self.tools]
        self.system = system

    def generate_sft_sample(
        self,
        user_query: str,
        expected_tool: str,
        expected_args: Json,
        tool_result: str,
        final_response: str,
    ) -> Json:
        """Return a row with one call: question, call, result, answer."""
        step = {
            "tool": expected_tool,
            "args": expected_args,
            "result": tool_result,
            "final_response": final_response,
        }
        return self.generate_multi_tool_sample(user_query, [step])

    def generate_multi_tool_sample(self, user_query: str, tool_sequence: list[Json]) -> Json:
        """Return a row with several calls.

        Steps are `{"tool", "args", "result", "reasoning"?}`; the last one has `final_response`.
        """
        messages = []
        for number, step in enumerate(tool_sequence, 1):
            call = ToolCall(step["tool"], step["args"], f"call_{number}")
            call_message = Message("assistant", step.get("reasoning", ""), (call,))
            problems = call_problems(call_message, self.tools)
            if problems:
                raise SharpenError(f"{user_query!r}: step {number}: {'; '.join(problems)}")
            messages.append(call_message)
            messages.append(Message("tool", step["result"], name=call.name, tool_call_id=call.id))
        if not tool_sequence or not tool_sequence[-1].get("final_response"):
            raise SharpenError(f"{user_query!r}: the last step has no final_response; add one")
        return self._to_row(user_query, messages, tool_sequence[-1]["final_response"])

    def generate_no_tool_sample(self, user_query: str, final_response: str) -> Json:
        """Return a row in which tools are offered and none is called."""
        return self._to_row(user_query, [], final_response)

    def generate_retry_sample(
        self,
        user_query: str,
        failures: list[Json],
        tool_sequence: list[Json],
        reasoning: str = "That failed, so I try again.",
    ) -> Json:
        """Return a row with calls that fail (`{"tool", "args", "error"}`) before those that work.

        Every call after a failure is introduced by `reasoning`, unless it has its own.
        """
        steps: list[Json] = []
        for failure in failures:
            step = failure | {"result": json.dumps({"error": failure["error"]})}
            if steps:
                step = {"reasoning": reasoning} | step
            steps.append(step)
        steps.append({"reasoning": reasoning} | tool_sequence[0])
        steps += tool_sequence[1:]
        return self.generate_multi_tool_sample(user_query, steps)

    def _to_row(self, query: str, messages: Sequence[Message], answer: str) -> Json:
        """Return the row of a dialog between the question and the answer."""
        dialog_messages = [Message("user", query), *messages, Message("assistant", answer)]
        if self.system:
            dialog_messages.insert(0, Message("system", self.system))
        return dialog_to_row(Dialog(tuple(dialog_messages), self.tools))


class ReActDataGenerator:
    """Makes ReAct text (section 2.3): Thought, Action, Action Input, Observation, Final Answer."""

    def generate_react_trajectory(self, question: str, trajectory: list[Json]) -> str:
        """Return the text of the steps; a step has an `action` or a `final_answer`."""
        lines = []
        for number, step in enumerate(trajectory, 1):
            keys = ["thought", "final_answer"]
            if "action" in step:
                keys = ["thought", "action", "action_input", "observation"]
            for key in keys:
                if key not in step:
                    raise SharpenError(f"{question!r}: step {number} has no {key}")
                text = step[key]
                if not isinstance(text, str):
                    text = json.dumps(text, ensure_ascii=False)
                lines.append(f"{key.replace('_', ' ').title()}: {text}")
        return "\n".join(lines) + "\n"

    def generate_from_logs(self, interaction_logs: list[Json]) -> list[Json]:
        """Return a row for every log with `success`."""
        rows = []
        for log in interaction_logs:
            if not log.get("success", False):
                continue
            steps = log["trajectory"]
            actions = [step["action"] for step in steps if "action" in step]
            text = self.generate_react_trajectory(log["question"], steps)
            row = {
                "question": log["question"],
                "react_trajectory": text,
                "tools_used": log.get("tools_used") or list(dict.fromkeys(actions)),
            }
            rows.append(row)
        return rows


class ReasoningDataGenerator:
    """Lets a policy solve questions and keeps the solutions that `verify` accepts (section 1.4).

    The document asks one hosted model; here any policy can be asked, a local one too.
    """

    def __init__(self, policy: Policy, verify: _Verifier, max_tokens: int = 1024, seed: int = 0):
        self.policy = policy
        self.verify = verify
        self.max_tokens = max_tokens
        self.seed = seed

    def generate_cot_data(self, questions: Sequence[str], answers: Sequence[str]) -> list[Json]:
        """Return `{"question", "reasoning", "answer"}` for every question that was solved."""
        if len(questions) != len(answers):
            raise SharpenError(
                f"{len(questions)} questions, but {len(answers)} answers; give one per question"
            )
        hints = [""] * len(answers)
        solutions = self._solve(questions, answers, hints, _REASONING_TEMPERATURE)
        rows = []
        for question, solution, answer in zip(questions, solutions, answers, strict=True):
            if solution:
                rows.append({"question": question, "reasoning": solution, "answer": answer})
        return rows

    def generate_diverse_solutions(
        self, question: str, answer: str, n_solutions: int = 5
    ) -> list[str]:
        """Return different right solutions; each attempt is told another approach."""
        approaches = frames("reasoning")["approaches"]
        hints = []
        for number in range(n_solutions):
            hints.append("\n" + approaches[number % len(approaches)])
        questions = [question] * n_solutions
        answers = [answer] * n_solutions
        solutions = self._solve(questions, answers, hints, _DIVERSE_TEMPERATURE)
        return list(dict.fromkeys(solution for solution in solutions if solution))

    def _solve(
        self,
        questions: Sequence[str],
        answers: Sequence[str],
        hints: Sequence[str],
        temperature: float,
    ) -> list[str]:
        """Return one solution per question; empty where it is wrong or was cut off."""
        template = frames("reasoning")["prompt"]
        prompts = []
        for question, hint in zip(questions, hints, strict=True):
            prompts.append(template.format(question=question) + hint)
        turns = ask_policy(self.policy, prompts, self.max_tokens, temperature, self.seed)
        solutions = []
        for turn, answer in zip(turns, answers, strict=True):
            text = turn.message.content
            was_cut_off = turn.stop != StopReason.ANSWERED
            if was_cut_off or not text or not self.verify(text, answer):
                text = ""
            solutions.append(text)
        return solutions


class LongContextDataGenerator:
    """Makes rows with long contexts (section 3.3). Lengths are in characters.

    `filler` are sentences to hide needles among, instead of the built-in ones.
    """

    def __init__(self, policy: Policy | None = None, filler: Sequence[str] = (), seed: int = 0):
        self.policy = policy
        self.filler = tuple(filler)
        self.seed = seed

    def generate_needle_in_haystack(
        self,
        context_length: int,
        needle: str,
        needle_position: float = 0.5,
        question: str = DEFAULT_QUESTION,
        answer: str | None = None,
    ) -> Json:
        """Return a text with `needle` between two sentences, near `needle_position` (0 to 1).

        The answer is the needle if none is given.
        """
        return needle_in_haystack(
            context_length,
            needle,
            needle_position,
            question,
            answer,
            filler=self.filler,
            seed=self.seed,
        )

    def generate_multi_doc_qa(
        self,
        documents: Sequence[str],
        question: str,
        relevant_doc_indices: Sequence[int],
        answer: str | None = None,
    ) -> Json:
        """Return a question over numbered documents; indices count from 0."""
        for index in relevant_doc_indices:
            if not 0 <= index < len(documents):
                raise SharpenError(
                    f"relevant_doc_indices: there is no document {index} among "
                    f"{len(documents)}; indices count from 0"
                )
        sections = []
        for number, text in enumerate(documents, 1):
            sections.append(f"=== Document {number} ===\n{text}")
        row: Json = {
            "context": "\n\n".join(sections),
            "question": question,
            "relevant_docs": list(relevant_doc_indices),
            "n_documents": len(documents),
        }
        if answer is not None:
            row["answer"] = answer
        return row

    def generate_long_form_completion(self, prompt: str, target_length: int) -> Json:
        """Return a long text by the policy, with the length it really has."""
        if self.policy is None:
            raise SharpenError(
                "policy: long text is written by a policy; use LongContextDataGenerator(policy)"
            )
        max_tokens = max(_MIN_LONG_FORM_TOKENS, target_length // _CHARACTERS_PER_TOKEN)
        full_prompt = f"{prompt}\n\nWrite about {target_length} characters."
        turns = ask_policy(
            self.policy, [full_prompt], max_tokens, _LONG_FORM_TEMPERATURE, self.seed
        )
        text = turns[0].message.content
        if not text:
            raise SharpenError(f"the policy wrote nothing for {prompt[:60]!r} ({turns[0].stop})")
        return {
            "prompt": prompt,
            "completion": text,
            "target_length": target_length,
            "length": len(text),
            "complete": turns[0].stop == StopReason.ANSWERED,
        }
