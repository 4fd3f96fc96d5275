"""Signs in a recording that something is wrong: each means so by itself, and no healthy loop shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from labwatch.recordings.readings import Readings, Sign, quantities
from labwatch.recordings.signs_of_code import lacks_residual, other_arguments, other_functions, written_buffers
from labwatch.recordings.signs_of_columns import (
    falls_at_once,
    lost_scale,
    moved,
    no_longer_constant,
    other_token_weights,
    repeated_batches,
    same_batch,
    scaled_clipping,
)
from labwatch.recordings.signs_of_parts import (
    frozen,
    gradients_apart,
    left_out,
    logits_apart,
    lost_counts,
    lost_gradients,
    lost_updates,
    not_finite,
    outputs_apart,
    probabilities,
    rounded_updates,
    rounded_weights,
    sees_labels,
    shrinking_weights,
    silent,
    unlike_weights,
    unusual_initial_values,
    unusual_updates,
    updates_apart,
    weights_behind_updates,
    weights_beyond_updates,
    written_weights,
    zero_gradients,
)
from labwatch.recordings.signs_of_rewards import leaves_range, leaves_reference, lower_reward
from labwatch.recordings.signs_of_settings import changed_settings

# A policy has other samples if in three rows its surprisal at them, less its entropy, is off from what it was by so
# many nats, and other weights of them if their mean over their RMS is by so much; in fewer rows, at the end, by more,
# since 512 tokens may be off by 0.1. Weights are larger if the logarithm of their RMS is so far above all before.
OF_SAMPLES = {"excess_surprisal": 0.2, "sample_weight": 0.3, "sample_weight_rms": 1.1}
# The optimizer is another one if in three rows the signs of updates agree by so much more or less with gradients.
OTHER_SIGNS = 0.3

Check = Callable[[Readings], Iterator[Sign]]
# By what is checked: how, and the column of which it takes some rows.
CHECKS: dict[str, tuple[Check, str]] = {
    "settings of the optimizer": (changed_settings, "lr"),
    "finite numbers": (not_finite, "param_rms"),
    "loss scale": (lost_scale, "loss_scale"),
    "clipping under a loss scale": (scaled_clipping, "loss_scale"),
    "initial weights": (unlike_weights, "param_rms"),
    "initial values": (unusual_initial_values, "label_loss"),
    "residuals of all blocks": (lacks_residual, "block_rms"),
    "labels that attention sees": (sees_labels, "attention_ahead"),
    "probabilities for logits": (probabilities, "in_evaluation"),
    "sizes of updates": (unusual_updates, "update_ratio"),
    "updates against gradients": (updates_apart, "update_ratio"),
    "weights that others write": (written_weights, "lr"),
    "weights that no optimizer has": (left_out, "param_rms"),
    "digits of weights": (rounded_weights, "weights_rounded"),
    "updates that rounding loses": (rounded_updates, "updates_lost"),
    "functions that are called": (other_functions, "block_rms"),
    "arguments of the model": (other_arguments, "in_evaluation"),
    "buffers that are constant": (written_buffers, "in_evaluation"),
    "weights of tokens in the loss": (other_token_weights, "loss_weight"),
    "steps of the optimizer": (lost_counts, "state_updates"),
    "gradients that are missing": (lost_gradients, "grad_rms"),
    "updates that are zero": (lost_updates, "update_ratio"),
    "weights against updates": (weights_beyond_updates, "param_rms"),
    "weights that shrink": (shrinking_weights, "param_rms"),
    "weights behind updates": (weights_behind_updates, "change_over_updates"),
    "output against other blocks": (outputs_apart, "block_rms"),
    "logits against other blocks": (logits_apart, "attention_logit_max"),
    "gradients against the next part": (gradients_apart, "grad_rms"),
    "zero gradients": (zero_gradients, "grad_rms"),
    "silent blocks": (silent, "block_rms"),
    "frozen parts": (frozen, "grad_rms"),
    "KL divergence": (leaves_reference, "kl"),
    "the same batch": (same_batch, "in_evaluation"),
    "repeated batches": (repeated_batches, "loss"),
    "falls of the loss": (falls_at_once, "loss"),
    "signs of updates": (partial(leaves_range, name="update_signs", least=OTHER_SIGNS), "update_signs"),
    "falls of the reward": (lower_reward, "reward"),
    **{
        quantities()[name]["name"]: (partial(leaves_range, name=name, least=least), name)
        for name, least in OF_SAMPLES.items()
    },
    **{
        known["name"]: (partial(no_longer_constant if "constant" in known else moved, name=name), name)
        for name, known in quantities().items()
        if known.keys() & {"alarm", "level", "constant", "stays_above"}
    },
}
