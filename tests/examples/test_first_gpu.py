"""The first hour on a GPU, as a dry run on the CPU."""

import re

import pytest
from running import evaluate_here, run


def test_what_would_change():
    code = """
from first_gpu import verdict
times = {"pairs": 0.003, "features": 0.002}
print(verdict("graphs", 128, "forward", {"chosen": "pairs", "seconds": times}))
print(verdict("graphs", 512, "forward", {"chosen": "features", "seconds": times}) == "")
print(verdict("escnn", 64, "forward", {"chosen": "", "seconds": times}) == "")
"""
    change, *right = evaluate_here(code).splitlines()
    assert change == "- graphs, 128, forward: 'pairs' is chosen, 3.00 ms; 'features' takes 0.67 times that"
    assert right == ["True", "True"]


@pytest.mark.slow
def test_a_dry_run_to_the_last_line(tmp_path):
    """Tests, choices, benchmarks, and a table with the name of the device; what fails is said and stops nothing."""
    done = run(
        "benchmarks/first_gpu.py", "--tiny", "--repeats", 1, "--rates", 1e10, 1e11, 1e9, "--output", tmp_path,
        "--tests", "tests/test_grids.py", "--choices", "graphs", "escnn",
        "--benchmarks", "clifford_product", "global_attention",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "CPU.md").read_text()
    assert text.startswith("# CPU\n")
    assert re.search(r"^Tests: \d+ passed", text, re.MULTILINE)
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith(("| graphs ", "| escnn "))]
    assert [row[0].strip() for row in rows] == ["graphs", "graphs", "escnn", "escnn"]
    assert all("pairs " in row[4] and "features " in row[4] for row in rows[:2])
    assert all("R2Conv " in row[4] and "frames, compiled " in row[4] for row in rows[2:])
    changes = text[text.index("## What would change") : text.index("## Choices")]
    assert "graphs" in changes or "Nothing" in changes
    for name, row in (("clifford_product", "| 50 "), ("global_attention", "| 6 x 6 ")):
        assert row in text[text.index(f"## {name}") :]
        assert "failed" not in text[text.index(f"## {name}") :]
