"""The few results that sentences of README and docs name are those of the tables in examples/results."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAIR = [f"matching/accuracy | {model} | 4 cells" for model in ("frames", "relative", "deep G-CNN + mean")]
RECALL = [
    f"associative_recall/errors | random | {name} | 32 tokens" for name in ("SE(3)-Hyena", "SE(3)-Hyena, shuffled")
]
BOXES = [
    f"long_range/errors | forces | {model} | field or force, 2 times the charges"
    for model in ("EwaldAttention", "Ewald message passing")
]
LONGEST = [f"benchmarks/long_context | 1,048,576 | SE(3)-Hyena | {unit}" for unit in ("s", "GiB")]
FRAMES = ["R4_SA | frame | 0.02", "C4 G-CNN | 0.04"]
RESULTS = {  # for each page, words with places for numbers, and the cells: table | what the row holds | column
    "README.md": {
        "in {:.0f} % of test images; the best of five group CNNs in {:.0f} %": [PAIR[0], PAIR[2]],
        "exact pairs leaves {:.4f} of the variance; messages alone (GATv2) leave {:.2f}": [
            f"depots/displacement | {model} | moved" for model in ("far offsets, pairs", "GATv2")
        ],
        "leaves {:.4f} of the variance of forces, and Ewald message passing {:.4f}": BOXES,
    },
    "docs/which_layer.md": {
        "finds them in {:.0f} % of test images": PAIR[:1],
        '`relation="relative"` in {:.0f} %. The best of five G-CNNs finds them in {:.0f} %': PAIR[1:],
        "32 tokens with an error of {:.4f}, and with an error of {:.4f} if the tokens come in a random order": RECALL,
        "{:.1f} seconds and {:.1f} GiB": LONGEST,
    },
    "docs/graph_settings.md": {
        "{:.0f} percent off at the default of 64": ["benchmarks/features_error | 64 | error with near pairs, %"],
    },
    "docs/results_escnn.md": {
        "reach {:.1f} % for C4 and the C4 G-CNN {:.1f} %": [
            f"rotated_digits/frames | 8 | {x} | accuracy" for x in FRAMES
        ],
        "than 24 epochs and reaches {:.1f} %": ["rotated_digits/frames | 24 | C4 G-CNN | 0.02 | accuracy"],
        "rises from {:.1f} % to {:.1f} %": [
            f"rotated_digits/accuracy | R4_SA | {relation}" for relation in ("relative", "relative, locality")
        ],
        "(Z2) attention reaches {:.1f} %": ["rotated_digits/accuracy | Z2_SA | ge_vit, locality"],
    },
    "docs/results_escnn_content.md": {
        "finds the pair in {:.0f} % of test images": PAIR[:1],
        '`relation="relative"` in {:.0f} %; the best of five G-CNNs finds it in {:.0f} %': PAIR[1:],
    },
    "docs/results_pyg.md": {
        "from {:.1f} % to {:.1f} %, through the offsets": [
            f"pyg_mixed_model/accuracy | touching | {model} | accuracy" for model in ("local only", "ours")
        ],
    },
}


def cell(words):
    """The mean in one cell of a table."""
    name, *wanted, column = words.split(" | ")
    lines = (ROOT / "examples" / "results" / f"{name}.md").read_text().splitlines()
    header, _, *rows = [[text.strip() for text in line[2:-2].split(" | ")] for line in lines]
    (row,) = [row for row in rows if all(word in row for word in wanted)]
    return float(row[header.index(column)].partition(" ± ")[0])


@pytest.mark.parametrize(("page", "words"), [(page, words) for page, found in RESULTS.items() for words in found])
def test_numbers_in_text_are_those_of_the_tables(page, words):
    text = " ".join((ROOT / page).read_text().split())
    assert words.format(*map(cell, RESULTS[page][words])) in text
