"""What happens in a row, by the names that `sets.yaml` uses. A dialog has a main request, solved
with real calls, and `follow`s it up. A task is what the user says last, with its gold answer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from sharpen.data.generate.dialog_draft import (
    DialogDraft,
    DrawFailed,
    frames,
    lacking,
    require_draw,
    using,
)
from sharpen.data.generate.plans import ask_for, find_steps, plan_to_gold, written
from sharpen.types import ToolCall
from sharpen.world.domain import Tool
from sharpen.world.episode import FAULTS, outcome_of
from sharpen.world.phrases import fill, missing_question, slots, spoken

FEWEST, MOST = 6, 12  # messages
LONGEST = 4400  # characters of everything but the tools: about 1,300 tokens
QUIET, LONGER = 0.6, 0.2  # shares: of dialogs about nothing to do, and of one more turn


class Scenario(DialogDraft):
    """First the main requests of dialogs, then how a dialog goes on, then tasks."""

    def single(self) -> None:
        self.serve(self.request(self.text))

    def refused(self) -> None:
        """The state forbids it: the assistant says so and does not try again."""
        for outcome in self.rng.sample(["conflict", "permission", "empty"], 3):
            with suppress(DrawFailed):
                result = self.perform(self.request(self.text, outcome))
                self.say(f"I could not do that: {result.get('message', 'nothing matches that')}.")
                return
        raise DrawFailed

    def recovery(self) -> None:
        """The key is wrong: the assistant looks the right ones up, asks, and goes on."""
        tool, wrong = self.tool, self.request(self.text, "not_found")
        key = next((n for n in tool.takes if n in tool.required and not tool.params[n].many), "")
        entity = tool.takes.get(key, "")
        finders = [(t, path) for t in self.domain.tools.values() if (path := listing(t, entity))]
        finder, path = self.rng.choice(require_draw(finders))
        listed = self.episode.fork().call(ToolCall(finder.name))
        right = [row[key] for row in listed.get(path, ()) if key in row]
        calls = [replace(wrong, arguments=wrong.arguments | {key: value}) for value in right]
        good = require_draw([c for c in calls if outcome_of(self.episode.fork().call(c)) == "ok"])
        named = f"{self.domain.entities[entity].noun} {wrong.arguments[key]}"
        self.perform(wrong)
        self.perform(ToolCall(finder.name), content=f"There is no {named}; I look for it.")
        self.say(f"I found no {named}. There are {spoken(right)}. Which one do you mean?")
        self.user(self.frame("confirm").format(key=good[0].arguments[key]))
        self.serve(good[0])

    def planned(self) -> None:
        """Several steps of one request: independent ones at once, others in turn."""
        steps = find_steps(self)
        ask_for(self, steps)
        if self.kind.frame == "both":
            self.perform(*(step.call for step in steps))
        else:
            names = [f"{at}. {step.tool.name}" for at, step in enumerate(steps, 1)]
            for at, step in enumerate(steps):
                self.perform(step.call, content="" if at else f"Plan: {', '.join(names)}.")
        self.tell(*((step.tool, step.call, step.result) for step in steps))

    def missing(self) -> None:
        """Something is left out: the assistant asks, the user tells, the call follows."""
        tool, vague = self.tool, require_draw(self.tool.operation.vague)
        call, names = self.request(vague), lacking(tool, vague)
        self.say(" ".join(missing_question(tool, name) for name in names))
        frame = self.frame("given") if len(names) == 1 else frames(self.shelf.split)["given"][0]
        told = [(tool.params[name].field.about, spoken(call.arguments[name])) for name in names]
        self.user("; ".join(frame.format(about=about, value=value) for about, value in told) + ".")
        self.serve(call)

    def no_tool(self) -> None:
        """The user wants to know, not to act; the request itself may come afterwards."""
        self.quiet = self.rng.random() < QUIET
        call = self.explain()
        if not self.quiet and self.rng.random() < 0.5:
            self.user(self.frame("one").format(goal=fill(self.tool.operation.goal, call.arguments)))
            self.serve(call)

    def explain(self) -> ToolCall:
        """Say which tool would do it and with what, and leave it at that."""
        name, about, goal = self.tool.name, self.tool.operation.about, self.tool.operation.goal
        call = self.sample(goal)
        self.user(self.frame("explain").format(goal=fill(goal, call.arguments)))
        told = f"I would pass {spoken(call.arguments) or 'nothing'}; nothing has been done yet."
        self.say(f"With {name}: {about[:1].lower()}{about[1:-1]}. {told}")
        self.used[name] = self.tool
        return call

    def no_suitable(self) -> None:
        """Nothing on offer does it, from the first such request on."""
        if not self.barred:
            self.quiet = self.rng.random() < QUIET
            self.bar()
        call, goal = self.request(self.text), self.tool.operation.goal
        told = all(name in call.arguments for name in slots(goal))
        wanted = fill(goal, call.arguments) if told else "do that"
        self.say(f"None of the tools I have here can {wanted}, so I have to leave it.")

    def follow(self) -> None:
        """Go on until the dialog is long enough, and now and then a little longer."""
        turns = [self.another] * 2 + [self.recall, self.general, self.thanks]
        turns = [self.another_question] * 2 + [self.general] if self.quiet else turns
        turn, said = None, self.messages
        while turn != self.thanks and (
            len(said) < FEWEST or (len(said) + 4 <= MOST and self.rng.random() < LONGER)
        ):
            turn = self.rng.choice(turns)
            try:
                turn()
            except DrawFailed:
                turns[0]()
        if not FEWEST <= len(said) <= MOST or sum(len(m.content) for m in said) > LONGEST:
            raise DrawFailed

    def another(self) -> None:
        for tool in self.unused():
            self.tool, self.text = tool, self.rng.choice(tool.operation.ask)
            with suppress(DrawFailed):
                return self.single()
        raise DrawFailed

    def unused(self) -> list[Tool]:
        """A few tools of the category that did not occur yet."""
        out = {*self.used, *(tool.name for tool in self.barred)}
        free = [tool for name, tool in self.domain.tools.items() if name not in out]
        return self.rng.sample(free, min(4, len(free)))

    def another_question(self) -> None:
        """One more request that is not to be acted on."""
        if self.barred:
            self.tool = self.rng.choice(self.barred)
            self.text = self.rng.choice(self.tool.operation.ask)
            return self.no_suitable()
        self.tool = require_draw(self.unused())[0]
        self.explain()

    def recall(self) -> None:
        """Something that the last answer already said: one of its described single values."""
        tool, result = self.last or (self.tool, {})
        about = {n: p.get("description", "") for n, p in tool.outputs()["properties"].items()}
        values = {n: value for n, value in result.items() if type(value) in (str, int, float)}
        found = require_draw([(about[n], value) for n, value in values.items() if about.get(n)])
        name, value = self.rng.choice(found)
        name = name[:1].lower() + name[1:]
        self.user(self.frame("recall").format(about=name))
        self.say(f"The {name} is {spoken(value)}.")

    def general(self) -> None:
        text, kind = self.frame("general")
        a, b = self.rng.randrange(5, 95, 5), self.rng.randrange(20, 900, 20)
        a = self.rng.randrange(2, 30) if kind == "minutes" else a
        value = {"percent": a * b / 100, "minutes": a * 60, "sum": a + b}[kind]
        self.user(text.format(a=a, b=b))
        self.say(f"That is {value:g}{' minutes' if kind == 'minutes' else ''}.")

    def thanks(self) -> None:
        self.user(self.frame("thanks"))
        self.say("You're welcome.")

    def select(self) -> None:
        self.gold = {"tools": [self.tool.name], "calls": written(self.request(self.text))}

    def act(self) -> None:
        self.gold["decision"] = "call"

    def ask(self) -> None:
        """The tool's own vague request, or its goal with one key left in the dark."""
        tool, phrase = self.tool, self.tool.operation.vague
        named = [n for n in using(tool, tool.operation.goal) if n in tool.required]
        keys = [n for n in named if n in tool.takes and not tool.params[n].many]
        if keys and (self.level or not phrase):
            name = self.rng.choice(keys)
            hidden = self.frame("someone").format(noun=self.domain.entities[tool.takes[name]].noun)
            goal = tool.operation.goal.replace(f"{{{name}}}", hidden)
            phrase = self.frame("one").replace("{goal}", goal)
        self.request(require_draw(phrase))
        self.gold = {"decision": "ask", "tools": [tool.name], "missing": lacking(tool, phrase)}

    def answered(self) -> None:
        """No call is needed: what was said last is the answer."""
        said = self.messages.pop().content
        self.gold = {"decision": "answer"} | ({"answer": said} if self.kind.known else {})

    def decline(self) -> None:
        self.request(self.text)
        self.bar()
        self.gold = {"decision": "decline"}

    def plan(self) -> None:
        steps = find_steps(self)
        ask_for(self, steps)
        self.gold = plan_to_gold(steps)

    def accomplish(self) -> None:
        """One change, or steps of which one is a change; hard ones meet a fault on the way."""
        if not self.level:
            return self.select()
        steps = find_steps(self)
        self.gold = {"calls": written(*(step.call for step in steps))}
        if self.level == 2:
            at = str(self.rng.randrange(len(steps)))
            self.gold["faults"] = {"at": {at: self.rng.choice(list(FAULTS))}}
        ask_for(self, steps)


def listing(tool: Tool, entity: str) -> str:
    """Where a tool that is called with nothing shows keys of this entity; empty if it does not."""
    if not tool.read_only or tool.required:
        return ""
    paths = (path for path, shown in tool.yields.items() if shown == entity)
    return next((path.split("[]")[0] for path in paths if path.count("[]") == 1), "")
