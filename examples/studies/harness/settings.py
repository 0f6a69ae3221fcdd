"""One configuration style: a frozen dataclass an example, its fields the command line's flags."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import tyro

from .devices import checked_device

EXAMPLES = Path(__file__).parents[2]
PRESETS = {
    "quick": "seconds: does it run?",
    "study": "what the README's tables were made with; runs whose rows are there already are left out",
    "nearest": "the nearest of three, at the settings of its table",
    "full": "the paper's model, data and schedule; for a GPU",
}


class SettingsError(ValueError):
    """Settings that cannot be; the program ends with the message alone."""


Preset = TypeVar("Preset", bound="Settings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What every example takes. A single run is settings with one value in each field of ``SWEEP``."""

    SWEEP: ClassVar[tuple[str, ...]] = ("seeds",)
    HOW: ClassVar[tuple[str, ...]] = ("device", "output", "results", "again", "progress")
    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ("warmup", "weight_decay", "clip")  # other numbers are positive
    SHOWN: ClassVar[tuple[str, ...]] = ()  # in which runs of one row of a table may differ: reports tell them apart
    STUDY: ClassVar[str]

    seeds: tuple[int, ...] = (0,)
    """one training run for each"""
    epochs: int = 10
    """passes over the training data"""
    batch: int = 32
    """examples of one step"""
    learning_rate: float = 1e-3
    """of Adam, at the start"""
    warmup: float = 0.0
    """share of the steps in which the learning rate rises before it falls; 0 starts with the highest"""
    weight_decay: float = 0.0
    """of Adam"""
    clip: float = 0.0
    """largest norm of a step's gradient; 0 leaves it as it is"""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """mixed precision computes in half precision where that is safe"""
    device: str = "cpu"
    """cpu, cuda, or cuda:1 and so on"""
    output: Path = Path("out")
    """folder for logs, checkpoints, tables and figures"""
    results: Path | None = None
    """CSV file that gets a row for every run; default: results.csv in the folder of this example's output"""
    again: bool = False
    """train runs anew that have a row or a checkpoint already"""
    progress: bool = True
    """show progress bars, where standard output is a terminal"""

    def check(self) -> None:
        """Raise SettingsError, which names the flag, for what cannot be."""
        checked_device(self.device)
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in given.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                if name in self.MAY_BE_ZERO and not 0 <= value < float("inf"):
                    raise SettingsError(f"{flag(name)} must not be negative, got {value}")
                if name not in self.MAY_BE_ZERO and not 0 < value < float("inf"):
                    raise SettingsError(f"{flag(name)} must be positive, got {value}")
        for name in self.SWEEP:
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise SettingsError(f"{flag(name)} must be one or more different values, got {list(values)}")
        if min(self.seeds) < 0:
            raise SettingsError(f"--seeds must not be negative, got {self.seeds}")
        if not 0 <= self.warmup < 1:
            raise SettingsError(f"--warmup must be in [0, 1), got {self.warmup}")
        if "head_channels" not in given and given.get("channels", 0) % given.get("heads", 1):
            raise SettingsError(
                f"{flag('channels')} must divide among {flag('heads')} {given['heads']}, got {given['channels']}"
            )
        if self.precision == "16-mixed" and self.device == "cpu":
            raise SettingsError("--precision 16-mixed needs --device cuda; on the CPU there is bf16-mixed")

    def runs(self: Preset) -> Iterator[Preset]:
        """The single runs."""
        for values in itertools.product(*(getattr(self, name) for name in self.SWEEP)):
            yield dataclasses.replace(self, **{n: (v,) for n, v in zip(self.SWEEP, values, strict=True)})

    @property
    def seed(self) -> int:
        """Of a single run."""
        (seed,) = self.seeds
        return seed

    def identity(self) -> dict[str, Any]:
        """All fields that decide the result, as JSON has them."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in self.HOW}
        return json.loads(json.dumps(fields, default=str))

    @property
    def folder(self) -> Path:
        """Of a single run's logs and checkpoints; other settings, other folder."""
        digest = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:10]
        words = "-".join(str(v) for name in self.SWEEP for v in getattr(self, name))
        safe = "".join(c if c.isalnum() or c in "-_." else "" for c in words)
        return self.output / self.STUDY / "runs" / f"{safe}-{digest}"

    @property
    def results_file(self) -> Path:
        return self.results or self.output / self.STUDY / "results.csv"


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def command(settings: Settings) -> str:
    """The command line that gives these settings, without what does not change the result."""
    words = ["python", f"examples/studies/{settings.STUDY}.py"]
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in settings.HOW or value == field.default:
            continue
        if isinstance(value, bool):
            words.append(flag(field.name) if value else f"--no-{field.name.replace('_', '-')}")
        else:
            words += [flag(field.name), *map(str, value if isinstance(value, tuple) else (value,))]
    return shlex.join(words)


def parse(default: Preset, presets: dict[str, Preset], doc: str, arguments: list[str] | None = None) -> Preset:
    """The command line; ``--quick``, ``--study`` and ``--full`` choose what other flags start from."""
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = [f"--{name}" for name in presets if f"--{name}" in arguments]
    if len(chosen) > 1:
        raise SettingsError(f"{' and '.join(chosen)} exclude each other")
    rest = [word for word in arguments if word not in chosen]
    lines = [f"    --{name:<9} {PRESETS[name]}" for name in presets]
    text = "\n".join([doc.strip(), "", "Settings to start from, which the flags below then change:", "", *lines])
    start = presets[chosen[0][2:]] if chosen else default
    settings = tyro.cli(type(default), args=rest, default=start, description=text, prog=f"{default.STUDY}.py")
    terminal = sys.stdout.isatty() and sys.stderr.isatty()  # in a log, a progress bar is a line a step
    settings = dataclasses.replace(settings, progress=settings.progress and terminal)
    settings.check()
    return settings
