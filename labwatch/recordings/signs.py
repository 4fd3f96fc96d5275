"""Signs in a recording that something is wrong: each means so by itself, and no healthy loop shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from labwatch.recordings import signs_of_code, signs_of_columns, signs_of_parts, signs_of_rewards, signs_of_settings
from labwatch.recordings.readings import Readings, Sign, quantities

# A policy has other samples if in three rows its surprisal at them, less its entropy, is off from what it was by so
# many nats, and other weights of them if their mean over their RMS is by so much; in fewer rows, at the end, by more,
# since 512 tokens may be off by 0.1. Weights are larger if the logarithm of their RMS is so far above all before.
OF_SAMPLES = {"excess_surprisal": 0.2, "sample_weight": 0.3, "sample_weight_rms": 1.1}
# The optimizer is another one if in three rows the signs of updates agree by so much more or less with gradients.
OTHER_SIGNS = 0.3

Check = Callable[[Readings], Iterator[Sign]]
# By what is checked: how, and the column of which it takes some rows.
CHECKS: dict[str, tuple[Check, str]] = {
    "settings of the optimizer": (signs_of_settings.changed_settings, "lr"),
    "finite numbers": (signs_of_parts.not_finite, "param_rms"),
    "loss scale": (signs_of_columns.lost_scale, "loss_scale"),
    "clipping under a loss scale": (signs_of_columns.scaled_clipping, "loss_scale"),
    "initial weights": (signs_of_parts.unlike_weights, "param_rms"),
    "initial values": (signs_of_parts.unusual_initial_values, "label_loss"),
    "residuals of all blocks": (signs_of_code.lacks_residual, "block_rms"),
    "labels that attention sees": (signs_of_parts.sees_labels, "attention_ahead"),
    "probabilities for logits": (signs_of_parts.probabilities, "in_evaluation"),
    "sizes of updates": (signs_of_parts.unusual_updates, "update_ratio"),
    "updates against gradients": (signs_of_parts.updates_apart, "update_ratio"),
    "weights that others write": (signs_of_parts.written_weights, "lr"),
    "weights that no optimizer has": (signs_of_parts.left_out, "param_rms"),
    "digits of weights": (signs_of_parts.rounded_weights, "weights_rounded"),
    "updates that rounding loses": (signs_of_parts.rounded_updates, "updates_lost"),
    "functions that are called": (signs_of_code.other_functions, "block_rms"),
    "arguments of the model": (signs_of_code.other_arguments, "in_evaluation"),
    "buffers that are constant": (signs_of_code.written_buffers, "in_evaluation"),
    "weights of tokens in the loss": (signs_of_columns.other_token_weights, "loss_weight"),
    "steps of the optimizer": (signs_of_parts.lost_counts, "state_updates"),
    "gradients that are missing": (signs_of_parts.lost_gradients, "grad_rms"),
    "updates that are zero": (signs_of_parts.lost_updates, "update_ratio"),
    "weights against updates": (signs_of_parts.weights_beyond_updates, "param_rms"),
    "weights that shrink": (signs_of_parts.shrinking_weights, "param_rms"),
    "weights behind updates": (signs_of_parts.weights_behind_updates, "change_over_updates"),
    "output against other blocks": (signs_of_parts.outputs_apart, "block_rms"),
    "logits against other blocks": (signs_of_parts.logits_apart, "attention_logit_max"),
    "gradients against the next part": (signs_of_parts.gradients_apart, "grad_rms"),
    "zero gradients": (signs_of_parts.zero_gradients, "grad_rms"),
    "silent blocks": (signs_of_parts.silent, "block_rms"),
    "frozen parts": (signs_of_parts.frozen, "grad_rms"),
    "KL divergence": (signs_of_rewards.leaves_reference, "kl"),
    "the same batch": (signs_of_columns.same_batch, "in_evaluation"),
    "repeated batches": (signs_of_columns.repeated_batches, "loss"),
    "falls of the loss": (signs_of_columns.falls_at_once, "loss"),
    "signs of updates": (
        partial(signs_of_rewards.leaves_range, name="update_signs", least=OTHER_SIGNS),
        "update_signs",
    ),
    "falls of the reward": (signs_of_rewards.lower_reward, "reward"),
    **{
        quantities()[name]["name"]: (partial(signs_of_rewards.leaves_range, name=name, least=least), name)
        for name, least in OF_SAMPLES.items()
    },
    **{
        known["name"]: (
            partial(signs_of_columns.no_longer_constant if "constant" in known else signs_of_columns.moved, name=name),
            name,
        )
        for name, known in quantities().items()
        if known.keys() & {"alarm", "level", "constant", "stays_above"}
    },
}
