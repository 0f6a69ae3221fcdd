"""Running a study: every single run that has no row yet is trained and gets one; then tables."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning
import torch

import tg_equiattn

from . import results
from .settings import EXAMPLES, Preset, Settings, SettingsError, command, parse
from .training import Outcome

Report = Callable[[list[results.Row]], dict[str, str]]


@contextlib.contextmanager
def refusing(errors: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Ends the program with one line where settings or files are refused."""
    try:
        yield
    except errors as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from error


def row_of(settings: Settings, outcome: Outcome) -> results.Row:
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    machine = cpu if settings.device == "cpu" else torch.cuda.get_device_name(settings.device)
    versions = f"tg_equiattn {tg_equiattn.__version__}, torch {torch.__version__}"
    measured = outcome.metric, outcome.value, outcome.parameters, outcome.seconds
    return results.Row(*measured, machine, versions, command(settings), settings.identity(), outcome.more)


def main(
    default: Preset, presets: dict[str, Preset], doc: str, train: Callable[[Preset], Outcome], report: Report
) -> None:
    """The main function of an example, whose docstring (``--help``) is ``doc``.

    ``train`` does one single run; ``report`` gives tables by name as markdown.
    """
    with refusing():
        settings = parse(default, presets, doc)
        done = results.read(settings.results_file, type(default))
    rows, runs = [], list(settings.runs())
    for number, run in enumerate(runs, 1):
        row = None if settings.again else results.find(done, run)
        if row is None:
            print(f"[{number}/{len(runs)}] {command(run)}", flush=True)
            lightning.seed_everything(run.seed, verbose=False)
            with refusing((SettingsError, OSError)):
                row = row_of(run, train(run))
            results.append(settings.results_file, row, type(default))
            print(f"[{number}/{len(runs)}] {row.metric} {row.value:.5g} ({row.seconds:.0f} s)", flush=True)
        rows.append(row)
    folder = settings.output / settings.STUDY
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in report(rows).items():
        (folder / f"{name}.md").write_text(table + "\n")
        print(f"\n{name}:\n\n{table}")
    print(f"\nTables are in {folder.resolve()}, rows in {settings.results_file}")


def committed(study: str) -> Path:
    """The result rows that come with the project."""
    return EXAMPLES / "results" / study / "results.csv"
