"""Options of the PyG layers of each kind, as the fixture ``make_conv`` takes them."""

CONTENT = {
    "window": {},
    "mlp": {"offset": "mlp", "max_distance": 2.1},  # the same pairs of a lattice as a Manhattan distance below 3
    "distance": {"offset": "distance", "max_distance": 1.6},
    "content pairs": {"method": "pairs"},
    "clipped": {"position": "clipped"},
}
NEAR = {
    **CONTENT,
    "values": {"values": "offset"},
    "mlp values": {"offset": "mlp", "values": "offset", "max_distance": 2.1},
    "distance values": {"offset": "distance", "values": "offset", "max_distance": 1.6},
    "pairs": {"values": "offset", "method": "pairs"},
    "auto": {"values": "offset", "method": "auto", "num_random_features": 7},
}
EVERY = {
    **NEAR,
    "sinusoid": {"position": "sinusoid"},
    "absolute": {"position": "absolute"},
    "None": {"position": None},
    "None pairs": {"position": None, "method": "pairs"},
    "None values": {"position": None, "values": "offset"},
}
