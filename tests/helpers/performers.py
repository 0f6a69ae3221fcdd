"""Options of the PyG layers of each kind, as the fixture ``make_conv`` takes them; and a layer of the paper's."""

NEAR = {
    "window": {},
    "mlp": {"offset": "mlp", "cutoff": 2.1},  # the same pairs of a lattice as a Manhattan distance below 3
    "distance": {"offset": "distance", "cutoff": 1.6},
    "content pairs": {"method": "pairs"},
    "clipped": {"position": "clipped"},
    "values": {"values": "offset"},
    "mlp values": {"offset": "mlp", "values": "offset", "cutoff": 2.1},
    "distance values": {"offset": "distance", "values": "offset", "cutoff": 1.6},
    "pairs": {"values": "offset", "method": "pairs"},
}
EVERY = {
    **NEAR,
    "sinusoid": {"position": "sinusoid"},
    "None": {"position": None},
    "None pairs": {"position": None, "method": "pairs"},
    "None values": {"position": None, "values": "offset"},
}


def positional_conv(*sizes, flow="source_to_target", **options):
    """The core's PositionalPerformerAttention as message passing, which PixelGraphClassifier makes."""
    from tg_equiattn.integrations.pyg.conv import KernelAttentionConv

    from tg_equiattn.nn.performer.attention import PositionalPerformerAttention

    return KernelAttentionConv(PositionalPerformerAttention(*sizes, **options), flow=flow)
