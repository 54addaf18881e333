"""Run inside the sandbox, on both sides of a code reward.

The judge's process holds the tests, the candidate's holds the answer. They speak through file
descriptor 3, one JSON line per message. To the tests, the answer's functions are `Far` objects: a
call sends arguments and gets data back. No expected value and no verdict enters the candidate's
process. `rewards/code.py` sends this file as source and carries the lines.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import builtins
import json
import os
import sys

TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
# What a test may do with an object that the candidate made. Arithmetic and comparison with data are
# missing: they would hand it the expected value.
METHODS = (
    "__call__", "__len__", "__iter__", "__next__", "__getitem__", "__setitem__", "__setattr__",
    "__str__", "__repr__", "__enter__", "__exit__",
)  # fmt: skip
_MAX_ERROR_CHARS = 500
objects = []  # those of this side that the other side knows by number
namespace = {}  # the candidate's globals; stays empty in the judge's process


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
    """Returns a method that does on the other side what it is called for here."""

    def call_far(far, *args, **named):
        return ask(far._number, method, [*args], named)

    return call_far


for method_name in METHODS:
    setattr(Far, method_name, forward(method_name))


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
    if isinstance(value, bytes):
        return {type(value).__name__: value.decode("latin-1")}
    if isinstance(value, complex):
        return {type(value).__name__: str(value)}
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    objects.append(value)
    return {"mine": len(objects) - 1}


def decode(value):
    """The value that the other side encoded: what is "mine" there is far away here."""
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "mine":
        return Far(content)
    if tag == "yours":
        return objects[content]
    if tag == "type":
        return TYPES[content]
    if tag == "bytes":
        return content.encode("latin-1")
    if tag == "complex":
        return complex(content)
    return TYPES[tag](map(decode, content))


def send(message) -> None:
    """Write one message to the other side."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        written = os.write(3, data)
        data = data[written:]


def receive():
    """Wait for one message; end the process when the other side is gone."""
    line = channel.readline()
    return json.loads(line) if line else os._exit(0)


def ask(target: int | str, method: str, args: list, named: dict):
    """Have the other side do something, and answer what it asks meanwhile."""
    send([target, method, encode(args), encode(named)])
    message = receive()
    while isinstance(message, list):
        answer(*message)
        message = receive()
    for mine, theirs in zip(args, decode(message["args"]), strict=True):
        _copy_changes(mine, theirs)
    if "error" in message:
        kind = TYPES.get(message["error"][0], RuntimeError)
        if not issubclass(kind, Exception):
            kind = RuntimeError
        raise kind(message["error"][1])
    return decode(message["value"])


def _copy_changes(mine, theirs) -> None:
    """Make an argument what it is on the other side: a call may change it in place."""
    if isinstance(mine, list):
        mine.clear()
        mine.extend(theirs)
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(theirs)


def answer(target: int | str, method: str, args, named) -> None:
    """Do what the other side asked. The judge's objects can only be called: they lead to tests."""
    try:
        if not namespace and method != "__call__":
            raise PermissionError(method)
        value = namespace[target] if isinstance(target, str) else objects[target]
        arguments = decode(args)
        if method:
            value = getattr(type(value), method)(value, *arguments, **decode(named))
        send({"value": encode(value), "args": encode(arguments)})
    except BaseException as error:
        send({"error": [type(error).__name__, str(error)[:_MAX_ERROR_CHARS]], "args": args})


def problem_of(source: str, space: dict) -> str:
    """Execute; returns empty text when nothing went wrong."""
    try:
        exec(compile(source, space["__name__"], "exec"), space)
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:_MAX_ERROR_CHARS]}"
    return ""


def candidate(source: str) -> None:
    """The answer's side: execute the answer, then do what the judge asks."""
    global namespace
    module = type(sys)("candidate")
    sys.modules["candidate"] = module
    namespace = vars(module)
    send(problem_of(source, namespace))
    while True:
        answer(*receive())


def judge(setup: str, tests: list[str], names: list[str]) -> None:
    """The tests' side: get what the answer defines, then run the tests one by one."""
    space = {"__name__": "tests"}
    far = {}
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
