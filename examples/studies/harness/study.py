"""Running a study: every single run that has no row yet is trained and gets one; then tables."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning
import torch

import tg_equiattn

from . import results
from .loading import is_first_process
from .settings import EXAMPLES, Preset, Settings, SettingsError, command, parse
from .training import CheckpointError, Outcome

Report = Callable[[list[results.Row]], dict[str, str]]


@contextlib.contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Ends the program with one line where settings or files are refused."""
    errors = errors or (ValueError, OSError)
    try:
        yield
    except errors as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from error


def row_of(settings: Settings, outcome: Outcome) -> results.Row:
    if settings.device.startswith("cuda"):
        machine = torch.cuda.get_device_name(settings.device)
    else:
        machine = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    machine = f"{settings.devices} x {machine}" if settings.devices > 1 else machine
    return results.Row(
        settings.STUDY, outcome.metric, outcome.value, outcome.parameters, outcome.seconds, machine,
        f"tg_equiattn {tg_equiattn.__version__}, torch {torch.__version__}", command(settings), settings.identity(),
        outcome.more,
    )  # fmt: skip


def main(
    default: Preset,
    presets: dict[str, Preset],
    doc: str,
    train: Callable[[Preset], Outcome],
    report: Report,
) -> None:
    """The main function of an example, whose docstring (``--help``) is ``doc``.

    ``train`` does one single run; ``report`` gives tables by name as markdown.
    """
    with refusing():
        settings = parse(default, presets, doc)
        done = results.read(settings.results_file)
    start, rows, runs, first = time.perf_counter(), [], list(settings.runs()), is_first_process()
    for number, run in enumerate(runs, 1):
        row = None if settings.again else results.find(done, run)
        if row is None:
            if first:
                print(f"[{number}/{len(runs)}] {command(run)}", flush=True)
            lightning.seed_everything(run.seed, verbose=False)
            with refusing(SettingsError, CheckpointError, OSError):
                row = row_of(run, train(run))
                if first:
                    results.append(settings.results_file, row)
                    print(f"[{number}/{len(runs)}] {row.metric} {row.value:.5g} ({row.seconds:.0f} s)", flush=True)
        rows.append(row)
    if not first:
        return
    folder = settings.output / settings.STUDY
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in report(rows).items():
        (folder / f"{name}.md").write_text(table + "\n")
        print(f"\n{name}:\n\n{table}")
    seconds = time.perf_counter() - start
    print(f"\nTables are in {folder.resolve()}, rows in {settings.results_file} ({seconds:.0f} s)")


def committed(study: str) -> Path:
    """The result rows that come with the project."""
    return EXAMPLES / "results" / study / "results.csv"
