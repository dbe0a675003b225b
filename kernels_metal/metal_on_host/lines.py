"""From an address in a kernel's shared object to file and line, by its DWARF line table."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile


@lru_cache(maxsize=16)
def _rows(shared_object: Path) -> list[tuple[int, str, int]]:
    """(address, file, line), sorted; line 0 ends a sequence."""
    rows: list[tuple[int, str, int]] = []
    with shared_object.open("rb") as file:
        elf = ELFFile(file)
        if not elf.has_dwarf_info():
            return rows
        dwarf = elf.get_dwarf_info()
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            if program is None:
                continue
            folders = [_text(folder) for folder in program["include_directory"]]
            names = [_join(folders, entry) for entry in program["file_entry"]]
            first = 0 if program["version"] >= 5 else 1
            for entry in program.get_entries():
                state = entry.state
                if state is not None:
                    name = names[state.file - first] if 0 <= state.file - first < len(names) else "?"
                    rows.append((state.address, name, 0 if state.end_sequence else state.line))
    return sorted(rows, key=lambda row: row[0])


def _join(folders: list[str], entry: Any) -> str:
    name = _text(entry.name)
    return f"{folders[entry.dir_index]}/{name}" if 0 < entry.dir_index < len(folders) else name


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def line_of(shared_object: Path, offset: int) -> str:
    """`file:line` of the call that returns to `offset` (from the image's start), or the offset itself."""
    rows = _rows(shared_object)
    at = bisect_right(rows, offset - 1, key=lambda row: row[0]) - 1
    while at >= 0 and rows[at][2] == 0:
        at -= 1
    if at < 0:
        return f"offset {offset:#x}"
    return f"{rows[at][1]}:{rows[at][2]}"
