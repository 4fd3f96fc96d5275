"""A campaign: sweeps one after another, those first that decide most claims an hour; dry runs, resuming, failures."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.cli import campaign, launch, listing, multirun
from lab.cli.compose import Request
from lab.core import shipped
from lab.records import store
from lab.studies.claims import CLAIMS
from lab.sweeping import dry_run
from lab.sweeping.capacity import Host
from lab.sweeping.planner import Point, SweepPlan, points, with_engine
from lab.sweeping.progress import CampaignPart
from small import configs, tree

TINY = "scale=toy data=synthetic model.width=16 model=d32 steps=3 optimizer.lr=1e-2 seed=0 hydra/launcher=basic"
BENCHMARK = Path(__file__).parents[1] / "benchmarks/results.json"


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the only campaign there is, `toy`; the current folder is empty."""
    path = tmp_path / "toy.yaml"
    monkeypatch.setattr(shipped, "campaigns", lambda: {"toy": path})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return path


def describe(path: Path, *parts: str) -> None:
    path.write_text("# What of it?\nparts:\n" + "".join(f"  - {part}\n" for part in parts))


def lab(*words: str) -> int:
    sys.argv = ["lab", *words]
    return main(list(words))


def planned(folder: Path, runs: Sequence[Point], missing: Sequence[Point], slots: int = 2) -> SweepPlan:
    return SweepPlan(folder, "eager", [*runs], [*runs], [*missing], [], Host("cpu", [None] * slots))


@pytest.fixture
def plans(described: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, SweepPlan]:
    """Parts as they are planned, made by hand: three of equal cost, of which `mup` is done, and a dear one."""
    cheap = with_engine(points([tree("steps=100")]), "eager")
    dear = with_engine(points([tree("steps=10000000", f"seed={seed}") for seed in (0, 1)]), "eager")
    plans = {
        "steps": planned(Path("runs/steps"), cheap, cheap),
        "qk_layernorm": planned(Path("runs/qk_layernorm"), cheap, cheap),
        "epsilon": planned(Path("runs/epsilon"), dear, dear[:1]),
        "mup": planned(Path("runs/mup"), cheap, []),
    }
    Path("runs/mup").mkdir(parents=True)
    Path("runs/mup/report.html").write_text("")
    describe(described, *plans)
    monkeypatch.setattr(campaign, "_plan", lambda words: plans[words[0]])
    return plans


def toy(*options: str) -> campaign.Campaign:
    return campaign.read_arguments(["toy", "out=runs", *options])


ORDER = ["mup", "qk_layernorm", "steps", "epsilon"]  # of claims there are more on epsilon than on steps


def test_what_is_done_comes_first_then_most_claims_per_core_hour(plans: dict[str, SweepPlan]) -> None:
    counts = {name: sum(CLAIMS[claim].sweep == name for claim in CLAIMS) for name in plans}
    assert counts["qk_layernorm"] > counts["epsilon"] > counts["steps"] > 0
    parts = campaign.plan(toy())
    assert [part.sweep for part in parts] == ORDER
    hours = dry_run.core_seconds(plans["epsilon"].mine) / 3600
    assert parts[-1].claims_per_core_hour == pytest.approx(counts["epsilon"] / hours)
    Path("runs/mup/report.html").unlink()  # its runs are there, but nobody has seen them
    assert [part.sweep for part in campaign.plan(toy())][-1] == "epsilon"
    assert not any(part.is_done for part in campaign.plan(toy()))


def test_a_dry_run_tells_hours_and_what_each_part_decides(
    plans: dict[str, SweepPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path().rglob("*"))
    assert lab("campaign", "toy", "--dry-run") == 0
    head, *rows, total, note = (re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
    assert head == ["part", "runs", "left", "hours left", "claims", "per core-hour", "figures"]
    assert [row[0] for row in rows] == ORDER
    assert [row[1:3] for row in rows] == [["1", "0"], ["1", "1"], ["1", "1"], ["2", "1"]]
    assert total[:3] == ["in all", "5", "3"]
    hours = dry_run.core_seconds(plans["epsilon"].missing) / 2 / 3600  # two at once
    assert rows[-1][3] == f"{hours:.2f}" != "0.00"
    assert rows[0][3] == "0.00"
    assert int(total[4]) == sum(int(row[4]) for row in rows)
    assert set(rows[-1][6].split(", ")) == {CLAIMS[name].figure for name in CLAIMS if CLAIMS[name].sweep == "epsilon"}
    assert "2 at once" in note[0]
    assert sorted(Path().rglob("*")) == before


@pytest.mark.usefixtures("undrawn", "briefly")
def test_parts_are_trained_as_their_sweeps_and_resumed(
    described: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    describe(described, f"steps {TINY}", f"kappa {TINY} intervention.kappa_transplant.kappa=1,10 model.depth=2")
    assert lab("campaign", "toy", "out=there") == 0
    said = capsys.readouterr().out
    heads = re.findall(r"^campaign toy, part (\d) of 2: (\w+), (.*)$", said, re.MULTILINE)
    assert heads == [("1", "kappa", "2 of 2 runs to train"), ("2", "steps", "1 of 1 runs to train")]
    assert said.splitlines()[-1] == "all 2 parts are there; next: lab claims there"
    assert sorted(store.read(Path("there/kappa")).runs["intervention.kappa_transplant.kappa"]) == [1, 10]
    assert store.commands(Path("there/steps")) == [f"lab sweep steps {TINY} out=there/steps"]

    before = {path: path.read_bytes() for path in Path("there").rglob("*.*")}
    assert lab("campaign", "toy", "out=there") == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.endswith(", already there")] == [
        "campaign toy, part 1 of 2: kappa, already there",
        "campaign toy, part 2 of 2: steps, already there",
    ]
    assert {path: path.read_bytes() for path in Path("there").rglob("*.*")} == before


def test_a_part_that_fails_does_not_stop_the_others(
    plans: dict[str, SweepPlan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []

    def train(request: Request, part: CampaignPart) -> None:
        sweep = request.command.split()[2]
        assert part.title == f"campaign toy, part {ORDER.index(sweep) + 1} of 4"
        trained.append(sweep)
        if sweep == "qk_layernorm":
            raise SystemExit(1)
        if sweep == "steps":
            raise launch.RequestError("cannot write there")

    monkeypatch.setattr(multirun, "carry_out", train)
    assert lab("campaign", "toy") == 1
    assert trained == ORDER[1:]
    told = capsys.readouterr()
    assert told.err.splitlines() == [
        "lab: steps: cannot write there",
        "lab: qk_layernorm and steps did not finish; the same command trains what is missing",
    ]
    assert "next:" not in told.out


@pytest.mark.parametrize(("end", "code"), [(SystemExit(75), 75), (KeyboardInterrupt(), 130)])
def test_who_is_told_to_stop_stops_and_says_how_to_resume(
    end: BaseException,
    code: int,
    plans: dict[str, SweepPlan],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained: list[str] = []

    def train(request: Request, part: CampaignPart) -> None:
        trained.append(request.command)
        raise end

    monkeypatch.setattr(multirun, "carry_out", train)
    assert lab("campaign", "toy") == code
    assert trained == ["lab sweep qk_layernorm out=runs/toy/qk_layernorm"]
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "the same command" in line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tpy"], "unknown campaign 'tpy'; nearest: toy"),
        (["toy", "ot=x"], "lab campaign has no option 'ot'; nearest: out"),
        (["mine.yaml"], "no campaign file mine.yaml"),
        (["toy", "hydra.sweeper.max_runs=3"], "lab campaign has no option 'hydra.sweeper.max_runs'; "),
        (["toy", "--dryrun"], "lab campaign has no option '--dryrun'; nearest: --dry-run"),
        (["toy"], "must hold parts: a list of sweeps, each written as after `lab sweep`"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(
    words: list[str], line: str, described: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described.write_text("parts: {steps: 3}\n")
    assert lab("campaign", *words) == 2
    told = capsys.readouterr()
    assert line in told.err
    assert (told.out, len(told.err.splitlines()), [*Path().iterdir()]) == ("", 1, [])


def test_a_faulty_part_is_refused_before_anything_is_trained(
    described: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    describe(described, f"steps {TINY}", "kapa")
    assert lab("campaign", "toy") == 2
    assert capsys.readouterr().err.startswith("lab: unknown sweep 'kapa'; nearest: kappa")
    assert not [*Path().iterdir()]


def test_a_folder_may_be_called_anything(described: Path) -> None:
    describe(described, "steps seed=1,2")
    assert [*campaign._read(toy("out=/a/b-c_d.e"))] == [["steps", "seed=1,2", "out=/a/b-c_d.e/steps"]]
    (words,) = campaign._read(toy()._replace(out=Path("it's (1), ok")))
    assert campaign.parse(words[-1:])[0].value() == "it's (1), ok/steps"
    assert campaign.read_arguments(["toy", "out='it is'"]) == ("toy", described, Path("it is"), [], False)


def test_settings_of_the_launcher_are_for_every_part(described: Path) -> None:
    describe(described, f"steps {TINY}", "mup")
    settings = ["hydra/launcher=local", "hydra.launcher.processes=3"]
    first, second = campaign._read(toy(*settings))
    assert first == ["steps", *TINY.split(), *settings, "out=runs/steps"]
    assert second == ["mup", *settings, "out=runs/mup"]
    assert len(campaign._plan(first).host.slots) == 3  # what is given last counts


@pytest.mark.usefixtures("undrawn", "briefly")
def test_a_campaign_of_ones_own_may_hold_sweeps_of_ones_own(
    described: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sweeps").mkdir()
    Path("sweeps/alone.yaml").write_text("# Mine?\nsteps: 3\nhydra: {sweeper: {params: {seed: '0,1'}}}\n")
    describe(Path("mine.yaml"), f"sweeps/alone.yaml {TINY.replace('scale=toy', '').replace('seed=0', '')}")
    assert lab("campaign", "mine.yaml", "--dry-run") == 0
    head, row, *_ = (re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
    assert dict(zip(head, row, strict=False)).items() >= {"part": "alone", "runs": "2", "claims": "0"}.items()
    assert lab("campaign", "mine.yaml", "hydra/launcher=basic") == 0
    assert "campaign mine, part 1 of 1: alone, 2 of 2 runs to train" in capsys.readouterr().out
    assert len(store.read(Path("runs/mine/alone")).runs) == 2


def test_campaigns_are_listed_with_their_questions(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab("campaign") == 0
    listed = capsys.readouterr().out
    assert re.search(r"^day +Which claims of Wortsman et al. 2023 hold", listed, re.MULTILINE)
    assert listed.splitlines() == [*listing.lines(["campaigns"])]
    assert len(listed.splitlines()) == len(shipped.campaigns())


def test_every_part_of_a_campaign_is_a_sweep_with_claims_or_the_board() -> None:
    for path in shipped.campaigns().values():
        names = [words[0] for words in campaign._read(campaign.Campaign(path.stem, path, Path("runs")))]
        assert set(names) <= {"leaderboard", *(CLAIMS[name].sweep for name in CLAIMS)} & set(shipped.sweeps())
        assert len(set(names)) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped.campaigns())
def test_every_part_of_a_campaign_has_runs(name: str, tmp_path: Path) -> None:
    parts = campaign.plan(campaign.read_arguments([name, f"out={tmp_path}"]))
    assert [len(part.plan.missing) for part in parts] == [len(part.plan.mine) for part in parts]
    assert all(part.plan.mine for part in parts)


@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize(
    ("key", "how"),
    [
        ("bf16_ms", "precision=bf16 engine=compiled"),
        ("eager_ms", "precision=bf16 engine=eager"),
        ("fp32_ms", "engine=compiled"),
        ("fp32_eager_ms", "engine=eager"),
    ],
)
def test_the_assumed_speed_of_a_core_is_the_benchmarked_one(width: int, key: str, how: str) -> None:
    """A step of 16 x 64 tokens; the benchmark had two cores."""
    depth = 2 if width <= 64 else 4
    shape = f"model.width={width} model.depth={depth} model.head_width=32 batch_size=16 seq_len=64 steps=100000"
    (config,) = configs(f"{shape} {how}")
    measured = 2 * json.loads(BENCHMARK.read_text())["cpu"][f"width_{width}"][key] / 1000
    assert dry_run._run_seconds(config) / config.steps == pytest.approx(measured, rel=0.15)


def test_a_shape_is_compiled_once() -> None:
    runs = points([tree("engine=compiled", f"seed={seed}", "steps=1") for seed in range(3)])
    more = points([tree("engine=compiled", "model.depth=3", "steps=1")])
    assert dry_run.core_seconds(runs) // dry_run.COMPILING == 1
    assert dry_run.core_seconds([*runs, *more]) // dry_run.COMPILING == 2
    trial = dry_run.Trial(10.0, 0.0, 0.0, (1, 1))
    fleets = [[point.config] for point in [*runs, *more]]
    seconds = [one.seconds for one in dry_run._with_compiling(fleets, [trial] * 4, 2) if one]
    assert seconds == [10 + dry_run.COMPILING, 10 + dry_run.COMPILING, 10, 10 + dry_run.COMPILING]
