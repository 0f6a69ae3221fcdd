"""The first hour on a GPU, without one."""

import argparse
import re

import first_gpu
from running import run_on_accelerator


def test_what_would_change():
    times = {"pairs": 0.003, "features": 0.002}
    change = first_gpu.verdict("graphs", 128, "forward", {"chosen": "pairs", "seconds": times})
    assert change == "- graphs, 128, forward: 'pairs' is chosen, 3.00 ms; 'features' takes 0.67 times that"
    assert not first_gpu.verdict("graphs", 512, "forward", {"chosen": "features", "seconds": times})
    assert not first_gpu.verdict("escnn", 64, "forward", {"chosen": "", "seconds": times})


def test_to_the_last_line_on_the_emulated_accelerator(tmp_path):
    done = run_on_accelerator(
        "benchmarks/first_gpu.py", "--tiny", "--repeats", 1, "--rates", 1e10, 1e11, 1e9, "--output", tmp_path,
        "--tests", "tests/test_grids.py", "--device", "cuda",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "Emulated_accelerator.md").read_text()
    assert text.startswith("# Emulated accelerator\n")
    assert re.search(r"^Tests: \d+ passed", text, re.MULTILINE)
    assert "failed" not in text
    changes, choices = re.split("## Choices|## linear_attention", text[text.index("## What would change") :])[:2]
    assert re.search("Nothing|is chosen", changes)
    rows = [line.split("|")[1:-1] for line in choices.splitlines() if line.startswith("| ")][1:]
    found = [(row[0].strip(), re.findall(r"([A-Za-z][\w, ]*?) [\d.,]+", row[4])) for row in rows]
    assert found[::2] == found[1::2] == [
        ("graphs", ["pairs", "features"]), ("crystals", ["auto", "ewald"]), ("clouds", ["auto", "direct"]),
        ("frames", ["compiled", "compiled operator", "operator", "FlexAttention"]),
        ("vectors", ["compiled", "compiled operator", "operator"]), ("escnn", ["R2Conv", "frames", "frames, compiled"]),
    ]  # fmt: skip
    for name in first_gpu.BENCHMARKS:  # head, line and rows
        assert text[text.index(f"## {name}\n") :].split("\n## ")[0].count("\n|") > 2, name


def test_what_fails_is_said_and_stops_nothing(tmp_path, monkeypatch):
    def fails(*_):
        raise SystemExit("failed:\nValueError: no luck")

    monkeypatch.setattr(first_gpu, "in_own_process", fails)
    monkeypatch.setattr(first_gpu, "run", lambda *_: (1, "not done after 900 s"))
    options = argparse.Namespace(tiny=True, repeats=1, device="cpu", output=tmp_path / "out.md")
    options.choices, options.benchmarks = ["graphs", "escnn"], ["clifford_product", "long_context"]
    rows, changes = first_gpu.try_choices(options)
    assert [row.split("|")[-2].strip() for row in rows[2:]] == 4 * ["failed: ValueError: no luck"]
    assert not changes
    said = first_gpu.run_benchmarks(options, [])
    assert [line for line in said if line.startswith("failed")] == 2 * ["failed: not done after 900 s\nexit status 1"]


def test_the_emulated_accelerator_refuses_what_lies_elsewhere(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch\nx = torch.ones(3).to('cuda')\nprint((x + x).tolist())\nx + torch.ones(3)")
    done = run_on_accelerator(script)
    assert done.stdout == "[2.0, 2.0, 2.0]\n"
    assert "on the CPU" in done.stderr.splitlines()[-1]
