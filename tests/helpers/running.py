"""Running an example as a user does."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, *arguments):
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rows_of(folder, study):
    """The result rows of a study whose output is in this folder."""
    from harness import results

    return results.read(folder / study / "results.csv")


def number(text):
    """A table's number, thousands set off by commas and perhaps more behind it."""
    return float(text.split()[0].replace(",", ""))


def evaluate(code):
    """Standard output of Python code that may import from the benchmarks, or its errors."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=EXAMPLES / "benchmarks")
    return done.stdout.strip() or done.stderr
