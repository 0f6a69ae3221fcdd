"""Binaries of the kernels that inductor writes, built by Triton for GPUs that are not there."""

import importlib.util
import re
import subprocess
from typing import NamedTuple

import torch._inductor.runtime.triton_helpers  # noqa: F401 - what kernels import
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
REGISTERS, THREADS = 65536, 2048  # of a multiprocessor, of all three


class Built(NamedTuple):
    """What a binary takes: registers of a thread, bytes that it spills, shared memory of a block."""

    registers: int
    spilled: int
    shared: int

    def occupancy(self, warps: int) -> float:
        """The share of a multiprocessor's threads that its registers let live at once, by blocks of so many warps."""
        block = 32 * warps
        return min(THREADS // block, REGISTERS // (block * -(-self.registers // 8) * 8)) * block / THREADS


def kernels(code: str) -> dict[str, str]:
    return dict(re.findall(r"async_compile\.triton\('(\w+)', '''\n(.*?)\n''', device_str", code, re.DOTALL))


def build(name: str, source: str, target: GPUTarget, folder, *, block: int, warps: int) -> Built:
    """Of a kernel that reduces within a block of ``block`` rows."""
    signature = eval(re.search(r"'signature': (\{[^}]*\})", source).group(1))
    plain = re.sub(r"@triton_heuristics\.\w+\(.*?\n\)\n(?=@triton\.jit)", "", source, flags=re.DOTALL)
    path = folder / f"{name}.py"
    path.write_text(plain.replace("triton_helpers.set_driver_to_gpu()", ""))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    constants = {(n,): block for n, kind in enumerate(signature.values()) if kind == "constexpr"}
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(signature)) if (n,) not in constants}
    kernel = triton.compile(
        ASTSource(getattr(module, name), signature, constants, aligned), target=target, options={"num_warps": warps}
    )
    if target.backend == "hip":
        found = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", kernel.asm["amdgcn"]))
        return Built(int(found["vgpr_count"]), 4 * int(found["vgpr_spill_count"]), kernel.metadata.shared)
    binary = folder / f"{name}.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", binary]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said).groups())
    return Built(registers, stack + local, kernel.metadata.shared)
