"""The few results that sentences of README and docs name are those of the tables in examples/results."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAIR = [
    f"matching/accuracy | {model} | 4 cells" for model in ("frames, rotary", "relative, rotary", "deep G-CNN + mean")
]
RECALL = [
    f"associative_recall/errors | random | {name} | 32 tokens" for name in ("SE(3)-Hyena", "SE(3)-Hyena, shuffled")
]
DEFAULTS, GRAPHS, GPU = "benchmarks/defaults | ", "benchmarks/defaults_graphs | ", "docs/performance.md | "
LONGEST = [f"benchmarks/long_context | 1,048,576 | SE(3)-Hyena | {unit}" for unit in ("s", "GiB")]
FRAMES = ["R4_SA | frame | 0.02", "C4 G-CNN | 0.04"]
RESULTS = {  # for each page, words with places for numbers, and the cells: table | what the row holds | column
    "README.md": {
        "of four in {:.0f} % of test images; the best of five group CNNs finds them in {:.0f} %": PAIR[1:],
        "is {0:.4f}, and {1:.4f} in graphs with four times the nodes. GPSConv with centred positions has {2:.4f} and "
        "{3:.4f}": [
            f"depots/displacement | {model} | {column}"
            for model in ("far offsets, pairs", "dense, centred")
            for column in ("as trained", "4 times the nodes")
        ],
        "fall from {:.2f} to {:.2f} meV/A for NaCl": [
            f"polar_crystals/phonons | NaCl | {model} | 512 atoms" for model in ("MACE", "searched")
        ],
        "larger than in training is {:.3f}. Messages with hand-made potentials as inputs have {:.3f}, and messages "
        "with the net charge {:.3f}": [
            f"surfaces/errors | {model} | larger"
            for model in ("Ewald (e3nn), no messages", "messages, potentials", "messages, net charge")
        ],
        "is {:.4f}, and {:.4f} for motions four times as long": [
            f"memory/forces | exponentials | {n} x length" for n in (1, 4)
        ],
        "an equivariant transformer, has {:.4f} and {:.4f} after": [
            f"memory/forces | equivariant transformer | {n} x length" for n in (1, 4)
        ],
        "takes {:.0f} times as long as an R2Conv of 5 x 5 pixels at 16 x 16 pixels, and {:.0f} times at 32 x 32": [
            f"benchmarks/calls | R2GroupAttention, all pixels, relative, C4, {n} x {n} | ours" for n in (16, 32)
        ],
        "takes {:.1f} to {:.1f} times as long, on an H100 {} times": [
            DEFAULTS + "R2GroupAttention, C8, 64 x 64 | ours",
            DEFAULTS + "R2GroupAttention, C4, 16 x 16 | ours",
            GPU + "`R2GroupAttention`, C4 and C8, one of 8 heads by content | forward",
        ],
        "far nodes takes {:.1f} to {:.1f} times as long as `GPSConv` forward": [
            f"benchmarks/calls | RelativeGPSBlock, far offsets, {graphs} | ours" for graphs in ("16 of 200", "64 of 30")
        ],
        "distance takes {:.1f} to {:.1f} times as long, and that for histories {:.1f} to {:.1f} times": [
            f"benchmarks/calls | {layer}, {graphs} | ours"
            for layer, sizes in (
                ("IrrepsEwaldAttention, 2 + 2 kernels", ("64 of 30", "16 of 200")),
                ("IrrepsSE3Hyena, exponential, 2 layers", ("16 of 200", "64 of 30")),
            )
            for graphs in sizes
        ],
        "MACE with Ewald attention takes {:.1f} to {:.1f} times as long on a CPU": [
            f"benchmarks/mace_step | {system} | ratio" for system in ("32 molecules of 20 atoms", "1,000 atoms, open")
        ],
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
        "learns fastest and has {:.1f} %": ["vision_transformers/accuracy | G-CNN C4 | 15 | test"],
        "is as accurate ({:.1f} %). Without these convolutions it has {:.1f} %": [
            f"vision_transformers/accuracy | MNIST's digits, 7,000 | {model} | 15 | test"
            for model in ("convolutions + frames C4", "frames C4")
        ],
        "are behind: {:.0f} % at equal width, {:.0f} % with as many parameters as frames, and {:.1f} %": [
            f"vision_transformers/accuracy | MNIST's digits, 7,000 | {model} | 15 | test"
            for model in ("plain, equal width", "plain, equal parameters | 3", "convolutions + plain, equal parameters")
        ],
        "the group CNN has {:.0f} %, convolutions with frames {:.0f} %, and frames alone {:.0f} %": [
            f"vision_transformers/accuracy | MNIST's digits, 700 | {model} | test"
            for model in ("G-CNN C4", "convolutions + frames C4", "frames C4")
        ],
        "have {:.0f} %, alone and before plain blocks. Frames of the cube have {:.0f} % alone and {:.0f} %": [
            f"vision_transformers/accuracy | {model} | test"
            for model in ("CNN", "frames cube", "convolutions + frames cube")
        ],
        "Frames of D4 have {:.1f} % with half": ["vision_transformers/accuracy | frames D4 | test"],
        "rotations (rate 0.01) has {:.0f} %": ["vision_transformers/accuracy | G-CNN cube | test"],
        "(Z2) attention reaches {:.1f} %": ["rotated_digits/accuracy | Z2_SA | ge_vit, locality"],
        'with `relation="relative"` finds the pair in {:.0f} % of test images': PAIR[1:2],
        "the default) finds it in {:.0f} %, and with": PAIR[:1],
        'with `encoding="joint"` they find it in {:.0f} and {:.0f} %': [
            f"matching/accuracy | {model} | 4 cells" for model in ("relative", "frames")
        ],
        "The best of five G-CNNs finds it in {:.0f} %": PAIR[2:],
    },
    "docs/results_pyg.md": {
        "from {:.1f} % to {:.1f} %, through the offsets": [
            f"pyg_mixed_model/accuracy | touching | {model} | accuracy" for model in ("local only", "ours")
        ],
    },
}


def cell(words):
    """The mean in one cell of a table of results, or the text in one cell of a page."""
    name, *wanted, column = words.split(" | ")
    page = name.startswith("docs/")
    lines = (ROOT / name if page else ROOT / "examples" / "results" / f"{name}.md").read_text().splitlines()
    table = [[text.strip() for text in line[2:-2].split(" | ")] for line in lines if line.startswith("| ")]
    (place,) = [number for number, row in enumerate(table) if all(word in row for word in wanted)]
    header = max((row for row in table[:place] if column in row), key=table[:place].index)
    text = table[place][header.index(column)]
    return text if page else float(text.partition(" ± ")[0])


@pytest.mark.parametrize(("page", "words"), [(page, words) for page, found in RESULTS.items() for words in found])
def test_numbers_in_text_are_those_of_the_tables(page, words):
    text = " ".join((ROOT / page).read_text().split())
    assert words.format(*map(cell, RESULTS[page][words])) in text


def test_ratios_on_a_gpu_are_those_of_its_page():
    readme, page = ((ROOT / page).read_text() for page in ("README.md", "docs/performance.md"))
    times = re.findall(r"^\| MACE with .*\| MACE \| - \| (\d+) ms; (\d+) ms \|$", page, re.MULTILINE)
    assert len(times) == 3
    ratios = [int(ours) / int(other) for ours, other in times]
    assert f"and {min(ratios):.1f} to {max(ratios):.1f} times on an H100" in " ".join(readme.split())
