"""The first ten minutes on a GPU, without one."""

import json

import first_gpu
import pytest
from running import run_on_accelerator
from whole_models import MODELS, Fixed


def lines(folder):
    return first_gpu.lines_of(folder / "results.jsonl")


def test_to_the_last_line_on_the_emulated_accelerator_and_on_again(tmp_path):
    """A second start finds every line and runs nothing."""
    command = "benchmarks/first_gpu.py", "--tiny", "--device", "cuda", "--output", tmp_path
    done = run_on_accelerator(*command)
    assert done.returncode == 0, done.stderr
    found = lines(tmp_path)
    assert [line["item"] for line in found] == list(first_gpu.first_items(first_gpu.Machine("cuda", True)))
    assert not [line for line in found if "error" in line]
    cases = [line["result"] for line in found if line["item"].startswith("case")]
    assert cases
    assert not any(map(first_gpu.is_off, cases))
    report = (tmp_path / "report.md").read_text()
    assert report.startswith(f"{len(found)} items, 0 failed, 0 cases differ")
    again = run_on_accelerator(*command)
    assert again.returncode == 0
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


@pytest.mark.parametrize("name", MODELS)
def test_models_for_graphs_run(name):
    model = Fixed(name).eval()
    assert model(model.sample("cpu")).isfinite().all()


def test_the_emulated_accelerator_refuses_what_lies_elsewhere(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch\nx = torch.ones(3).to('cuda')\nprint((x + x).tolist())\nx + torch.ones(3)")
    done = run_on_accelerator(script)
    assert done.stdout == "[2.0, 2.0, 2.0]\n"
    assert "on the CPU" in done.stderr.splitlines()[-1]
