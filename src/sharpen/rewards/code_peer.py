"""Runs inside the sandbox, on both sides of a code reward: the judge's process holds the tests, the
candidate's holds the answer, and they speak through file descriptor 3, one JSON line a message. To
the tests, the answer's functions are `Far` objects: a call sends arguments and gets data back. No
expected value and no verdict enters the candidate's process."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import builtins
import json
import os
import sys

TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
# What a test may do with an object that the candidate made. Arithmetic and comparison with data are
# missing: they would hand it the expected value.
METHODS = ("__call__", "__len__", "__iter__", "__next__", "__getitem__", "__setitem__")
METHODS += ("__setattr__", "__str__", "__repr__", "__enter__", "__exit__")
objects, namespace = [], {}  # the judge's namespace stays empty


class Far:
    """An object on the other side."""

    def __init__(self, number: int):
        self.__dict__["_number"] = number

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return ask(self._number, "__getattribute__", [name], {})

    def __eq__(self, other: object) -> bool:
        return type(other) is Far and ask(self._number, "__eq__", [other], {})

    __hash__ = object.__hash__


def forward(method: str):
    return lambda far, *args, **named: ask(far._number, method, [*args], named)


for each in METHODS:
    setattr(Far, each, forward(each))


def encode(value):
    """Data as JSON, tagged where JSON has no word for it; anything else stays here, numbered."""
    if value is None or isinstance(value, int | float | str):
        return value
    if type(value) is Far:
        return {"yours": value._number}
    for kind in (list, tuple, set, frozenset, dict):
        if isinstance(value, kind):
            items = dict.items(value) if isinstance(value, dict) else value
            return {kind.__name__: [encode(item) for item in items]}
    if isinstance(value, bytes | complex):
        text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
        return {type(value).__name__: text}
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    objects.append(value)
    return {"mine": len(objects) - 1}


def decode(value):
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in ("mine", "yours", "type"):
        return Far(content) if tag == "mine" else {"yours": objects, "type": TYPES}[tag][content]
    if tag in ("bytes", "complex"):
        return content.encode("latin-1") if tag == "bytes" else complex(content)
    return TYPES[tag](map(decode, content))


def send(message) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(3, data) :]


def receive():
    line = channel.readline()
    return json.loads(line) if line else os._exit(0)


def ask(target: int | str, method: str, args: list, named: dict):
    """Have the other side do something, and answer what it asks meanwhile."""
    send([target, method, encode(args), encode(named)])
    while isinstance(message := receive(), list):
        answer(*message)
    for mine, theirs in zip(args, decode(message["args"]), strict=True):
        if isinstance(mine, list | dict | set):  # a call may change its arguments
            mine.clear()
            (mine.extend if isinstance(mine, list) else mine.update)(theirs)
    if "error" in message:
        kind = TYPES.get(message["error"][0], RuntimeError)
        raise (kind if issubclass(kind, Exception) else RuntimeError)(message["error"][1])
    return decode(message["value"])


def answer(target: int | str, method: str, args, named) -> None:
    """Do what the other side asked. The judge's objects can only be called: they lead to tests."""
    try:
        if not namespace and method != "__call__":
            raise PermissionError(method)
        found = namespace[target] if isinstance(target, str) else objects[target]
        given = decode(args)
        value = getattr(type(found), method)(found, *given, **decode(named)) if method else found
        send({"value": encode(value), "args": encode(given)})
    except BaseException as error:
        send({"error": [type(error).__name__, str(error)[:500]], "args": args})


def problem_of(source: str, space: dict) -> str:
    """Execute; empty when nothing went wrong."""
    try:
        exec(compile(source, space["__name__"], "exec"), space)
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:500]}"
    return ""


def candidate(source: str) -> None:
    global namespace
    sys.modules["candidate"] = module = type(sys)("candidate")
    namespace = vars(module)
    send(problem_of(source, namespace))
    while True:
        answer(*receive())


def judge(setup: str, tests: list[str], names: list[str]) -> None:
    space, far = {"__name__": "tests"}, {}
    for name in names:
        try:
            far[name] = ask(name, "", [], {})
        except LookupError:
            continue  # the test that needs it fails with a NameError
    space |= far
    problem = problem_of(setup, space)
    space |= far  # a setup may hold a stub of what it asks for
    for test in tests:
        send({"verdict": problem or problem_of(test, space)})


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    channel = open(3, "rb", closefd=False)  # noqa: SIM115 - as long as the process lives
