"""The command ``tg_equiattn_mace_train``: MACE's ``mace_run_train`` and all its flags, with long range in the model.

    tg_equiattn_mace_train --name far --train_file train.xyz --valid_fraction 0.1 --E0s average --charges Na=1 Cl=-1

The model may come from flags, be a foundation model, or be a far.model that is fine-tuned with the long range it has
(--foundation_model far.model). far.model is run by MACECalculator, and by mace_eval_configs if all frames are neutral.
Total charges of ions are read from ``info["total_charge"]`` of each frame, or from the key that --total_charge_key
names.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import ase.io
from mace.cli import run_train
from mace.tools.scripts_utils import check_path_ase_read

from .long_range import add_long_range, copy_long_range, select_head, without_long_range

BATCHES = 8  # of the training data, to which a model with charges is fitted before training
build, remove_head = run_train.configure_model, run_train.remove_pt_head


def charge(word: str) -> tuple[str, float]:
    name, number = word.split("=")
    return name, float(number)


def long_range_flags(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The arguments of :func:`add_long_range` among the words of a command line, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--charges", nargs="+", type=charge, help="of each element, as Na=1, in place of attention")
    parser.add_argument("--learn", choices=["scale"], help="find a common factor of the charges from forces")
    parser.add_argument("--dielectric", type=float, help="electronic dielectric constant of the data, for charges")
    parser.add_argument("--after", nargs="+", type=int, help="product blocks, from 0 on, that attention follows")
    for name in ("num_gaussians", "num_coulomb"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("width", "max_width", "gain"):
        parser.add_argument(f"--{name}", type=float)
    if not {"-h", "--help"}.isdisjoint(words):
        print(f"{__doc__}\n{parser.format_help()}\nThe flags of mace_run_train:\n")
    known, others = parser.parse_known_args(words)
    settings = vars(known)
    return settings | ({"charges": dict(known.charges)} if "charges" in settings else {}), others


def has_long_range(model: Any) -> bool:
    return model is not None and any(".long_range." in name for name in model.state_dict())


def refuse_unread_charges(head_configs: Any) -> None:
    """End the program for files with charges that MACE would not read."""
    for head in head_configs:
        key = head.key_specification.info_keys["total_charge"]
        for file in filter(check_path_ase_read, head.train_file):
            for frame in ase.io.iread(file):
                unread = [name for name in frame.info if "charge" in name.lower() and name != key]
                if unread and key not in frame.info:
                    raise SystemExit(
                        f"{file} has {unread[0]} of frames, which is not read, and no {key}: name the total charge of "
                        "frames by --total_charge_key, or remove what is no total charge"
                    )


def main() -> None:
    """Run ``mace_run_train`` on the words of the command line."""
    settings, sys.argv[1:] = long_range_flags(sys.argv[1:])

    def configure_model(args, train_loader, atomic_energies, model_foundation, heads, z_table, head_configs):
        if args.lora or args.enable_cueq or args.enable_oeq or (args.freeze or 0) >= 6:
            raise SystemExit(
                "long range does not go with --lora and --freeze 6 or 7, which freeze it, nor --enable_cueq, "
                "--enable_oeq"
            )
        refuse_unread_charges(head_configs)
        tuned = has_long_range(model_foundation)
        base = without_long_range(model_foundation) if tuned else model_foundation
        model, outputs = build(args, train_loader, atomic_energies, base, heads, z_table, head_configs)
        if tuned:
            if settings:
                raise SystemExit(
                    f"{args.foundation_model} has long range, which is kept: leave out {', '.join(settings)}, or "
                    "fine-tune a model without long range"
                )
            return copy_long_range(model_foundation, model), outputs
        batches = list(itertools.islice(train_loader, BATCHES))
        return add_long_range(model, batch=batches if "charges" in settings else batches[0], **settings), outputs

    run_train.configure_model = configure_model
    run_train.remove_pt_head = lambda model, head: (select_head if has_long_range(model) else remove_head)(model, head)
    run_train.main()
