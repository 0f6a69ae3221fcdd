"""Running an example as a user does."""

import contextlib
import importlib
import io
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, *arguments):
    command = [sys.executable, "-W", "ignore", EXAMPLES / script, *arguments]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def run_here(script, *arguments):
    """The same in this process, which has imported already what takes a script seconds to import."""
    before, sys.argv = sys.argv, [str(EXAMPLES / script), *map(str, arguments)]
    code, out, err = 0, io.StringIO(), io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            warnings.simplefilter("ignore")
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = 1 if isinstance(end.code, str) else end.code or 0
        err.write(str(end.code) if code else "")
    finally:
        sys.argv = before
    return subprocess.CompletedProcess([script, *arguments], code, out.getvalue(), err.getvalue())


def rows_of(folder, study):
    from harness import results
    from report import kind_of

    return results.read(folder / study / "results.csv", kind_of(importlib.import_module(study)))
