"""A machine for the pickles that ``torch.save`` writes. It runs no code: a pickle that names anything but
what it is told to know ends in an error.

It knows the operations of protocols 2 to 4 that plain containers, strings, numbers and calls of known names
need (https://docs.python.org/3/library/pickletools.html). Every operation makes one object or as many as
there are bytes in it, so memory stays within a constant times the length of the pickle; what a pickle nests
or repeats is never walked, compared or printed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Protocol

_MAX_INTEGER_BYTES = 255


class PickleError(ValueError):
    """What a pickle has that is not allowed or not whole; one line."""


class Known(Protocol):
    """What a pickle may name, call and refer to. Each raises PickleError for what it does not know."""

    def find(self, module: str, name: str) -> Any: ...

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any: ...

    def refer(self, key: Any) -> Any:
        """A persistent id: what lies outside the pickle."""


class _Mark:
    """Where a container's items begin on the stack."""


_MARK = _Mark()


class PickleMachine:
    """``run`` loads one pickle; ``end`` is the byte after it."""

    def __init__(self, data: bytes | memoryview, known: Known, start: int = 0) -> None:
        self._data = memoryview(data)
        self._known = known
        self._at = start
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    @property
    def end(self) -> int:
        return self._at

    def run(self) -> Any:
        """The object that the pickle describes."""
        while True:
            code = self._take(1)[0]
            if code == 0x2E:  # STOP
                return self._pop()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise PickleError(
                    f"byte {self._at - 1}: operation {code:#04x} has no place in a file of tensors"
                )
            operation(self)

    def _take(self, count: int) -> memoryview:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise PickleError(f"ends at byte {len(self._data)}, before it is whole")
        self._at += count
        return part

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._take(struct.calcsize(form)))[0]

    def _text(self, form: str) -> None:
        raw = bytes(self._take(self._number(form)))
        try:
            self._push(raw.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise PickleError(f"byte {self._at}: text is not UTF-8: {error.reason}") from None

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise PickleError(f"byte {self._at}: takes a value that is not there")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                items = self._stack[at + 1 :]
                del self._stack[at:]
                return items
        raise PickleError(f"byte {self._at}: a container has no beginning")

    def _top(self, kind: type) -> Any:
        if not self._stack or not isinstance(self._stack[-1], kind):
            raise PickleError(f"byte {self._at}: there is no {kind.__name__} to fill")
        return self._stack[-1]

    def _tuple_of(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(items)))

    def _integer(self) -> None:
        length = self._number("B")
        self._push(int.from_bytes(self._take(min(length, _MAX_INTEGER_BYTES)), "little", signed=True))

    def _append(self, items: list[Any]) -> None:
        self._top(list).extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self._top(dict)
        if len(items) % 2:
            raise PickleError(f"byte {self._at}: a key has no value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Other keys could take forever to hash.
            if not isinstance(key, str | int):
                raise PickleError(f"byte {self._at}: a {type(key).__name__} is used as a key")
            target[key] = value

    def _set_one(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def _append_one(self) -> None:
        self._append([self._pop()])

    def _remember(self, index: int) -> None:
        if not self._stack:
            raise PickleError(f"byte {self._at}: takes a value that is not there")
        self._memo[index] = self._stack[-1]

    def _recall(self, index: int) -> None:
        if index not in self._memo:
            raise PickleError(f"byte {self._at}: refers to a value that is not there")
        self._push(self._memo[index])

    def _line(self) -> str:
        end = self._at
        limit = min(len(self._data), self._at + 1024)
        while end < limit and self._data[end] != 0x0A:
            end += 1
        text = bytes(self._take(end - self._at))
        if self._take(1)[0] != 0x0A:
            raise PickleError(f"byte {self._at}: a name is longer than 1024 bytes")
        return text.decode("utf-8", "replace")

    def _global(self) -> None:
        module = self._line()
        self._push(self._known.find(module, self._line()))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise PickleError(f"byte {self._at}: names something by what is no text")
        self._push(self._known.find(module, name))

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(arguments, tuple):
            raise PickleError(f"byte {self._at}: calls with what is no tuple")
        self._push(self._known.call(function, arguments))

    def _build(self) -> None:
        """The attributes of a container (torch writes versions of modules there): left out."""
        self._pop()
        self._top(dict)


def _pushing(value: Any) -> Callable[[PickleMachine], None]:
    return lambda machine: machine._push(value)


_OPERATIONS: dict[int, Callable[[PickleMachine], Any]] = {
    0x80: lambda m: m._take(1),  # PROTO
    0x95: lambda m: m._take(8),  # FRAME
    ord("("): _pushing(_MARK),
    ord("N"): _pushing(None),
    0x88: _pushing(True),
    0x89: _pushing(False),
    ord("K"): lambda m: m._push(m._number("B")),
    ord("M"): lambda m: m._push(m._number("H")),
    ord("J"): lambda m: m._push(m._number("i")),
    ord("G"): lambda m: m._push(struct.unpack(">d", m._take(8))[0]),
    0x8A: PickleMachine._integer,
    ord("X"): lambda m: m._text("I"),
    0x8C: lambda m: m._text("B"),
    0x8D: lambda m: m._text("Q"),
    ord("]"): lambda m: m._push([]),
    ord("a"): PickleMachine._append_one,
    ord("e"): lambda m: m._append(m._pop_to_mark()),
    ord("}"): lambda m: m._push({}),
    ord("s"): PickleMachine._set_one,
    ord("u"): lambda m: m._set(m._pop_to_mark()),
    ord(")"): _pushing(()),
    0x85: lambda m: m._tuple_of(1),
    0x86: lambda m: m._tuple_of(2),
    0x87: lambda m: m._tuple_of(3),
    ord("t"): lambda m: m._push(tuple(m._pop_to_mark())),
    ord("q"): lambda m: m._remember(m._number("B")),
    ord("r"): lambda m: m._remember(m._number("I")),
    0x94: lambda m: m._remember(len(m._memo)),
    ord("h"): lambda m: m._recall(m._number("B")),
    ord("j"): lambda m: m._recall(m._number("I")),
    ord("c"): PickleMachine._global,
    0x93: PickleMachine._stack_global,
    ord("R"): PickleMachine._reduce,
    ord("b"): PickleMachine._build,
    ord("Q"): lambda m: m._push(m._known.refer(m._pop())),
}
