"""How a hub repository is named: ``owner/name``, ``owner/name@revision``, ``owner/name:FILE.gguf``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REFERENCE = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?(?::(?P<file>[^:]+\.gguf))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class RepoReference:
    """``revision`` None is the default branch. ``file`` is a GGUF file inside the repository."""

    repo_id: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repo_id}{revision}{'' if self.file is None else f':{self.file}'}"

    @property
    def name(self) -> str:
        return self.repo_id.rpartition("/")[2]


def parse_reference(text: str) -> RepoReference | None:
    """None for what names no repository."""
    match = _REFERENCE.fullmatch(text)
    if match is None or ".." in text:
        return None
    return RepoReference(match["repo"], match["revision"], match["file"])
