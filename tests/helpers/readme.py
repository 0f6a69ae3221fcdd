"""What README advertises: the calls and settings under "Use it if", and its blocks of code."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
SPANS = [
    " ".join(span.split())
    for span in re.findall(r"`([^`]+)`", TEXT.partition("## Use it if\n")[2].partition("\nComing from")[0])
]
CALLS = {span.partition("(")[0]: span for span in SPANS if span.endswith(")")}  # by the name that is called
SETTINGS = [span for span in SPANS if not span.endswith(")")]
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
