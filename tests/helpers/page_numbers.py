"""Results in the pages, each tied to its own cell of a table in examples/results.

A table stands between ``<!-- STUDY/TABLE -->`` and ``<!-- end -->`` and is that of examples/results, whole. In text a
result is a number with a decimal point, or a whole one before percent, times, a unit of time or memory, or parameters;
what stands in code, as settings do, is none. Behind a paragraph a comment names the cell of each, in order:

    Frames have 91.1 ± 4.6 percent, 23.1 more than convolutions.
    <!-- = matching/accuracy | frames | 4 cells ; frames | 4 cells minus deep G-CNN + mean | 4 cells -->

A cell is named by its table (if it is another than the last one), the cells that tell its row, and its column; `` #2``
takes the second number there. ``minus``, ``over`` and ``plus`` stand between two cells, and ``1 minus`` before one.
"""

import re
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "examples" / "results"
FILLED = re.compile(r"^<!-- (\w+)/(\w+) -->\n(.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE)
TIES = re.compile(r"<!-- = (.*?) -->", re.DOTALL)
CODE = re.compile(r"^ *(```+|\$\$).*?^ *\1", re.DOTALL | re.MULTILINE)
NO_TEXT = re.compile(r"<!--.*?-->|`[^`]*`|\$[^$]*\$|\]\([^)]*\)|<[^>\s][^>]*>|arXiv:?\s?\d+\.\d+", re.DOTALL)
WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
UNITS = (
    r"x\b|\s?%|\s(?:percent|times|ms|s|seconds?|minutes?|hours?|[KMG]iB|parameters|"
    r"points? (?:ahead|behind|better|worse|more|less))\b"
)
NUMBER = re.compile(
    rf"(?<![\w.,])-?{WHOLE}(?:\.\d+(?:e-?\d+)?(?:\s±\s\d[\d.]*\d)?(?!\.?\w)|\.\d+x\b|(?:e-?\d+)?(?:\s±\s\d+)?(?={UNITS}))"
)
PLAIN = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
SIGNS = {"minus": lambda a, b: a - b, "plus": lambda a, b: a + b, "over": lambda a, b: a / b}


def table(name):
    """Header and lines of a table of examples/results, as lists of cells."""
    path = RESULTS / f"{name}.md"
    if not path.is_file():
        raise ValueError(f"there is no table {name}")
    lines = path.read_text().splitlines()
    header, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)][1:-1] for line in lines]
    return header, rows


def value(text):
    return float(text.replace(",", ""))


def cell(words, last):
    """Mean, and spread where there is one, in the cell that is named, and its table's name."""
    terms = [term.strip() for term in words.split(" | ")]
    name = terms.pop(0) if (RESULTS / f"{terms[0]}.md").is_file() or ("/" in terms[0] and last is None) else last
    *wanted, column = terms
    column, _, place = column.partition(" #")
    header, lines = table(name)
    rows = [line for line in lines if all(word in line for word in wanted)]
    if len(rows) != 1 or header.count(column) != 1:
        raise ValueError(
            f"{len(rows)} rows of {name} hold {' | '.join(wanted)}, {header.count(column)} columns are {column}"
        )
    found = rows[0][header.index(column)]
    mean, _, spread = found.partition(" ± ")
    means = PLAIN.findall(mean)
    if len(means) < int(place or 1):
        raise ValueError(f"{name} | {words} is {found!r}")
    return value(means[int(place or 1) - 1]), value(spread) if spread else None, name


def tied(words, last):
    """The value that a tie says, its spread, and the table of its last cell."""
    parts = re.split(r" (minus|plus|over) ", words)
    if parts[0] == "1":
        mean, spread = 1.0, None
    else:
        mean, spread, last = cell(parts[0], last)
    for sign, other in zip(parts[1::2], parts[2::2], strict=True):
        second, _, last = cell(other, last)
        mean, spread = SIGNS[sign](mean, second), None
    return mean, spread, last


def says(number, mean, spread):
    """Whether a number of the text is the value, rounded."""
    own, _, own_spread = number.partition(" ± ")
    for text, there in ((own, mean), (own_spread, spread)):
        if not text:
            continue
        if there is None:
            return False
        digits, _, power = text.partition("e")
        unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
        if abs(value(text) - there) > 0.501 * unit:
            return False
    return True


def without(pattern, text):
    """The text with spaces where the pattern is, of as many characters and lines."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def paragraphs(text):
    """Where each paragraph of a page begins, and its text with nothing but words and ties."""
    text = without(CODE, without(FILLED, text))
    return [(block.start(), block[0]) for block in re.finditer(r"(?:^.*\S.*$\n?)+", text, re.MULTILINE)]


def result_places(text, of_tables):
    """Where a page's numbers begin and end: those in tables between comments, or those of the text."""
    parts = [(m.start(3), m[3]) for m in FILLED.finditer(text)] if of_tables else paragraphs(text)
    numbers = PLAIN if of_tables else NUMBER
    return [
        (start + match.start(), start + match.end())
        for start, part in parts
        for match in numbers.finditer(without(NO_TEXT, part))
        if match[0][-1].isdigit()
    ]


def untied(text):
    """What a page says otherwise than examples/results, or without saying where it is from: one line each."""
    wrong = []
    for study, name, found in FILLED.findall(text):
        path = RESULTS / study / f"{name}.md"
        if not path.is_file() or found.strip("\n") != path.read_text().strip("\n"):
            wrong.append(f"the table {study}/{name} is not that of examples/results (make report fills it)")
    for start, part in paragraphs(text):
        line = text[:start].count("\n") + 1
        ties = [words for found in TIES.findall(part) for words in re.split(r"\s;\s", " ".join(found.split()))]
        numbers = [" ".join(number.split()) for number in NUMBER.findall(without(NO_TEXT, part))]
        if len(numbers) != len(ties):
            wrong.append(
                f"line {line}: {len(numbers)} results ({', '.join(numbers)}) and {len(ties)} ties ({' ; '.join(ties)})"
            )
            continue
        last = None
        for number, words in zip(numbers, ties, strict=True):
            try:
                mean, spread, last = tied(words, last)
            except ValueError as error:
                wrong.append(f"line {line}: {number}: {error}")
                continue
            if not says(number, mean, spread):
                wrong.append(f"line {line}: {number} is not {words}, {mean:.6g}{f' ± {spread:g}' if spread else ''}")
    return wrong
