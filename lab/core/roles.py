"""Roles of weights, by which parametrizations scale them, links choose them, and optimizers may have numbers."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The role of a weight in the model; every weight has exactly one.

    ``matrix`` and ``query`` are the matrices of the blocks; learned positions count as ``embedding``.
    """

    EMBEDDING = "embedding"
    MATRIX = "matrix"
    QUERY = "query"
    HEAD = "head"
    GAIN = "gain"
    BIAS = "bias"


MATRICES = (Role.MATRIX, Role.QUERY)
LINEAR = (*MATRICES, Role.HEAD)
# Roles for which an optimizer may have numbers of their own: queries are matrices like the others.
TUNABLE_ROLES = tuple(role for role in Role if role is not Role.QUERY)


def numbered_as(role: str) -> str:
    """The role whose numbers a weight takes."""
    return Role.MATRIX if role == Role.QUERY else role
