"""Options of the PyG layers of each kind, as the fixture ``make_conv`` takes them."""

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
    "far": {"offset": "distance", "values": "far", "cutoff": 1.6, "method": "pairs"},
}
EVERY = {
    **NEAR,
    "sinusoid": {"position": "sinusoid"},
    "None": {"position": None},
    "None pairs": {"position": None, "method": "pairs"},
    "None values": {"position": None, "values": "offset"},
    "None far": {"position": None, "offset": "distance", "values": "far"},
}
