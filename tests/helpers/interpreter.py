"""Triton's interpreter, in a process of its own, since kernels read TRITON_INTERPRET where they are defined."""

import os
import subprocess
import sys

# Checks of overflow are left out, and the language is patched once a launch instead of once a call: both are slow.
FASTER = """
import triton.runtime.interpreter as interpreter

interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
patch = interpreter._patch_lang


def call(self, *arguments, **options):
    if not self.fn.__module__.endswith("gpu_kernels"):
        patch(self.fn)
    return self.rewrite()(*arguments, **options)


interpreter.InterpretedFunction.__call__ = call
"""


def interpreted(code):
    """What Python prints for some code."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    own = "ignore:Conversion of an array:DeprecationWarning"  # of Triton 3.4 with a new numpy
    command = [sys.executable, "-W", "error", "-W", own, "-c", FASTER + code]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not found.returncode, found.stderr
    return found.stdout
