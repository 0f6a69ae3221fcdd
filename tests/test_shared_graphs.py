"""Scripts of the page on several machines: DistributedDataParallel, FSDP2 and Lightning, on two processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
PAGE = (Path(__file__).parents[1] / "docs" / "several_machines.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SCRIPTS = [text for text in "\n".join(BLOCKS).split("# torchrun --nproc-per-node 2 train.py\n") if text]
NAMES = ["DistributedDataParallel", "FSDP2", "Lightning", "Lightning and FSDP2"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4), ids=NAMES)
def test_the_scripts_of_the_page_run_under_torchrun(number, tmp_path):
    assert len(SCRIPTS) == len(NAMES)
    if "Lightning" in NAMES[number]:
        pytest.importorskip("lightning")
    (tmp_path / "train.py").write_text(SCRIPTS[number])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
