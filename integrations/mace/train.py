"""The command ``tg_equiattn_mace_train``: MACE's ``mace_run_train`` and all its flags, with long range in the model.

    tg_equiattn_mace_train --name far --train_file train.xyz --valid_fraction 0.1 --E0s average --charges Na=1 Cl=-1

Without a flag of long range it is ``mace_run_train``. A line of the log, "long range: ...", says what was added. The
model may come from flags, be a foundation model, or be a far.model that is fine-tuned with the long range it has
(--foundation_model far.model). far.model is run by MACECalculator, and by mace_eval_configs if all frames are neutral.
Total charges of ions are read from ``info["total_charge"]`` of each frame, or from the key that --total_charge_key
names.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from typing import Any

import ase.io
from mace.cli import run_train
from mace.tools.scripts_utils import check_path_ase_read

from tg_equiattn.nn import PredictedChargeInteraction

from .calculator import ChargeLoss
from .long_range import add_long_range, can_predict_charges, copy_long_range, select_head, without_long_range

BATCHES = 8  # of the training data, to which long range is fitted before training
SHARED_CHARGE_WEIGHT = 10.0
NOTHING_SAID = (
    "long range: none, as no frame of the training set has a total charge, or forces on two separate fragments. So the "
    "data do not say what charges are, and MACE is trained without them"
)
build, remove_head, train = run_train.configure_model, run_train.remove_pt_head, run_train.tools.train


def charge(word: str) -> tuple[str, float]:
    if word == "predicted":
        return word, 0.0
    name, number = word.split("=")
    return name, float(number)


def long_range_flags(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The arguments of :func:`add_long_range` among the words of a command line, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--charges", nargs="+", type=charge, help="of each element, as Na=1, or predicted")
    parser.add_argument("--learn", choices=["scale"], help="find a common factor of the charges from forces")
    parser.add_argument("--dielectric", type=float, help="electronic dielectric constant of the data, for charges")
    parser.add_argument("--after", nargs="+", type=int, help="attention, after these product blocks, counted from 0")
    for name in ("num_gaussians", "num_coulomb"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("width", "max_width", "gain"):
        parser.add_argument(f"--{name}", type=float)
    if not {"-h", "--help"}.isdisjoint(words):
        print(f"{__doc__}\n{parser.format_help()}\nThe flags of mace_run_train:\n")
    known, others = parser.parse_known_args(words)
    settings = vars(known)
    if "charges" in settings:
        charges = dict(known.charges)
        if "predicted" in charges and len(known.charges) > 1:
            parser.error("--charges must be a charge for each element, as Na=1 Cl=-1, or predicted alone")
        settings["charges"] = "predicted" if "predicted" in charges else charges
    return settings, others


def has_long_range(model: Any) -> bool:
    return model is not None and any(".long_range." in name for name in model.state_dict())


def described(model: Any, source: str) -> str:
    """One line about the long range of a model, whose scales come from ``source``."""
    layer = model.long_range
    if layer is None:
        layers = {n: x.long_range for n, x in enumerate(model.products) if hasattr(x, "long_range")}
        attention = next(iter(layers.values())).attention
        gaussians, coulomb, _ = attention.counts
        return (
            f"long range: attention after blocks {', '.join(map(str, layers))} ({gaussians} Gaussian and {coulomb} "
            f"Coulomb kernels, {source}), widths {attention.width:g} to {attention.max_width:g} A"
        )
    if isinstance(layer, PredictedChargeInteraction):
        return (
            f"long range: predicted charges ({source}), width {layer.width:g} A; the loss adds "
            f"{SHARED_CHARGE_WEIGHT:g} times the mean square of the shared charge"
        )
    scale = float(layer.scale)
    each = zip(layer.names, (scale * layer.constants).tolist(), strict=True)
    charges = ", ".join(f"{name} {charge:+.3g}" for name, charge in each if charge == charge)
    return f"long range: charges {charges} (scale {scale:.4g}, {source}), width {layer.width:g} A"


def train_with_charges(model: Any, loss_fn: Any, swa: Any = None, **options: Any) -> Any:
    """MACE's ``train``, whose loss has the shared charge of models that predict charges."""
    if isinstance(getattr(model, "long_range", None), PredictedChargeInteraction):
        loss_fn = ChargeLoss(loss_fn, total_charge=SHARED_CHARGE_WEIGHT)
        if swa is not None:
            swa.loss_fn = ChargeLoss(swa.loss_fn, total_charge=SHARED_CHARGE_WEIGHT)
    return train(model=model, loss_fn=loss_fn, swa=swa, **options)


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
        tuned = has_long_range(model_foundation)
        base = without_long_range(model_foundation) if tuned else model_foundation
        if not tuned and not settings:
            return build(args, train_loader, atomic_energies, base, heads, z_table, head_configs)
        if args.lora or args.enable_cueq or args.enable_oeq or (args.freeze or 0) >= 6:
            raise SystemExit(
                "long range does not go with --lora and --freeze 6 or 7, which freeze it, nor --enable_cueq, "
                "--enable_oeq"
            )
        if tuned and settings:
            raise SystemExit(
                f"{args.foundation_model} has long range, which is kept: leave out {', '.join(settings)}, or "
                "fine-tune a model without long range"
            )
        refuse_unread_charges(head_configs)
        model, outputs = build(args, train_loader, atomic_energies, base, heads, z_table, head_configs)
        if tuned:
            model, source = copy_long_range(model_foundation, model), f"kept from {args.foundation_model}"
        else:
            told = None
            if settings.get("charges") == "predicted":
                frames = map(train_loader.dataset.__getitem__, range(len(train_loader.dataset)))
                told = next(filter(can_predict_charges, frames), None)
                if told is None:
                    logging.info(NOTHING_SAID)
                    return model, outputs
            batches = list(itertools.islice(train_loader, BATCHES))
            if told is not None and not can_predict_charges(batches):
                batches.append(told)
            model = add_long_range(model, batch=batches, **settings)
            source = f"from {sum(len(batch.ptr) - 1 for batch in batches)} frames"
        logging.info(described(model, source))
        return model, outputs

    run_train.configure_model, run_train.tools.train = configure_model, train_with_charges
    run_train.remove_pt_head = lambda model, head: (select_head if has_long_range(model) else remove_head)(model, head)
    run_train.main()
