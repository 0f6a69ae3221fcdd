"""What users of irreps call: SE(3)-Hyena and vector self-attention build on it."""

from __future__ import annotations

from e3nn import o3
from torch import Tensor

from tg_equiattn.nn.hyena import GradedNetwork
from tg_equiattn.sequences import Sequences

from .layout import GradeLayout, check_features


class IrrepsModule(GradeLayout):
    """Node features, flat with a sorted batch index, to rows by grade, through the shell of a network, and back."""

    def __init__(self, irreps_in: o3.Irreps, irreps_out: o3.Irreps, module: GradedNetwork, order: str) -> None:
        super().__init__(irreps_in, irreps_out)
        self.module = module
        self.shell = module.shell(order, "irreps_out")

    @property
    def order(self) -> str:
        """Of the nodes along their sequence."""
        return self.shell.order

    def forward(
        self,
        x: Tensor,
        pos: Tensor | None = None,
        batch: Tensor | None = None,
        edge_index: Tensor | None = None,
        edge_attr: Tensor | None = None,
        *,
        order: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
    ) -> Tensor:
        """Evaluate.

        Parameters
        ----------
        x : `torch.Tensor`
            features of shape ``(nodes, irreps_in.dim)``

        pos : `torch.Tensor`, optional
            positions of shape ``(nodes, 3)``; they enter relative to the mean of their graph, as one more 1o. Give
            large coordinates (UTM: 5e6) in float64, whatever the features are: float32 rounds them to 0.5

        batch : `torch.Tensor`, optional
            sorted graph index of each node, of shape ``(nodes,)``; without it all nodes are one graph

        edge_index : `torch.Tensor`, optional
            sources and targets, of shape ``(2, edges)``, with ``local_context=True``

        edge_attr : `torch.Tensor`, optional
            invariant scalars of shape ``(edges, edge_channels)``

        order : `torch.Tensor`, optional
            a permutation of the nodes within each graph, of shape ``(nodes,)``, in place of the module's

        batch_size, max_num_nodes : int, optional
            number of graphs, and a bound of their sizes; read from ``batch`` where not given, which torch.compile
            cannot, and which waits for the device on CUDA

        Returns
        -------
        `torch.Tensor`
            features of shape ``(nodes, irreps_out.dim)``, or ``(batch_size, irreps_out.dim)`` where the module pools
        """
        reference = self.module.reference_parameter
        check_features("x", x, self.features_in, reference)
        sequences = Sequences.from_batch(x, batch, batch_size, max_num_nodes)
        out = self.shell.run(
            self.module, self.to_rows(x), pos, sequences, reference=reference, order=order, edge_index=edge_index,
            edge_attr=edge_attr,
        )  # fmt: skip
        return self.to_features(out)

    def reset_parameters(self) -> None:
        self.module.reset_parameters()
