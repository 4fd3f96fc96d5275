"""nGPT: a Transformer whose hidden states, embeddings and matrices stay on the unit sphere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from lab.core.hooks import Act, HookIntervention, HookPoint, WeightIntervention
from lab.core.registry import INTERVENTIONS
from lab.interventions.attention import UnitQueriesAndKeys, unit
from lab.model.config import ModelConfig
from lab.model.layers import Scale

# Of each matrix the axis of the model width, along which its vectors keep unit norm.
WIDTH_AXES = {
    **dict.fromkeys(("embedding", ".attention.output", ".mlp_down"), -1),
    **dict.fromkeys((".attention.query", ".attention.key", ".attention.value", ".mlp_up", "head"), -2),
}


@INTERVENTIONS.register("ngpt")
@dataclass(frozen=True)
class NGPT(HookIntervention, WeightIntervention):
    """The normalized Transformer (Loshchilov et al. 2024, arXiv:2410.01131, sec. 2).

    After each update the vectors of model width in all matrices have unit norm.  A branch moves the hidden state along
    the sphere: ``h <- n(h + alpha (n(branch(h)) - h))``, where n divides by the norm and alpha is learned per channel,
    0.05 at first.  Queries and keys are as in ``qk_l2norm``; the MLP's hidden layer and the logits have learned
    gains.  Train it without weight decay, which the next normalization undoes.
    """

    normalizes_queries_and_keys: ClassVar = True
    hook_points: ClassVar = {
        **{"norm": Act.REPLACE, "rotation": Act.REPLACE, "residual": Act.REPLACE},
        **{"embedding": Act.NORMALIZE, "mlp_up": Act.SCALE, "logits": Act.SCALE},
    }
    excludes: ClassVar = (
        *("rmsnorm", "norm_without_gain", "dyt", "ln_scaling", "peri_ln", "reordered_norm", "sub_ln", "qkv_norm"),
        *("post_layernorm", "deepnorm", "normformer", "qk_layernorm", "qk_layernorm_model", "qk_rmsnorm", "qk_l2norm"),
        *("split_qk_scaling", "late_qk_scaling", "pb_relax", "learned_positions", "nope", "tied_head"),
        *("embedding_layernorm", "embedding_rmsnorm", "embedding_scale", "head_init", "layerscale", "rezero"),
        "zero_init_projections",
    )

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module | None:
        stored, root = config.width**-0.5, config.width**0.5
        modules: dict[str, Callable[[], nn.Module]] = {
            "norm": Unit,
            "embedding": Unit,
            "rotation": lambda: UnitQueriesAndKeys(runs, config),
            "residual": lambda: OnTheSphere(runs, config.width),
            "mlp_up": lambda: Scale(runs, (point.size,), root),
            "logits": lambda: Scale(runs, (point.size,), 1.0, stored),
        }
        return modules[point.kind]()

    def after_update(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            for ending, axis in WIDTH_AXES.items():
                if name.endswith(ending):
                    weight.copy_(F.normalize(weight, dim=axis))


class Unit(nn.Module):
    """Divides by the norm over the last axis."""

    def forward(self, x_r: Tensor) -> Tensor:
        return unit(x_r)


class OnTheSphere(Scale):
    """``n(h + |alpha| (n(branch(h)) - h))``, where ``norm`` is the division by the norm."""

    def __init__(self, runs: int, width: int) -> None:
        super().__init__(runs, (width,), 0.05, stored=width**-0.5)

    def forward(  # type: ignore[override]
        self, h_rbtd: Tensor, branch: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]
    ) -> Tensor:
        alpha = self.factor(h_rbtd).abs()
        return norm(h_rbtd + alpha * (norm(branch(h_rbtd)) - h_rbtd))
