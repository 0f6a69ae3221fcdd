"""mace_run_train with long range: MACE's own command and all its flags, with charges or Ewald attention in the model.

    python mace_run_train.py --name far --train_file train.xyz --valid_fraction 0.1 --E0s average --charges Na=1 Cl=-1

The model may come from flags, be a foundation model, or be a far.model that is fine-tuned with the long range it has
(--foundation_model far.model). far.model is run by MACECalculator, and by mace_eval_configs if all frames are neutral.
Total charges of ions are read from ``info["total_charge"]`` of each frame, or from the key that --total_charge_key
names.
"""

import argparse
import itertools
import sys

import ase.io
from mace.cli import run_train
from mace.tools.scripts_utils import check_path_ase_read
from tg_equiattn.integrations.mace import add_long_range, copy_long_range, select_head, without_long_range

build, remove_head = run_train.configure_model, run_train.remove_pt_head


BATCHES = 8  # of the training data, to which a model with charges is fitted before training


def charge(word):
    name, number = word.split("=")
    return name, float(number)


def long_range_flags(words):
    """The arguments of add_long_range among the words of a command line, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--charges", nargs="+", type=charge, help="of each element, as Na=1, in place of attention")
    parser.add_argument("--learn", choices=["scale"], help="find a common factor of the charges from forces")
    parser.add_argument("--dielectric", type=float, help="electronic dielectric constant of the data, for charges")
    parser.add_argument("--after", nargs="+", type=int, help="product blocks, from 0 on, that attention follows")
    for name in ("num_gaussians", "num_coulomb"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("width", "max_width", "gain"):
        parser.add_argument(f"--{name}", type=float)
    found, others = parser.parse_known_args(words)
    settings = vars(found)
    return settings | ({"charges": dict(found.charges)} if "charges" in settings else {}), others


def is_far(model):
    return model is not None and any(".long_range." in name for name in model.state_dict())


def refuse_unread_charges(head_configs):
    """Charges that files have and MACE would not read would be lost without a word."""
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


def main(words):
    settings, others = long_range_flags(words)

    def configure_model(args, train_loader, atomic_energies, model_foundation, heads, z_table, head_configs):
        if args.lora or args.enable_cueq or args.enable_oeq or (args.freeze or 0) >= 6:
            raise SystemExit(
                "long range does not go with --lora and --freeze 6 or 7, which freeze it, nor --enable_cueq, "
                "--enable_oeq"
            )
        refuse_unread_charges(head_configs)
        tuned = is_far(model_foundation)
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
    run_train.remove_pt_head = lambda model, head: (select_head if is_far(model) else remove_head)(model, head)
    sys.argv[1:] = others
    run_train.main()


if __name__ == "__main__":
    main(sys.argv[1:])
