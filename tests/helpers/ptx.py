"""Triton kernels without a GPU: compiled to PTX and machine code, and the PTX run by numpy.

A kernel in a :class:`Compiled` is launched as Triton's are, on tensors of a CPU. The machine runs a warp of 32 lanes at
once and knows the instructions that the library's kernels have. These raise: an access outside of the tensors, two
programs that write to one place, a branch that diverges, and an instruction or form that is not known here.
"""

import contextlib
import ctypes
import re
import struct
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LANES = 32
BITS = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32"}
NUMBERS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "mad": lambda a, b, c: a * b + c,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype), "neg": lambda a: -a, "abs": np.abs,
    "max": np.fmax, "min": np.fmin, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a, "mov": lambda a: a, "ex2": np.exp2, "lg2": np.log2, "rcp": lambda a: 1 / a, "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a), "rem": np.fmod,
    "div": lambda a, b: a / b if a.dtype.kind == "f" else np.trunc(a.astype(np.float64) / b),
}  # fmt: skip
SHIFTS = {
    "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b,
    "bfe": lambda a, b, c: (a >> b) & ((np.uint64(1) << c.astype(np.uint64)) - np.uint64(1)).astype(a.dtype),
}  # fmt: skip
COMPARED = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "neu": lambda a, b: ~(a == b), "gtu": lambda a, b: ~(a <= b),
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "geu": lambda a, b: ~(a < b),
}  # fmt: skip


def typed(kind):
    """numpy's name of a type of PTX."""
    return {"f": "float", "s": "int", "u": "uint", "b": "uint"}[kind[0]] + kind[1:]


def parts_of(operands):
    """Operands, separated by commas outside of braces and brackets."""
    return [x.strip() for x in re.split(r",(?![^{\[]*[}\]])", operands) if x.strip()]


class Machine:
    """A kernel of one warp."""

    def __init__(self, ptx):
        entry = ptx.index(".entry")
        start = ptx.index("{", entry)
        self.parameters = re.findall(r"(\w+_param_\d+)", ptx[entry:start])
        self.labels, self.code = {}, []
        for line in ptx[start + 1 : ptx.rindex("}")].replace("\t", " ").splitlines():
            line = line.split("//")[0].strip()
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.code)
            elif line.endswith(";") and not line.startswith("."):
                guard, rest = re.fullmatch(r"(?:@(!?%\w+)\s+)?(.*);", line).groups()
                name, _, operands = rest.partition(" ")
                self.code.append((guard or "", name.split("."), parts_of(operands)))

    def run(self, program, given, memory):
        self.registers, self.program, self.memory = {}, program, memory
        self.given = dict(zip(self.parameters, given, strict=False))
        at = 0
        while at < len(self.code):
            guard, name, parts = self.code[at]
            at += 1
            on = np.ones(LANES, bool)
            if guard:
                on = self.registers[guard.lstrip("!")] ^ guard.startswith("!")
            if name[0] == "bra":
                assert on.all() or not on.any(), "a branch that diverges"
                at = self.labels[parts[0]] if on.all() else at
            elif name[0] == "ret":
                break
            else:
                self.step(name, parts, on)

    def value(self, x, kind):
        """An operand as numbers of a type."""
        if x in ("%tid.x", "%ctaid.x"):
            return (np.arange(LANES) if x == "%tid.x" else np.full(LANES, self.program)).astype(typed(kind))
        if x.startswith("%"):
            found = self.registers[x]
            return found if kind == "pred" else found.astype(BITS[kind[1:]]).view(typed(kind))
        if x[:2] in ("0f", "0d"):
            number = struct.unpack(">f" if x[1] == "f" else ">d", bytes.fromhex(x[2:]))[0]
            return np.full(LANES, number, np.float32 if x[1] == "f" else np.float64).view(typed(kind))
        if kind == "pred":
            return np.full(LANES, int(x, 0) != 0)
        return np.full(LANES, int(x, 0) & (2 ** int(kind[1:]) - 1), BITS[kind[1:]]).view(typed(kind))

    def put(self, x, y):
        self.registers[x] = y if y.dtype == bool else y.view(BITS[str(8 * y.dtype.itemsize)])

    def address(self, x):
        base, _, more = x.strip("[] ").partition("+")
        return self.value(base.strip(), "u64") + np.uint64(int(more or "0", 0))

    def step(self, name, parts, on):
        op, kind = name[0], name[-1]
        if op == "ld" and name[1] == "param":
            self.put(parts[0], np.full(LANES, self.given[parts[1].strip("[]")]).astype(typed(kind)))
        elif op in ("ld", "st"):
            self.move(op, kind, parts, on)
        elif op == "shfl":
            assert name[1:3] == ["sync", "bfly"], name
            self.put(parts[0].split("|")[0], self.value(parts[1], "u32")[np.arange(LANES) ^ int(parts[2], 0)])
        elif op == "setp":
            self.put(parts[0], COMPARED[name[1]](self.value(parts[1], kind), self.value(parts[2], kind)))
        elif op == "selp":
            a, b = (self.value(x, kind) for x in parts[1:3])
            self.put(parts[0], np.where(self.value(parts[3], "pred"), a, b))
        elif op == "cvt":
            x = self.value(parts[1], kind)
            self.put(parts[0], (np.trunc(x) if kind[0] == "f" and name[-2][0] != "f" else x).astype(typed(name[-2])))
        elif "wide" in name or "hi" in name:
            assert kind[1:] == "32", name
            wide = kind[0] + "64"
            x = self.value(parts[1], kind).astype(typed(wide)) * self.value(parts[2], kind).astype(typed(wide))
            x = (x >> x.dtype.type(32)).astype(typed(kind)) if "hi" in name else x
            self.put(parts[0], x + self.value(parts[3], wide) if op == "mad" else x)
        elif kind == "pred":
            self.put(parts[0], NUMBERS[op](*(self.value(x, "pred") for x in parts[1:])))
        elif op in SHIFTS:
            more = [self.value(x, "u32") for x in parts[2:]]
            more = [np.minimum(x, int(kind[1:]) - 1).astype(typed(kind)) for x in more] if op != "bfe" else more
            self.put(parts[0], SHIFTS[op](self.value(parts[1], kind), *more).astype(typed(kind)))
        else:
            self.put(parts[0], NUMBERS[op](*(self.value(x, kind) for x in parts[1:])).astype(typed(kind)))

    def move(self, op, kind, parts, on):
        target, place = parts if op == "ld" else parts[::-1]
        for n, x in enumerate(x.strip() for x in target.strip("{} ").split(",")):
            where = self.address(place) + np.uint64(n * int(kind[1:]) // 8)
            if op == "st":
                self.memory.store(where, on, self.value(x, kind), self.program)
                continue
            found = self.memory.load(where, on, BITS[kind[1:]])
            self.registers[x] = np.where(on, found, self.registers.get(x, np.zeros_like(found)).astype(found.dtype))


class Memory:
    """Tensors in one address space, with gaps that nothing may touch."""

    def __init__(self, tensors):
        self.places, end = {}, 1 << 16
        for x in tensors:
            storage = x.untyped_storage()
            if storage.data_ptr() not in self.places:
                self.places[storage.data_ptr()] = end, storage
                end += -(-max(storage.nbytes(), 1) // 256) * 256 + (1 << 12)
        self.bytes, self.allowed, self.writer = np.zeros(end, np.uint8), np.zeros(end, bool), np.full(end, -1)
        for start, storage in self.places.values():
            stop = start + storage.nbytes()
            self.bytes[start:stop] = np.frombuffer(bytes(storage), np.uint8)
            self.allowed[start:stop] = True

    def pointer(self, x):
        return self.places[x.untyped_storage().data_ptr()][0] + x.storage_offset() * x.element_size()

    def checked(self, where, on, size):
        where = where[on].astype(np.int64)
        assert (where % size == 0).all(), "an address that is not aligned"
        assert (where > 0).all(), "an access outside of the tensors"
        assert (where + size <= len(self.bytes)).all(), "an access outside of the tensors"
        assert self.allowed[where].all(), "an access outside of the tensors"
        return where

    def load(self, where, on, kind):
        out, size = np.zeros(LANES, kind), np.dtype(kind).itemsize
        out[on] = self.bytes.view(kind)[self.checked(where, on, size) // size]
        return out

    def store(self, where, on, x, program):
        at = self.checked(where, on, x.itemsize)
        assert np.isin(self.writer[at], (-1, program)).all(), "two programs write to one place"
        self.writer[at] = program
        self.bytes.view(x.dtype)[at // x.itemsize] = x[on]

    def give_back(self):
        for start, storage in self.places.values():
            ctypes.memmove(storage.data_ptr(), self.bytes[start : start + storage.nbytes()].tobytes(), storage.nbytes())


class Compiled:
    """A kernel compiled for an architecture. Launches run it if ``runs``; ``made`` holds what was compiled."""

    def __init__(self, kernel, arch, runs=True):
        self.kernel, self.target, self.runs, self.made = kernel, GPUTarget("cuda", arch, 32), runs, {}

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, enable_fp_fusion, **constants):
            given = dict(zip([n for n in self.kernel.arg_names if n not in constants], arguments, strict=True))
            types = {n: POINTERS[x.dtype] if isinstance(x, torch.Tensor) else "i32" for n, x in given.items()}
            even = {n for n, x in given.items() if isinstance(x, torch.Tensor) or x % 16 == 0}
            key = str((sorted(constants.items()), sorted(types.items()), sorted(even)))
            if key not in self.made:
                options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
                self.made[key] = self.compile(types, constants, even, options)
            if self.runs:
                assert num_warps == 1
                memory, machine = (
                    Memory([x for x in given.values() if isinstance(x, torch.Tensor)]),
                    Machine(self.made[key].asm["ptx"]),
                )
                values = [memory.pointer(x) if isinstance(x, torch.Tensor) else x for x in given.values()]
                with np.errstate(all="ignore"):
                    for program in range(grid[0]):
                        machine.run(program, [*values, 0, 0], memory)
                memory.give_back()

        return launch

    def compile(self, types, constants, even, options):
        names = self.kernel.arg_names
        signature = {n: types.get(n, "constexpr") for n in names}
        attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in even}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attrs)
        return triton.compile(source, target=self.target, options=options)


@contextlib.contextmanager
def compiled(module, arch, runs=True):
    """Within it, the kernels of a module are compiled for an architecture; gives them by name."""
    kernels = {
        n: Compiled(getattr(module, n), arch, runs) for n in ("_forward", "_backward_of_queries", "_backward_of_keys")
    }
    with mock.patch.multiple(module, **kernels):
        yield kernels


def resources(made):
    """Registers, instructions that spill them, bytes of shared memory, and instructions of the innermost loops of
    machine code."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    spills = len(re.findall(r"\b(?:LDL|STL)\b", code))
    return int(re.search(r"REG:(\d+)", usage)[1]), spills, made.metadata.shared, inner_instructions(code)


def inner_instructions(code):
    """The number of instructions in loops that hold no other loop. A loop is a branch to a label before it; the one
    that branches to itself ends the kernel."""
    labels, loops, count = {}, [], 0
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            count += 1
            branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
            if branch and labels.get(branch[1], count) < count - 1:
                loops.append((labels[branch[1]], count))
    return sum(b - a for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops))
