"""Architectures and recipes of published models: where blocks normalize, embeddings, positions, biases."""

FIRST_FIGURES = ("embedding_gradient", "distance_from_init")
