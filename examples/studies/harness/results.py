"""One results format: a CSV file with a row for every training run."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

from .settings import Settings


@dataclasses.dataclass(frozen=True)
class Row:
    """One run: what it measured, on what, and the command that repeats it."""

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


def read(path: Path, kind: type[Settings]) -> list[Row]:
    """The rows of a file, of runs that were repeated the last; none where there is no file. Files hold the settings
    that differ from the defaults of the study.

    Raises:
        ValueError: for a file of another format.
    """
    defaults, rows = kind().identity(), {}
    with path.open(newline="") if path.is_file() else open("/dev/null") as file:
        header, *lines = list(csv.reader(file)) or [COLUMNS]
    if header != COLUMNS:
        raise ValueError(f"{path} must begin with the line {','.join(COLUMNS)}, got {','.join(header)}")
    for number, cells in enumerate(lines, 2):
        try:
            row = Row(*(READ.get(name, str)(cell) for name, cell in zip(COLUMNS, cells, strict=True)))
        except ValueError as error:
            raise ValueError(f"{path}, row {number}, is not a result: {error}") from None
        row = dataclasses.replace(row, settings=defaults | row.settings)
        rows[json.dumps(row.settings, sort_keys=True)] = row
    return list(rows.values())


def append(path: Path, row: Row, kind: type[Settings]) -> None:
    """Add a row, in one write."""
    defaults = kind().identity()
    row = dataclasses.replace(row, settings={k: v for k, v in row.settings.items() if defaults.get(k, ...) != v})
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        writer.writerow([WRITE.get(name, str)(getattr(row, name)) for name in COLUMNS])


def find(rows: list[Row], settings: Settings) -> Row | None:
    """The row of exactly these settings."""
    wanted = settings.identity()
    return next((row for row in rows if row.settings == wanted), None)
