"""The first ten minutes on a GPU, without one."""

import json

import first_gpu
from running import run


def lines(folder):
    return first_gpu.lines_of(folder / "results.jsonl")


def test_a_dry_run_to_the_last_line_and_on_again(tmp_path):
    """A second start finds every line and runs nothing."""
    command = "benchmarks/first_gpu.py", "--tiny", "--device", "cpu", "--output", tmp_path
    done = run(*command)
    assert done.returncode == 0, done.stderr
    found = lines(tmp_path)
    assert [line["item"] for line in found] == list(first_gpu.first_items(first_gpu.Machine("cpu", True)))
    assert not [line for line in found if "error" in line]
    assert any(line["item"].startswith("case") for line in found)
    assert (tmp_path / "report.md").read_text().startswith(f"{len(found)} items, 0 failed, 0 cases differ")
    again = run(*command)
    assert again.stdout.startswith("The report is in")
    assert lines(tmp_path) == found


def test_cases_that_differ_or_wait_are_named_first(tmp_path):
    path = tmp_path / "results.jsonl"
    bad = {"item": "case: bad", "result": {"float32 of the CPU": 1e-7, "float32": 0.5, "waits": False}, "seconds": 1}
    good = {"item": "case: good", "result": {"float32 of the CPU": 5e-3, "float32": 9e-3, "waits": False}, "seconds": 1}
    path.write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    report = first_gpu.report(path).split("| item |")[0]
    assert "1 cases differ" in report
    assert "case: bad" in report
    assert "case: good" not in report


def test_an_item_that_fails_is_one_line_and_a_cut_line_is_run_again(tmp_path):
    def fails(_):
        raise ValueError("no luck")

    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"item": "done", "result": {}, "seconds": 1}) + "\n" + '{"item": "works", "re' + "\n")
    items = {"done": fails, "fails": fails, "works": lambda _: {"seconds": 1.0}}
    first_gpu.run_items(items, first_gpu.Machine("cpu", True), path)
    _, second, third = lines(tmp_path)
    assert second["error"] == "ValueError: no luck"
    assert third["result"] == {"seconds": 1.0}
    assert "- **fails**: ValueError" in first_gpu.report(path)
