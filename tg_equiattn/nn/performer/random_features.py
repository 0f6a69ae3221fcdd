"""The directions of random features as a module: drawn from a seed, redrawn by the step, kept in the checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.performer.random_features import orthogonal_projection
from ...modes import ordinary_tensors


def _draw(seed: int, number: int, like: Tensor) -> Tensor:
    """Draw ``number`` of a seed: the same on every machine and rank."""
    generator = torch.Generator("cpu").manual_seed((seed * 1_000_003 + number) % 2**63)
    return orthogonal_projection(like.shape[0], like.shape[1], generator).to(like)


@torch.library.custom_op("tg_equiattn::redraw_when_due", mutates_args=("projection", "clock"))
def _redraw_when_due(projection: Tensor, clock: Tensor, seed: Tensor, interval: int) -> None:
    """Count a training step in a compiled graph; at every interval, draw again in place."""
    clock[0] += 1
    if int(clock[0]) > interval:
        clock[0] = 1
        clock[1] += 1
        projection.copy_(_draw(int(seed), int(clock[1]), projection))


class RandomFeatures(nn.Module):
    r"""Directions :math:`W`, ``(num_features, dim)``, orthogonal in blocks. Each draw is a function of a seed and its
    number alone, both in the checkpoint: ranks that start alike draw alike, and none is drawn by steps in eval."""

    projection: Tensor
    seed: Tensor

    def __init__(self, num_features: int, dim: int, redraw_interval: int | None = None) -> None:
        super().__init__()
        checks.positive(num_features=num_features)
        if redraw_interval is not None:
            checks.positive(redraw_interval=redraw_interval)
        self.redraw_interval = redraw_interval
        self.register_buffer("projection", torch.empty(num_features, dim))
        self.register_buffer("seed", torch.randint(2**40, ()))
        self._clock = torch.zeros(2, dtype=torch.int64, device="cpu")  # steps since the last draw, number of the draw
        if self.projection.device.type != "meta":
            self.projection.copy_(_draw(int(self.seed), 0, self.projection))

    @torch.no_grad()
    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new directions: the seed's next ones, or from a CPU ``generator`` (give every rank an equal one)."""
        self._clock = self._clock + torch.tensor([0, 1], device="cpu")
        self._clock[0] = 0
        if generator is None:
            self.projection = _draw(int(self.seed), int(self._clock[1]), self.projection)
        else:
            m, d = self.projection.shape
            self.projection = orthogonal_projection(m, d, generator).to(self.projection)

    def reset_parameters(self) -> None:
        """Take a new seed from torch's generator, its first directions, and start counting steps again."""
        self.seed = torch.randint_like(self.seed, 2**40)
        self._clock = torch.zeros_like(self._clock)
        self.projection = _draw(int(self.seed), 0, self.projection)

    def forward(self) -> Tensor:
        if self.training and self.redraw_interval is not None:
            if torch.compiler.is_compiling():
                _redraw_when_due(self.projection, self._clock, self.seed, self.redraw_interval)
            elif torch._C._current_graph_task_id() == -1:  # not a checkpointed pass repeated in backward
                self._count_step(self.redraw_interval)
        return self.projection

    def _count_step(self, interval: int) -> None:
        with ordinary_tensors():
            if int(self._clock[0]) >= interval:
                for name, buffer in (("projection", self.projection), ("seed", self.seed)):
                    if torch._C._functorch.is_functorch_wrapped_tensor(buffer):
                        raise RuntimeError(
                            f"random features cannot be redrawn while a transform of torch.func goes through {name}: "
                            "call eval(), or leave redraw_interval at None and call redraw_features() outside"
                        )
                self.redraw_features()
            self._clock[0] += 1

    def get_extra_state(self) -> Tensor:
        return self._clock.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self._clock = state.to("cpu", torch.int64).clone()
