"""Where fp32 loses at learning rate 1 in the sweep ``rounded_logits``: ``python results/loss_by_target.py``.

Trains five of its arms anew on seeds 0 to 2, about five minutes on one core, and prints the loss of targets by how
often they occur in the held-out text: of the 128 most frequent tokens and of the other 128; means with 95 % intervals.
"""

import torch
from torch.nn.functional import cross_entropy

from lab.analysis.statistics import student_t
from lab.sweeping.launch import compose_points
from lab.training.config import run_config
from lab.training.fleet import Fleet
from lab.training.loop import train

SHARED = ["data=synthetic", "model=d64", "model.depth=0", "steps=8000", "batch_size=2", "seq_len=32", "precision=fp32"]
NO_DECAY = "optimizer.weight_decay=0"
ARMS = {
    "learning rate 0.1": f"intervention=[fixed_gains] {NO_DECAY} optimizer.lr=1e-1",
    "learning rate 1": f"intervention=[fixed_gains] {NO_DECAY} optimizer.lr=1",
    "with z-loss": f"arm=with_z_loss {NO_DECAY} optimizer.lr=1",
    "with decay": "intervention=[fixed_gains] arm=total_decay_10 optimizer.lr=1",
    "with a centred head": f"arm=with_mu_centering {NO_DECAY} optimizer.lr=1",
}
FREQUENT = 128


def losses_by_target(fleet: Fleet) -> tuple[list[float], list[float]]:
    """Loss of each run on frequent and on rare targets, nats per token."""
    windows_nt = fleet.held_out_nt
    target_n = windows_nt[:, 1:].flatten()
    rank_v = target_n.bincount(minlength=256).argsort(descending=True).argsort()
    is_rare_n = rank_v[target_n] >= FREQUENT
    with torch.no_grad():
        logits_rbtv, _ = fleet.model(windows_nt.expand(fleet.runs, -1, -1)[..., :-1])
    by_run = [cross_entropy(logits_btv.flatten(0, 1), target_n, reduction="none") for logits_btv in logits_rbtv]
    return [float(n[~is_rare_n].mean()) for n in by_run], [float(n[is_rare_n].mean()) for n in by_run]


if __name__ == "__main__":
    for name, words in ARMS.items():
        fleet = Fleet(
            [run_config(tree) for tree in compose_points([*SHARED, *words.split(), "probes.names=[]", "seed=0,1,2"])]
        )
        for _ in train(fleet):
            pass
        frequent, rare = losses_by_target(fleet)
        print(f"{name}: frequent targets {student_t(frequent)}, rare targets {student_t(rare)}", flush=True)
