"""The public names, by the module that exports them, and the files of the library."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = [path for folder in ("tg_equiattn", "integrations") for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def nodes(path):
    """The syntax tree of a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))


PUBLIC = {
    "groups": "FiniteGroup cyclic dihedral dyadic from_generators icosahedral mirror octahedral trivial",
    "grids": "Window PixelGrid",
    "graphs": "NeighborList mean_edge_length neighbor_list",
    "testing": "act dilation_errors equivariance_error off_lattice_errors",
    "functional": "Coulomb Gaussian Kernel charge_energies",
    "nn": "ChargeInteraction "
    "CliffordMLP EwaldAttention FrameTransformer FrameTransformerBlock GEViT GlobalGroupAttention GlobalPooling "
    "GroupAttention GroupAttentionBlock "
    "GroupLinear GroupTransformer LiftingAttention PerformerAttention PredictedChargeInteraction "
    "RegularGlobalNorm RegularLayerNorm RelativePerformer SE3Hyena "
    "SE3HyenaOperator ScaleGroupAttention ScaleLiftingAttention VectorSelfAttention no_weight_decay",
    "integrations.escnn": "MaskedSequential R2AttentionBlock R2FrameTransformer R2GlobalAttention R2GroupAttention "
    "R2LiftingAttention R2RegularLayerNorm R2TransformerBlock R3AttentionBlock R3FrameTransformer R3GlobalAttention "
    "R3GroupAttention R3LiftingAttention R3RegularLayerNorm R3TransformerBlock "
    "between_fields group_from_gspace to_standard_torch",
    "integrations.pyg": "EwaldAttention PeriodicRadiusGraph PixelGraph RelativeGPSBlock RelativePerformerConv "
    "ewald_settings",
    "integrations.e3nn": "IrrepsChargeInteraction IrrepsPredictedChargeInteraction "
    "IrrepsEwaldAttention IrrepsSE3Hyena IrrepsSE3HyenaOperator IrrepsVectorSelfAttention "
    "LongTensorProduct TensorProductHyenaOperator",
    "integrations.mace": "ChargeLoss LongRangeCalculator add_long_range can_predict_charges copy_long_range "
    "load_example select_head without_long_range write_lammps",
    "integrations.nequip": "FitCharges LongRange LongRangeCharges LongRangeNequIPGNNModel write_lammps",
    "integrations.lammps": "run_lammps",
}
PUBLIC = {place: names.split() for place, names in PUBLIC.items()}
