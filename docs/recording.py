"""Train a tiny Transformer with a recorder: ``python docs/recording.py [fault]``.

Until it spikes: keeps the steps around two of its spikes in docs/recording.jsonl, draws them into docs/recording.svg,
and prints what ``lab watch`` says of them. With ``fault``: plants one at a sound learning rate, and writes what is said
of it and its panel into the page. Targets are letters at random, each followed by the echo of the one
three before it, on which tiny models spike by themselves at a learning rate that is too high.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import lab
from lab.analysis.rendering import layout, style
from labwatch.recordings.recording import Recording, read_recording
from labwatch.recordings.words import report
from labwatch.watch.pages import finding_figure

HOME = Path(__file__).parents[1]
LETTERS, DISTANCE, WIDTH, BLOCKS, HEADS = 16, 3, 32, 3, 2
STEPS, EVERY, WARM_UP, LR, SEED = 1500, 5, 100, 1e-2, 0
SHOWN = {
    "update_ratio": "update over\nweights",
    "moment_ratio": "gradient over\nsecond moment",
    "block_rms": "RMS of the\nresidual stream",
}
PAGE, MARKS = HOME / "docs" / "record_your_run.md", ("<!-- planted fault -->", "<!-- end of planted fault -->")
FAULT_STEPS, FAULT_AT, FAULT_LR, FACTOR = 200, 150, 1e-3, 30
KEPT, FIRST, LAST = 1000, 1040, 1300  # the steps that are kept and shown


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        x = x + self.out(F.scaled_dot_product_attention(*qkv.unbind(2), is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(2 * LETTERS, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2 * LETTERS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(out: Path, steps: int = STEPS, lr: float = LR, fault_at: int | None = None) -> None:
    """Train, and if there is to be a fault, make one matrix of the second block 30 times as large at its step."""
    torch.manual_seed(SEED)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.5, 0.99), weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARM_UP))
    recorder = lab.record(model, optimizer, every=EVERY, out=out)
    for step in range(steps):
        if step == fault_at:
            with torch.no_grad():
                model.blocks[1].mlp[2].weight.mul_(FACTOR)
        letters = torch.randint(LETTERS, (8, 17 + DISTANCE))
        tokens = torch.stack([letters[:, DISTANCE:], LETTERS + letters[:, :-DISTANCE]], -1).flatten(1)[:, :33]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recorder.step(loss)
    recorder.close()


def draw(recording: Recording, losses: dict[int, float]) -> Figure:
    """The loss at each step, and three quantities of each block where they were recorded."""
    figure = Figure(figsize=(7.2, 6.2), layout="constrained")
    panels = figure.subplots(len(SHOWN) + 1, 1, sharex=True)
    shown = {step: loss for step, loss in losses.items() if FIRST <= step <= LAST}
    panels[0].plot(list(shown), list(shown.values()), color="0.3", linewidth=1)
    panels[0].set_ylabel("loss,\nnats/token")
    rows = (recording.step_m >= FIRST) & (recording.step_m <= LAST)
    for panel, (name, label) in zip(panels[1:], SHOWN.items(), strict=True):
        for block, colour in enumerate(style.ARM_COLOURS[:BLOCKS]):
            values = recording.columns[name, f"block{block}"][rows]
            panel.plot(recording.step_m[rows], values, color=colour, marker=".", markersize=4, linewidth=1)
        panel.set(ylabel=label, yscale="log")
    for block, colour in enumerate(style.ARM_COLOURS[:BLOCKS]):
        panels[0].plot([], [], color=colour, marker=".", label=f"block{block}")
    panels[0].legend(loc="upper center", ncols=BLOCKS, frameon=False)
    panels[-1].set_xlabel("step")
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels(panels)
    return figure


def plant() -> None:
    """Plant a fault, and write what is said of it into the page, with its panel."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "probes.jsonl"
        train(out, FAULT_STEPS, FAULT_LR, FAULT_AT)
        said = report(out, {})
    (line, _), *_ = said.found
    drawing = finding_figure(said.recording, said.findings[0])
    (HOME / "docs" / "planted_fault.svg").write_text(layout.svg(drawing, "fault"), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    words = fill(line, 120, break_long_words=False, break_on_hyphens=False)
    told = f"{MARKS[0]}\n```text\n{words}\n```\n{MARKS[1]}"
    PAGE.write_text(f"{before}{told}{rest.partition(MARKS[1])[2]}", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["fault"]:
        sys.exit(plant())
    kept = HOME / "docs" / "recording.jsonl"
    with TemporaryDirectory() as folder:
        out = Path(folder) / "probes.jsonl"
        train(out)
        header, *lines = out.read_text(encoding="utf-8").splitlines()
    rows = {json.loads(line)["step"]: line for line in lines}
    lines = [line for step, line in rows.items() if KEPT <= step <= LAST]
    kept.write_text("\n".join([header, *lines, ""]), encoding="utf-8")
    lab.main(["watch", str(kept)])
    with matplotlib.rc_context({"svg.hashsalt": "recording", "font.size": 9}):
        drawing = draw(read_recording(kept), {step: json.loads(line)["loss"] for step, line in rows.items()})
        drawing.savefig(HOME / "docs" / "recording.svg", metadata={"Date": None})
