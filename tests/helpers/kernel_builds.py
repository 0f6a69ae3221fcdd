"""Build Triton kernels for a GPU on a machine that has none: Triton's compiler and assembler need no device.

``resources(code)`` runs Python code in a process of its own in which launching a kernel builds it for an H100 and
runs nothing, so that the library's own launches decide what is built, and tells what each kernel needs.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CAPABILITY = 90
SHARED_MEMORY = 227 * 1024  # bytes a block may have there


def resources(code: str) -> list[dict]:
    """name, registers a thread, spilled bytes and shared bytes of each kernel that ``code`` launches, in order."""
    program = f"import kernel_builds\nbuilt = kernel_builds.instead_of_running()\n{code}\nkernel_builds.tell(built)"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def instead_of_running() -> list:
    """From here on launches build; tensors of any device will do."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    from tg_equiattn.functional import backend as backends

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", CAPABILITY, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_device_interface(self):
            return torch.cuda

    built, run = [], jit.JITFunction.run

    def build(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        built.append((self.__name__, kernel))
        return kernel

    driver.set_active(Driver())
    jit.JITFunction.run = build
    backends.INTERPRETED = True  # which admits tensors on the CPU
    return built


def tell(built: list) -> None:
    """Print what the assembler says of each kernel, as JSON."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    told = []
    for name, kernel in built:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            text = subprocess.run(
                [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
            )
        numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text.stdout))
        spilled = int(numbers["STACK"]) + int(numbers["LOCAL"])
        told.append(
            {"name": name, "registers": int(numbers["REG"]), "spilled": spilled, "shared": kernel.metadata.shared}
        )
    print(json.dumps(told))
