"""Networks on tokens of scalars and vectors: Clifford MLPs, vector self-attention, and models of operators."""
