"""Runs inside the sandbox, on both sides of a code reward: the judge's process holds the tests, the
candidate's holds the answer, and they speak through file descriptor 3, one JSON line a message.

The tests see the answer's functions as `Far` objects: a call sends arguments and gets plain data
back. No expected value and no verdict enters the candidate's process."""

from __future__ import annotations

import builtins
import json
import os
import sys

TYPE_CHECKING = False  # typing itself would cost every start 5 ms
if TYPE_CHECKING:
    from typing import Any

TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
TEXTS = {"Decimal": "decimal", "Fraction": "fractions", "complex": "builtins"}  # and their modules
# What a test may do with an object that the candidate made. Arithmetic and comparison with data are
# missing: they would hand it the expected value.
METHODS = ["__call__", "__len__", "__iter__", "__next__", "__getitem__", "__setitem__"]
METHODS += ["__setattr__", "__str__", "__repr__", "__enter__", "__exit__"]
objects: list[Any] = []
namespace: dict[str, Any] = {}  # the candidate's; the judge's is empty


class Far:
    """An object on the other side."""

    def __init__(self, number: int):
        self.__dict__["_number"] = number

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return ask(self._number, "__getattribute__", [name], {})

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Far and ask(self._number, "__eq__", [other], {}))

    __hash__ = object.__hash__


def forward(name: str):
    def method(far: Far, *args, **named):
        return ask(far._number, name, [*args], named)

    return method


for each in METHODS:
    setattr(Far, each, forward(each))


def encode(value: Any) -> Any:
    """Data as JSON, tagged where JSON has no word for it; anything else stays here, numbered."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is Far:
        return {"yours": value._number}
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    if type(value).__name__ in TEXTS:
        return {type(value).__name__: str(value)}
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    objects.append(value)
    return {"mine": len(objects) - 1}


def decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in ("mine", "yours"):
        return Far(content) if tag == "mine" else objects[content]
    if tag == "dict":
        return {decode(key): decode(item) for key, item in content}
    if tag == "type":
        return TYPES[content]
    if tag in TEXTS:
        return getattr(__import__(TEXTS[tag]), tag)(content)
    return bytes.fromhex(content) if tag == "bytes" else SEQUENCES[tag](map(decode, content))


def send(message: Any) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(3, data) :]


def receive() -> Any:
    line = channel.readline()
    return json.loads(line) if line else os._exit(0)


def ask(target: int | str, method: str, args: list[Any], named: dict[str, Any]) -> Any:
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


def answer(target: int | str, method: str, args: Any, named: Any) -> None:
    """Do what the other side asked. The judge's objects can only be called: they lead to its
    tests."""
    try:
        if not namespace and method != "__call__":
            raise PermissionError(method)
        found = namespace[target] if isinstance(target, str) else objects[target]
        given = decode(args)
        value = getattr(type(found), method)(found, *given, **decode(named)) if method else found
        send({"value": encode(value), "args": encode(given)})
    except BaseException as error:
        send({"error": [type(error).__name__, str(error)[:500]], "args": args})


def problem_of(source: str, space: dict[str, Any]) -> str:
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
    space: dict[str, Any] = {"__name__": "tests"}
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


sys.set_int_max_str_digits(0)
channel = open(3, "rb", closefd=False)  # noqa: SIM115 - as long as the process lives
