"""One results format: a CSV file with a row for every training run."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from .settings import Settings


@dataclasses.dataclass(frozen=True)
class Row:
    """One run: what it measured, on what, and the command that repeats it."""

    study: str
    metric: str
    value: float
    parameters: int
    seconds: float
    machine: str
    versions: str
    command: str
    settings: dict[str, Any]
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    def setting(self, name: str) -> Any:
        """A setting; of a field that is swept, its one value."""
        value = self.settings.get(name)
        return value[0] if isinstance(value, list) and len(value) == 1 else value


COLUMNS = [field.name for field in dataclasses.fields(Row)]
READ = {"value": float, "seconds": float, "parameters": int, "settings": json.loads, "more": json.loads}
WRITE = {"value": "{:.7g}".format, "seconds": "{:.1f}".format}
WRITE |= dict.fromkeys(("settings", "more"), lambda value: json.dumps(value, sort_keys=True))


def _line(cells: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def read(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file. A last line cut short (a kill, a full disk) is left out.

    Raises:
        ValueError: for a file of another format.
    """
    whole, _, cut = path.read_text().rpartition("\n") if path.is_file() else ("", "", "")
    if cut:
        print(f"{path}: the last line was cut short and is left out", file=sys.stderr)
    header, *lines = list(csv.reader(io.StringIO(whole))) or [COLUMNS]
    if header != COLUMNS:
        raise ValueError(f"{path} must begin with the line {','.join(COLUMNS)}, got {','.join(header)}")
    rows = []
    for number, cells in enumerate(lines, 2):
        try:
            rows.append(Row(*(READ.get(name, str)(cell) for name, cell in zip(COLUMNS, cells, strict=True))))
        except ValueError as error:
            raise ValueError(f"{path}, row {number}, is not a result: {error}") from None
    return rows


def append(path: Path, row: Row) -> None:
    """Add a row, in one write; what a killed write left behind goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: other runs may end at the same time
        file.seek(0)
        there = file.read().rfind(b"\n") + 1
        file.truncate(there)
        text = _line([WRITE.get(name, str)(getattr(row, name)) for name in COLUMNS])
        file.write((text if there else _line(COLUMNS) + text).encode())
        file.flush()
        os.fsync(file.fileno())


def find(rows: list[Row], settings: Settings) -> Row | None:
    """The last row of exactly these settings; fields that a row does not have yet count with their defaults."""
    defaults, wanted = type(settings)().identity(), settings.identity()
    found = (r for r in reversed(rows) if r.study == settings.STUDY and defaults | r.settings == wanted)
    return next(found, None)


def latest(rows: list[Row], kind: type[Settings]) -> list[Row]:
    """Of runs that were repeated the last row, in the order of first appearance."""
    defaults = kind().identity()
    return list({json.dumps(defaults | row.settings, sort_keys=True): row for row in rows}.values())
