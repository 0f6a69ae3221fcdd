"""Networks on tokens of scalars and vectors: Clifford MLPs, vector self-attention, what surrounds an operator."""
