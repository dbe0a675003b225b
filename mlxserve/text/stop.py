"""Stop strings over streamed text.

The text ends where the first stop string is complete; should several be complete with the same
character, the longest one is cut away. How the text is split into pushes makes no difference. Text is
held back only while it may still grow into a stop, and nothing at or after the cut is ever given out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxserve.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be sent now, and the stop string that ended the text, if one did."""

    text: str
    matched: str | None = None


@dataclass(slots=True, eq=False)
class _State:
    """The longest end of the text so far that begins some stop; ``stop`` is the longest complete one."""

    depth: int
    next: dict[str, _State] = field(default_factory=dict)
    fallback: _State | None = None
    stop: str | None = None


def _automaton(stops: Sequence[str]) -> _State:
    """Aho and Corasick's automaton (CACM 18(6), 1975): each character costs constant time on average."""
    root = _State(depth=0)
    for stop in stops:
        state = root
        for char in stop:
            state = state.next.setdefault(char, _State(depth=state.depth + 1))
        state.stop = stop
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for char, child in state.next.items():
            child.fallback = root if state is root else _follow(root, state.fallback, char)
            child.stop = child.stop or child.fallback.stop
            queue.append(child)
    return root


def _follow(root: _State, state: _State | None, char: str) -> _State:
    while state is not None:
        if char in state.next:
            return state.next[char]
        state = state.fallback
    return root


class StopMatcher:
    """One a text. After a match the text has ended: further pushes give nothing.

    Raises InvalidRequestError (param "stop") for an empty stop string.
    """

    __slots__ = ("_held", "_matched", "_root", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InvalidRequestError("stop must not contain an empty string", param="stop")
        self._root = self._state = _automaton(stops)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> StopResult:
        if self._matched is not None:
            return StopResult("", self._matched)
        state = self._state
        for index, char in enumerate(text):
            state = _follow(self._root, state, char)
            if state.stop is not None:
                self._matched = state.stop
                seen = self._held + text[: index + 1]
                self._held = ""
                return StopResult(seen[: len(seen) - len(state.stop)], state.stop)
        self._state = state
        seen = self._held + text
        cut = len(seen) - state.depth
        self._held = seen[cut:]
        return StopResult(seen[:cut])

    def finish(self) -> str:
        """The held tail, which can no longer become a stop. Call once, when the text has ended."""
        held, self._held = self._held, ""
        return held
