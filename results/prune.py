"""Leave out of results folders the probe values that no claim and no figure reads: ``python results/prune.py DIR ...``.

A probe of every tensor has most of the values.  Read are those of the first MLP layer and of the key projection of
each block, the embedding's gradient, and in models without blocks the sizes of the last norm's gain and of the head;
``eps_ratio`` follows from ``grad_rms`` and the config.  Alarms are scored on the largest value of a step, so a folder
of labelled spikes keeps that as well.  Nobody reads entropies of attention or the size of output logits.  Of cosines
those of all weights are read, and where there are any, the updates of every tensor.  Of distances from the initial
values those of the embedding's tables are read.
"""

import sys
from pathlib import Path

from lab.analysis.events.scores import score_runs
from lab.analysis.probe_values import DISTANCE
from lab.core import files
from lab.records import store
from lab.records.parts import written

OF_EVERY_TENSOR, READ = ["grad_rms", "update_rms", "param_rms", "eps_ratio"], (".mlp_up", ".attention.key")
UNREAD = ["attention_entropy", "output_logit_rms"]
COSINES, OF_UPDATES = ["update_descent_cosine", "grad_lag_cosine"], ["update_rms", "update_large"]


def prune(folder: Path) -> None:
    """Gather the runs of a folder, and write the newest part of its metrics without the values that nobody reads."""
    runs, *_ = store.gather(folder)
    path = written(folder)[-1].metrics
    metrics = files.read_table(path)
    is_read = ~metrics["probe"].isin(OF_EVERY_TENSOR) | metrics["where"].str.endswith(READ)
    is_read |= (metrics["probe"] == "grad_rms") & (metrics["where"] == "embedding")
    if (runs["model.depth"] == 0).all():
        is_read |= (metrics["probe"] == "param_rms") & metrics["where"].isin(["final_norm", "head"])
    is_read &= ~metrics["probe"].isin([*UNREAD, "eps_ratio"])
    is_read &= (metrics["probe"] != DISTANCE) | metrics["where"].str.startswith("embedding")
    if metrics["probe"].isin(COSINES).any():
        is_read |= metrics["probe"].isin(OF_UPDATES)
        is_read &= ~metrics["probe"].isin(COSINES) | (metrics["where"] == "")
    if len(score_runs(store.Records(runs[runs["id"].isin(metrics["id"])], metrics))):
        ordered = metrics.sort_values("value", kind="stable", na_position="last")
        is_read |= ~ordered.duplicated(["id", "step", "probe"], keep="last").sort_index()
    store.write_metrics(path, metrics[is_read])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        prune(Path(name))
