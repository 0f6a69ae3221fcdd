"""Matrix products with factors rounded to TF32, on any device."""

import torch
from emulated import WithBodies

aten = torch.ops.aten
PRODUCTS = {
    aten.mm, aten.bmm, aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.convolution,
    aten.convolution_backward, aten._scaled_dot_product_flash_attention_for_cpu,
}  # fmt: skip
SUMMANDS = {aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_, aten.addbmm}  # whose first operand is only added


def round_to_tf32(x):
    """float32 with 10 bits of mantissa; anything else as it is."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
        return x
    rounded = ((x.contiguous().view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


class Tf32(WithBodies):
    """Matrix products as a GPU computes them with TF32 switched on."""

    def __enter__(self):
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        return super().__enter__()

    def __exit__(self, *exception):
        torch.set_float32_matmul_precision(self.before)
        return super().__exit__(*exception)

    def run(self, func, types, args, kwargs):
        if func.overloadpacket in PRODUCTS:
            first = func.overloadpacket in SUMMANDS
            args = (*args[:first], *(round_to_tf32(x) for x in args[first:]))
        return func(*args, **kwargs)
