"""Train what has no result row yet, the cheapest first.

The runs of a study are the lines of examples/results/NAME/runs.txt: the flags of one command each, which may stand for
several runs. Rows go to examples/results/NAME/results.csv, and tables and figures are rebuilt at the end.

Lines with `--data FOLDER` read published files from that folder (or link) of the current directory: `mnist` has the
four files of MNIST, `molecules` the sets that examples/studies/real_molecules.py names, and `proteins` is a file of
C-alpha traces. Lines whose files are missing are left out. real_molecules needs an environment with MACE.

    python examples/studies/train.py                    # all studies
    python examples/studies/train.py matching depots    # two
    python examples/studies/train.py --list             # print the commands and train nothing
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import tyro
from harness import results, study
from harness.settings import EXAMPLES, Settings, parse
from report import kind_of

NEEDS = {"real_molecules": "mace"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train."""

    studies: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """names of studies; default: all"""
    list: bool = False
    """print the commands whose rows are missing, and train nothing"""


def studies() -> list[str]:
    """The studies that have runs."""
    return sorted(path.parent.name for path in (EXAMPLES / "results").glob("*/runs.txt"))


def lines(name: str) -> list[str]:
    """The flags of each command of a study."""
    return study.committed(name).with_name("runs.txt").read_text().splitlines()


def runs(name: str, flags: str) -> list[Settings]:
    """The single runs of a line."""
    module = importlib.import_module(name)
    return list(parse(kind_of(module)(), module.PRESETS, "", shlex.split(flags)).runs())


def readable(flags: str) -> bool:
    """True if the folder of published files that a line reads is there, or it reads none."""
    words = shlex.split(flags)
    return "--data" not in words or Path(words[words.index("--data") + 1]).exists()


def missing(name: str) -> list[tuple[float, str]]:
    """The lines of a study with runs that have no row, and the seconds these runs should take."""
    rows = results.read(study.committed(name))
    typical = statistics.mean(row.seconds for row in rows) if rows else 0.0
    found = []
    for flags in filter(readable, lines(name)):
        count = sum(results.find(rows, run) is None for run in runs(name, flags))
        if count:
            found.append((count * typical, flags))
    return found


def main() -> None:
    options = tyro.cli(Options, description=__doc__, prog="train.py")
    for name in options.studies:
        if name not in studies():
            raise SystemExit(f"train.py: studies must be of {', '.join(studies())}, got {name}")
    todo = []
    for name in options.studies or studies():
        if importlib.util.find_spec(NEEDS.get(name, "torch")) is None:
            print(f"{name}: left out, it needs {NEEDS[name]}")
        else:
            todo += [(seconds, name, flags) for seconds, flags in missing(name)]
    for number, (seconds, name, flags) in enumerate(sorted(todo), 1):
        command = [sys.executable, "-W", "ignore", str(EXAMPLES / "studies" / f"{name}.py"), *shlex.split(flags)]
        print(f"[{number}/{len(todo)}] about {seconds:.0f} s: {name} {flags}", flush=True)
        if not options.list:
            subprocess.run(command, check=True)
    if todo and not options.list:
        subprocess.run([sys.executable, str(EXAMPLES / "studies" / "report.py")], check=True)
    elif not todo:
        print("Every run has its row.")


if __name__ == "__main__":
    main()
