"""What records of runs that were imported from a table say beyond those of runs of the lab."""

from __future__ import annotations

from lab.records.store import Records

PER_BYTE = "losses are nats per byte"
UNKNOWN_SIZE = 1  # of models whose size a table does not say
ORIGIN = "imported from"
AXIS = "axis"  # the setting that holds the key of the one along which curves run, where that is no learning rate
DERIVED = "derived"  # the group of keys of numbers that follow from the settings, as far as a table can tell
TRIAL = "trial"  # the group of keys that say of a trial its place, whether it was kept, and what it changed
SINGLE_CHANGE = "single_change"  # the group of keys that say what a run changes of its base, and which run that is
FOLLOWED = "follows"  # holds the numbers that are no settings since they follow from others, and from which
COLUMN = "column."  # before the key of such a setting


def followed(records: Records) -> list[str]:
    """The numbers of a table that are no settings since they follow from others, ``steps (from tokens and batch)``."""
    if FOLLOWED not in records.runs:
        return []
    texts = records.runs[FOLLOWED].dropna().unique()
    return list(dict.fromkeys(text for of_table in texts for text in str(of_table).split("; ")))


def is_imported(records: Records) -> bool:
    """Whether all runs come from tables, and so have no probes."""
    return bool(records.runs["versions"].fillna("").str.startswith(ORIGIN).all())


def size_name(records: Records) -> str:
    """The quantity that sizes are.

    Nobody knows which parameters a table of other runs counts, nor which of a custom model's are embeddings.
    """
    if is_imported(records):
        return "model size"
    custom = records.runs.reindex(columns=["custom_model"])["custom_model"].notna()
    if custom.all():
        return "parameters with embeddings"
    return f"parameters without embeddings{' (with them in custom models)' * bool(custom.any())}"
