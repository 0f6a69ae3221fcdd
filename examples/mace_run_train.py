"""mace_run_train with long range: MACE's own command and all its flags, with Ewald attention in the model it builds.

    python mace_run_train.py --name far --train_file train.xyz --valid_fraction 0.1 --E0s average ...

The model may come from flags or be a foundation model; far.model is run by MACECalculator and mace_eval_configs.
"""

from mace.cli import run_train
from tg_equiattn.integrations.mace import add_long_range

build = run_train.configure_model


def configure_model(args, train_loader, *more, **options):
    if args.lora or args.enable_cueq or args.enable_oeq or (args.freeze or 0) >= 6:
        raise SystemExit(
            "long range does not go with --lora and --freeze 6 or 7, which freeze it, nor --enable_cueq, --enable_oeq"
        )
    model, outputs = build(args, train_loader, *more, **options)
    return add_long_range(model, after=(0,), batch=next(iter(train_loader))), outputs


if __name__ == "__main__":
    run_train.configure_model = configure_model
    run_train.main()
