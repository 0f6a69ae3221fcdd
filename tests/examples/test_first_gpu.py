"""The first ten minutes on a GPU, without one."""

import json
import time

import first_gpu
import pytest
from running import run_on_accelerator
from whole_models import MODELS, Fixed


def lines(folder):
    return first_gpu.lines_of(folder / "results.jsonl")


def test_to_the_last_line_on_the_emulated_accelerator_and_on_again(tmp_path):
    """A second start finds every line and runs nothing."""
    patience = "--seconds", 3000, "--patience", 600
    command = "benchmarks/first_gpu.py", "--tiny", "--device", "cuda", "--output", tmp_path, *patience
    done = run_on_accelerator(*command)
    assert done.returncode == 0, done.stderr
    found = lines(tmp_path)
    assert [line["item"] for line in found] == list(first_gpu.first_items(first_gpu.Machine("cuda", True)))
    assert not [line for line in found if "error" in line]
    cases = [line["result"] for line in found if line["item"].startswith("case")]
    assert cases
    assert all(case["float32"] < 1e-4 and case["waits"] is False for case in cases)
    report = (tmp_path / "report.md").read_text()
    assert report.startswith(f"{len(found)} items, 0 failed, 0 cases differ")
    again = run_on_accelerator(*command)
    assert again.returncode == 0
    assert again.stdout.startswith("The report is in")
    assert lines(tmp_path) == found


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--second"]])
def test_to_the_last_line_on_a_cpu(tmp_path, flags):
    from running import run

    done = run("benchmarks/first_gpu.py", "--tiny", "--device", "cpu", "--output", tmp_path, "--patience", 600, *flags)
    assert done.returncode == 0, done.stderr
    assert not [line for line in lines(tmp_path) if "error" in line]


def test_an_item_that_fails_or_hangs_is_one_line_and_the_rest_goes_on(tmp_path, capsys):
    def fails(_):
        raise ValueError("no luck")

    items = {"fails": fails, "hangs": lambda _: time.sleep(60), "works": lambda _: {"seconds": 1.0}}
    path = tmp_path / "results.jsonl"
    first_gpu.run_items(items, first_gpu.Machine("cpu", True), path, seconds=30, patience=0.2)
    first, second, third = lines(tmp_path)
    assert first["error"] == "ValueError: no luck"
    assert second["error"] == "TimeoutError: not done after 0 s"
    assert third["result"] == {"seconds": 1.0}
    assert "- **hangs**: TimeoutError" in first_gpu.report(path)
    assert "[3/3] works" in capsys.readouterr().out


def test_a_spent_budget_ends_the_start_and_a_cut_line_is_run_again(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"item": "done", "result": {}, "seconds": 1}) + "\n" + '{"item": "cut", "re' + "\n")
    items = dict.fromkeys(("done", "cut"), lambda _: {"ran": True})
    first_gpu.run_items(items, first_gpu.Machine("cpu", True), path, seconds=0, patience=1)
    assert "The budget is spent" in capsys.readouterr().out
    first_gpu.run_items(items, first_gpu.Machine("cpu", True), path, seconds=30, patience=1)
    assert [line["item"] for line in lines(tmp_path)] == ["done", "cut"]


def test_cases_of_a_host_that_is_missing_are_left_out(monkeypatch):
    machine, has = first_gpu.Machine("cpu", False), first_gpu.has
    every = first_gpu.first_items(machine)
    monkeypatch.setattr(first_gpu, "has", lambda name: name != "escnn" and has(name))
    left = first_gpu.first_items(machine)
    assert "case: R2GroupAttention" in every
    assert not [name for name in left if "R2" in name or "R3" in name]
    assert "case: GroupAttention" in left


def test_cases_that_differ_or_wait_are_named_first(tmp_path):
    path = tmp_path / "results.jsonl"
    bad = {"item": "case: bad", "result": {"float32 of the CPU": 1e-7, "float32": 0.5, "waits": False}, "seconds": 1}
    good = {"item": "case: good", "result": {"float32 of the CPU": 5e-3, "float32": 9e-3, "waits": False}, "seconds": 1}
    path.write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    report = first_gpu.report(path).split("| item |")[0]
    assert "1 cases differ" in report
    assert "case: bad" in report
    assert "case: good" not in report


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
