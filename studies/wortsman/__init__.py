"""Wortsman et al. 2023, Small-scale proxies for large-scale Transformer training instabilities (arXiv:2309.14322)."""

FIRST_FIGURES = ("logit_rounding",)
