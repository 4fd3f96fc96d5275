"""Sub-commands: each reads its arguments and calls the library."""

from __future__ import annotations

import argparse
import shlex
import sys
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lab.core import machine
from lab.core.errors import RequestError, nearest
from lab.core.printing import say
from lab.sweep.local_jobs import run_jobs

if TYPE_CHECKING:
    from lab.report.build import Report

USAGE = """\
lab sweep NAME|FILE.yaml [key=value,value ...]   train a sweep; the same command again trains only what is missing
lab campaign [NAME [out=DIR]]                    train several sweeps, those first that decide most claims an hour
lab train [key=value ...]                        train one run; with -m and key=a,b a sweep without a file
lab import TABLE out=DIR [--replace]             a table with a row per run, from any trainer (CSV, JSON lines, Parquet)
    [--lr COLUMN] [--loss COLUMN] [--size COLUMN|NUMBER] [--seed COLUMN] [--steps COLUMN|NUMBER]
    [--arm COLUMN,COLUMN] [--initial-loss COLUMN|NUMBER]    whatever is not found under a usual name
lab report DIR [DIR ...] [--open]                rebuild figures and report.html; several overlaid, in the first
    [--format pdf|png [--width INCHES]]          instead, write the figures for a paper (default: 3.25 inches wide)
lab coordcheck [key=value ...]                   does a parametrization keep updates in scale as the model gets wider
lab predict DIR                                  say at which larger size or learning rate runs will be unstable
lab batch DIR [--json]                           the gradient noise scale, and which batch and learning rate follow
lab scan DIR [--run ID] [--json]                 from a checkpoint, the best single step at each batch size
lab watch DIR|LOG [--json]                       spikes and their warnings, also in logs of other programs
    [--columns step=COLUMN,loss=COLUMN]          where no usual name is found
    [--replay DIR|LOG [--replay ...]]            the same steps trained again, or twins: what made the loss rise
    [--follow [--on-alarm COMMAND]]              read on while the log grows; COMMAND gets each alarm as JSON
    [--mantissa-bits N]                          of the format that rounds output logits (default: 7, as bf16 has)
lab claims [DIR ...] [--json|--markdown]         which claims of papers the records bear out (default: results)
    [--source NAME]                              those of one source, such as PaLM-540B, and the figures that show them
    [--html FILE]                                as a page whose table sorts and filters
lab power DIR CLAIM [--effect X] [--reading N]   how many seeds a claim takes, from the spread of the pilot seeds there
lab check DIR --baseline FILE|DIR [--margin 5%]  are curves still what they were: exit code 0 yes, 1 no, 2 cannot tell
    [--strict] [--json] [--html FILE] [--junit FILE] [--markdown FILE]
lab compare A B [--json]                         two results folders, arm by arm: best loss, sensitivity, eta_div
lab status DIR [--json]                          which runs are there, missing, failed and running, and for how long
lab baseline save DIR FILE | show FILE | diff OLD NEW    curves to check against, in a small file to commit
lab export DIR --to csv|tensorboard|wandb|trackio [--out FOLDER]    hand records on
lab list [sweeps|campaigns|models|guests|interventions|parametrizations|optimizers|schedules|batches|data|...]

out=DIR says where records go.  --dry-run prints fleets and cost, --dry-run=full every run; neither trains.
--cfg job shows the config and --help the keys, also after `sweep NAME`.  lab list says what there is.
Tab completion: eval "$(lab -sc install=bash)"
"""


class _OptionParser(argparse.ArgumentParser):
    """Reads the folders and options of a sub-command; its errors are refusals in one line instead of a usage."""

    def __init__(self, *options: str, switches: Sequence[str] = ()) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("folders", nargs="*", type=Path)
        for option in options:
            self.add_argument(option, type=_nonempty)
        for switch in switches:
            self.add_argument(switch, action="store_true")
        self.options = [*options, *switches]

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Read arguments, in any order.

        Raises:
            RequestError: an option is unknown, lacks its value, or takes none.
        """
        values, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            option = unknown[0].partition("=")[0]
            raise RequestError(f"unknown option {option!r}; {nearest(option, self.options)}")
        return values

    def error(self, message: str) -> NoReturn:
        option, _, reason = message.removeprefix("argument ").partition(": ")
        if reason.startswith("ignored explicit argument"):
            raise RequestError(f"{option} takes no value")
        raise RequestError(f"{option} wants a value")


def _nonempty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected one argument")
    return text


def _without_m(arguments: list[str]) -> list[str]:
    return [word for word in arguments if word not in ("-m", "--multirun")]


def _sweep(arguments: list[str]) -> None:
    from lab.cli import launch
    from lab.core import shipped

    if not arguments or arguments[0].startswith("-") or ("=" in arguments[0] and not arguments[0].endswith(".yaml")):
        raise RequestError(f"lab sweep needs a name or a FILE.yaml first; known: {', '.join(shipped.sweeps())}")
    sweep = launch.find_sweep(arguments[0])
    command = launch.command_line(sys.argv[1:])
    launch.carry_out(launch.read_request(_without_m(arguments[1:]), command, name=sweep.stem, sweep=sweep))


def _campaign(arguments: list[str]) -> None:
    if not arguments:
        _list(["campaigns"])
        return
    from lab.cli import campaign

    name, out, dry_run = campaign.read_arguments(arguments)
    parts = campaign.plan(name, out)
    if dry_run:
        for line in campaign.table(parts):
            say(line)
        return
    campaign.train(name, out, parts)


def _train(arguments: list[str]) -> None:
    from lab.cli import launch

    words, command = _without_m(arguments), launch.command_line(sys.argv[1:])
    launch.carry_out(launch.read_request(words, command, name="train", one=len(words) == len(arguments)))


def _import(arguments: list[str]) -> None:
    from lab.records import run_table

    options = [f"--{key.replace('_', '-')}" for key in run_table.Columns._fields]
    given = _OptionParser(*options, switches=["--replace"]).read(arguments)
    words = list(map(str, given.folders))
    out = next((word.removeprefix("out=") for word in words if word.startswith("out=")), "")
    tables = [word for word in words if not word.startswith("out=")]
    if len(tables) != 1 or not out:
        raise RequestError("lab import TABLE out=DIR; TABLE is a file, or - for standard input")
    columns = {key: getattr(given, key) for key in run_table.Columns._fields}
    arm = columns["arm"].split(",") if columns["arm"] is not None else None
    records = run_table.records_of(
        run_table.read_table(tables[0]), run_table.Columns(**{**columns, "arm": arm}), Path(tables[0]).name
    )
    is_new = run_table.write(Path(out), records, shlex.join(["lab", "import", *arguments]), replace=given.replace)
    say(f"{len(records.runs)} runs {'imported' if is_new else 'already there'}; lab report {shlex.quote(out)}")


def _report(arguments: list[str]) -> None:
    from lab.records import store
    from lab.report import build

    given = _OptionParser("--format", "--width", switches=["--open"]).read(arguments)
    folders = given.folders
    if not folders:
        raise RequestError("report which folder? lab report DIR [DIR ...]")
    if given.format:
        for path in _paper_figures(folders, given.format, given.width):
            say(f"figure: {path}")
        return
    if given.width:
        raise RequestError("--width goes with --format pdf or --format png")
    if len(folders) == 1 and (several := store.results_folders(folders[0])):
        reports = []
        for report in _write_reports(several):
            reports.append(report)
            say(f"report: {report.page}")
        page = build.write_index(folders[0], reports)
        say(f"index: {page}")
    else:
        report, summary = build.make_report(folders)
        page = report.page
        say(summary)
        say(f"report: {page}")
    if given.open:
        webbrowser.open(page.absolute().as_uri())


def _paper_figures(folders: Sequence[Path], format_name: str, width: str | None) -> Iterator[Path]:
    """Write the figures of the folders for a paper, overlaid in the first, or of each folder in a single one."""
    from lab.analysis.sensitivity import study
    from lab.records import store
    from lab.report import paper

    form = paper.paper_of(format_name, width)
    several = store.results_folders(folders[0]) if len(folders) == 1 else []
    for each in [[folder] for folder in several] or [list(folders)]:
        yield from paper.write_figures(study(each), each[0], form)


def _write_reports(folders: Sequence[Path]) -> Iterator[Report]:
    """Write the report of each folder, as many at once as there are cores."""
    slots = [None] * min(machine.cores(), len(folders))
    ends = run_jobs(_write_report, ((folder,) for folder in folders), slots, imports=["lab.report.build"])
    for folder, end in zip(folders, ends, strict=True):
        if isinstance(end.answer, RequestError):
            raise end.answer
        if end.answer is None:
            raise RuntimeError(f"the report of {folder} ended with exit code {end.exit_code}")
        yield end.answer


def _write_report(folder: Path) -> Report | RequestError:
    """The report; or the refusal, for the parent process to raise."""
    from lab.report import build

    try:
        return build.make_report([folder])[0]
    except RequestError as refusal:
        return refusal


def _coordcheck(arguments: list[str]) -> None:
    from lab.cli import launch
    from lab.sweep import coordinate_check

    check = coordinate_check.check_coordinates(launch.compose_points([*coordinate_check.DEFAULTS, *arguments]))
    check.write()
    for line in check.lines():
        say(line)
    if not check.passed:
        raise SystemExit(1)


def _predict(arguments: list[str]) -> None:
    from lab.analysis.forecast import report

    if len(arguments) != 1:
        raise RequestError("predict from which folder? lab predict DIR")
    for line in report.predict(Path(arguments[0])):
        say(line)


def _batch(arguments: list[str]) -> None:
    from lab.studies.batch_size import advice

    given = _OptionParser(switches=["--json"]).read(arguments)
    if len(given.folders) != 1:
        raise RequestError("advise from which folder? lab batch DIR [--json]")
    for line in advice.batch_lines(given.folders[0], as_json=given.json):
        say(line)


def _scan(arguments: list[str]) -> None:
    from lab.sweep import scan

    given = _OptionParser("--run", switches=["--json"]).read(arguments)
    if len(given.folders) != 1:
        raise RequestError("scan the checkpoints of which folder? lab scan DIR [--run ID] [--json]")
    for line in scan.scan_lines(given.folders[0], given.run, as_json=given.json):
        say(line)


def _watch(arguments: list[str]) -> None:
    from lab.cli import watching

    parser = _OptionParser("--mantissa-bits", "--columns", "--on-alarm", switches=["--json", "--follow"])
    parser.add_argument("--replay", type=_nonempty, action="append", default=[])
    raise SystemExit(watching.watch(parser.read(arguments)))


def _claims(arguments: list[str]) -> None:
    from lab.core import files
    from lab.report import scoreboard

    given = _OptionParser("--source", "--html", switches=["--json", "--markdown"]).read(arguments)
    options = {"--json": given.json, "--markdown": given.markdown, "--html": given.html}
    formats = [option for option, is_given in options.items() if is_given]
    text = scoreboard.render(given.folders or [Path("results")], *formats, source=given.source or "")
    if given.html:
        files.write_text(Path(given.html), text)
    say(f"page: {given.html}" if given.html else text)


def _power(arguments: list[str]) -> None:
    from lab.report import power

    given = _OptionParser("--effect", "--reading").read(arguments)
    if len(given.folders) != 2:
        raise RequestError("power of which claim? lab power DIR CLAIM [--effect NUMBER] [--reading N]")
    folder, claim = given.folders
    for line in power.power_lines(folder, str(claim), given.effect, given.reading or "1"):
        say(line)


def _export(arguments: list[str]) -> None:
    from lab.records import export

    given = _OptionParser("--to", "--out").read(arguments)
    if len(given.folders) != 1 or not given.to:
        raise RequestError(f"lab export DIR --to {'|'.join(export.destinations())} [--out FOLDER]")
    say(export.export_records(given.folders[0], given.to, Path(given.out) if given.out else None))


def _check(arguments: list[str]) -> None:
    from lab.analysis.guard import check, render
    from lab.core import files

    parser = _OptionParser("--baseline", "--margin", "--html", "--junit", "--markdown", switches=["--json", "--strict"])
    given = parser.read(arguments)
    if len(given.folders) != 1 or not given.baseline:
        raise RequestError("lab check DIR --baseline FILE|DIR [--margin 5%] [--strict]")
    folder, margin = given.folders[0], check.margin_of(given.margin or "5%")
    checked = check.check_folder(folder, Path(given.baseline), margin, given.strict)
    comparison = checked.comparison
    say(render.as_json(comparison) if given.json else "\n".join(render.text(comparison)))
    for path, write in ((given.junit, render.junit), (given.markdown, render.markdown)):
        if path:
            files.write_text(Path(path), write(comparison))
    if given.html or folder.is_dir():
        files.write_text(Path(given.html or folder / "check.html"), checked.page())
    raise SystemExit(comparison.exit_code)


def _compare(arguments: list[str]) -> None:
    from lab.analysis.guard.side_by_side import compare_folders

    given = _OptionParser(switches=["--json"]).read(arguments)
    if len(given.folders) != 2:
        raise RequestError("compare which two folders? lab compare A B")
    compared = compare_folders(*given.folders)
    say(compared.as_json() if given.json else "\n".join(compared.lines()))


def _status(arguments: list[str]) -> None:
    from lab.records.status import read_status

    given = _OptionParser(switches=["--json"]).read(arguments)
    if len(given.folders) != 1:
        raise RequestError("status of which folder? lab status DIR")
    status = read_status(given.folders[0])
    say(status.as_json() if given.json else "\n".join(status.lines()))


def _baseline(arguments: list[str]) -> None:
    from lab.analysis.guard import baseline, check

    match list(map(Path, arguments[1:])), arguments[:1]:
        case [folder, file], ["save"]:
            lines = check.save_baseline(folder, file)
        case [file], ["show"]:
            lines = check.describe_baseline(baseline.read(file))
        case [old, new], ["diff"]:
            lines = check.diff_baselines(baseline.read(old), baseline.read(new))
        case _:
            raise RequestError("lab baseline save DIR FILE, lab baseline show FILE, or lab baseline diff OLD NEW")
    for line in lines:
        say(line)


def _list(arguments: list[str]) -> None:
    from lab.cli import listing

    for line in listing.lines(arguments):
        say(line)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "sweep": _sweep,
    "campaign": _campaign,
    "train": _train,
    "import": _import,
    "report": _report,
    "coordcheck": _coordcheck,
    "predict": _predict,
    "batch": _batch,
    "scan": _scan,
    "watch": _watch,
    "claims": _claims,
    "power": _power,
    "check": _check,
    "compare": _compare,
    "status": _status,
    "baseline": _baseline,
    "export": _export,
    "list": _list,
}
