"""Fused kernels in Triton, one accelerated path a file; the pure-torch path beside each is always there.

They run on a GPU, and on the CPU through Triton's interpreter (``TRITON_INTERPRET=1`` before the first import), which
is slow and for tests. Nothing here is imported before a kernel is asked for, see
:mod:`tg_equiattn.functional._backend`.
"""
