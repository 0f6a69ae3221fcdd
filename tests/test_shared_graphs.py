"""Scripts for several machines: DistributedDataParallel and FSDP2, also by Lightning, on two processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
LIGHTNING = """
import lightning
import torch
from tg_equiattn.nn import RelativePerformer


class Learner(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = RelativePerformer(1, 10, channels=16, num_layers=2, heads=4)

    def training_step(self, images, number):
        return self.model(images).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


images = torch.utils.data.DataLoader(torch.rand(16, 1, 8, 8), 4)
trainer = lightning.Trainer(max_steps=2, accelerator="cpu", devices=2, strategy="ddp", logger=False)
trainer.fit(Learner(), images)
"""
SHARDED = """
import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from tg_equiattn.nn import RelativePerformer


class Learner(lightning.LightningModule):
    def configure_model(self):
        self.model = RelativePerformer(1, 10, channels=16, num_layers=2, heads=4)
        for part in (*self.model.blocks, self.model):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, images, number):
        return self.model(images).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


lightning.seed_everything(0)
images = torch.utils.data.DataLoader(torch.rand(16, 1, 8, 8), 4)
strategy = ModelParallelStrategy()
trainer = lightning.Trainer(
    max_steps=2, accelerator="cpu", devices=2, strategy=strategy, logger=False
)
trainer.fit(Learner(), images)
"""
SCRIPTS = [*re.findall(r"^```python\n(# torchrun .*?)^```", PAGE, re.DOTALL | re.MULTILINE), LIGHTNING, SHARDED]
NAMES = ["DistributedDataParallel", "FSDP2", "Lightning", "Lightning and FSDP2"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4), ids=NAMES)
def test_scripts_run_under_torchrun(number, tmp_path):
    assert len(SCRIPTS) == len(NAMES)
    if "Lightning" in NAMES[number]:
        pytest.importorskip("lightning")
    (tmp_path / "train.py").write_text(SCRIPTS[number])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
