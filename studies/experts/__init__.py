"""Mixtures of experts: routers that collapse or whose logits grow, and what balances and bounds them."""

FIRST_FIGURES = ("routers", "experts_by_arm")
