"""Evaluation on held-out text: all of it before and after training, a fixed slice of it in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from lab.core import distributed
from lab.core.number_formats import Mantissa
from lab.core.schema import leaves
from lab.data.corpus import Corpus, fewer
from lab.model.custom import CustomModel
from lab.model.loss import losses
from lab.model.low_precision import LowPrecision
from lab.model.transformer import Transformer
from lab.training.building import hook_interventions
from lab.training.config import RunConfig

# Both are the same for every fleet, so that a run's bits do not depend on its neighbours.
VALIDATION_TOKENS = 1024  # held-out tokens of an evaluation between start and end
PASS_TOKENS = 2048  # held-out tokens of one pass through the model


class Evaluation:
    """Measures the loss of a fleet's runs on held-out text.

    Args:
        config: of the fleet.
        model: of the fleet; its weights at the time of a call are evaluated.
        corpus: whose held-out text it is.
        device: of the model.
        averages: weights that are evaluated in place of the model's own, by name.
        kept_state: within its block products round, and routers choose, with the state of the fleet.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Transformer | CustomModel,
        corpus: Corpus,
        device: torch.device,
        averages: Callable[[], Mapping[str, Tensor]],
        kept_state: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.config, self.model, self.averages, self.kept_state = config, model, averages, kept_state
        self.seeds: tuple[int, ...] = config.seed  # type: ignore[assignment]  # one of each run
        self.held_out_nt = torch.from_numpy(corpus.validation(config.seq_len, config.validation_targets)).to(device)
        clean = corpus.clean(config.seq_len)
        self.clean_nt = None if clean is None else torch.from_numpy(fewer(clean, VALIDATION_TOKENS)).to(device)

    def models_at_init(self) -> int:
        """How many models the runs are before the first update: one for each seed.

        Every run counts if an intervention brings a number per run into the forward pass, or on several ranks.
        """
        operands = self.model.operands
        rounds_apart = isinstance(operands, Mantissa) or (isinstance(operands, LowPrecision) and operands.is_stateful)
        keeps_apart = rounds_apart or "router_bias" in self.config.intervention
        differ = keeps_apart or any(is_free for *_, is_free in leaves(hook_interventions(self.config)))
        return len(self.seeds if differ or distributed.is_joined() else set(self.seeds))

    def loss_at_init(self) -> Tensor:
        """Return ``loss(whole=True)`` before the first update, with each of ``models_at_init`` evaluated once."""
        if self.models_at_init() == len(self.seeds):
            return self.loss(whole=True)
        first_run = {seed: self.seeds.index(seed) for seed in self.seeds}
        loss = dict(zip(first_run, self.loss(whole=True, indices=list(first_run.values())), strict=True))
        return torch.stack([loss[seed] for seed in self.seeds])

    def slice(self) -> Tensor:
        """The held-out windows ``[n t+1]`` that are evaluated between start and end."""
        return fewer(self.held_out_nt, VALIDATION_TOKENS)

    def loss(self, *, whole: bool, indices: Sequence[int] | None = None) -> Tensor:
        """Evaluate the runs.

        Args:
            whole: on all windows, or else on a fixed slice of them.
            indices: the runs to evaluate; None means all.

        Returns:
            Cross-entropy ``[r]``, nats per token.
        """
        return self._loss(self.held_out_nt if whole else self.slice(), indices)

    def clean_loss(self) -> dict[str, Tensor]:
        """The cross-entropy ``[r]`` on a fixed slice of the clean held-out text, under ""; empty if there is none."""
        return {} if self.clean_nt is None else {"": self._loss(self.clean_nt)}

    @torch.no_grad()
    def _loss(self, windows_nt: Tensor, indices: Sequence[int] | None = None) -> Tensor:
        """The cross-entropy ``[r]`` on windows ``[n t+1]``."""
        length = windows_nt.shape[1] - 1
        model: Callable[[Tensor], tuple[Tensor, Any]] = self.model
        averages = self.averages()
        if indices is not None or averages:
            own = zip(self.model.named_parameters(), self.model.weights(), strict=True)
            evaluated = {parameter: averages.get(name, weight) for (parameter, weight), name in own}
            weights = {name: weight if indices is None else weight[indices] for name, weight in evaluated.items()}
            model = partial(functional_call, self.model, weights)
        runs = len(self.seeds) if indices is None else len(indices)
        total_r = self.config.optimizer.lr.new_zeros(runs)  # in the precision of numbers per run
        with self.kept_state():
            for chunk_bt in torch.split(windows_nt, max(1, PASS_TOKENS // length)):
                tokens_rbt = chunk_bt.expand(runs, -1, -1)
                logits_rbtv, _ = model(tokens_rbt[..., :-1])
                _, loss_r = losses(logits_rbtv, tokens_rbt[..., 1:], {})
                total_r += loss_r * len(chunk_bt)
        return torch.div(total_r, len(windows_nt))
