"""Wortsman et al. 2023, Small-scale proxies for large-scale Transformer training instabilities (arXiv:2309.14322)."""

FIRST_FIGURES = (
    "logit_rounding",
    "learning_rate_sensitivity",
    "loss_by_arm",
    "best_loss_with_size",
    "loss_against_setting",
    "loss_over_steps",
)
