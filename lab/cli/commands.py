"""Sub-commands, each a thin function over the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from lab.core import machine
from lab.core.errors import RequestError, nearest
from lab.core.files import printable

USAGE = """\
lab sweep NAME|FILE.yaml [key=value,value ...]   train a sweep; the same command again trains only what is missing
lab train [key=value ...]                        train one run; with -m and key=a,b a sweep without a file
lab report DIR [DIR ...]                         rebuild figures and report.html; several overlaid, in the first
lab coordcheck [key=value ...]                   does a parametrization keep updates in scale as the model gets wider
lab predict DIR                                  say at which larger size or learning rate runs will be unstable
lab claims [DIR ...] [--json|--markdown]         which claims of the paper the records bear out (default: results)
lab check DIR --baseline FILE|DIR [--margin 5%]  are curves still what they were: exit code 0 yes, 1 no, 2 cannot tell
    [--json] [--html FILE] [--junit FILE] [--markdown FILE]
lab baseline save DIR FILE | show FILE | diff OLD NEW    curves to check against, in a small file to commit
lab export DIR --to csv|tensorboard|wandb|trackio [--out FOLDER]    hand records on
lab list [sweeps|models|guests|interventions|parametrizations|optimizers|schedules|data|probes|trackers|figures]

out=DIR says where records go.  --dry-run prints points, fleets and cost, and trains nothing.
--cfg job shows the config and --help the keys, also after `sweep NAME`.  lab list says what there is.
Tab completion: eval "$(lab -sc install=bash)"
"""


def _without_m(arguments: list[str]) -> list[str]:
    return [word for word in arguments if word not in ("-m", "--multirun")]


def _sweep(arguments: list[str]) -> None:
    from lab.cli import launch

    if not arguments or arguments[0].startswith("-") or ("=" in arguments[0] and not arguments[0].endswith(".yaml")):
        raise RequestError(f"lab sweep needs a name or a FILE.yaml first; known: {', '.join(launch.sweeps())}")
    sweep = launch.find_sweep(arguments[0])
    launch.run_hydra(_without_m(arguments[1:]), name=sweep.stem, sweep=sweep)


def _train(arguments: list[str]) -> None:
    from lab.cli import launch

    words = _without_m(arguments)
    launch.run_hydra(words, name="train", one=len(words) == len(arguments))


def _report(arguments: list[str]) -> None:
    from lab.analysis.report import build
    from lab.analysis.sensitivity import study
    from lab.records import store

    if not arguments:
        raise RequestError("report which folder? lab report DIR [DIR ...]")
    folders = [Path(folder) for folder in arguments]
    if len(folders) == 1 and (several := store.results_folders(folders[0])):
        for page in _reports(several):
            print(printable(f"report: {page}"))
        return
    made = study(folders)
    page = build.write_report(made, folders)
    print(printable(build.summary(made)))
    print(printable(f"report: {page}"))


def _reports(folders: Sequence[Path]) -> Iterator[Path]:
    """A report of each, as many at once as there are cores."""
    processes = machine.clean_process_context(["lab.analysis.report.build"])
    with ProcessPoolExecutor(min(machine.cores(), len(folders)), processes) as pool:
        yield from pool.map(_report_alone, folders)


def _report_alone(folder: Path) -> Path:
    from lab.analysis.report import build
    from lab.analysis.sensitivity import study

    return build.write_report(study([folder]), [folder])


def _coordcheck(arguments: list[str]) -> None:
    from lab.cli import launch
    from lab.sweep import coordcheck

    check = coordcheck.CoordinateCheck(launch.compose_points([*coordcheck.DEFAULTS, *arguments]))
    check.write()
    for line in check.lines():
        print(line)
    if not check.passed:
        raise SystemExit(1)


def _predict(arguments: list[str]) -> None:
    from lab.analysis.forecast import report

    if len(arguments) != 1:
        raise RequestError("predict from which folder? lab predict DIR")
    for line in report.predict(Path(arguments[0])):
        print(printable(line))


def _claims(arguments: list[str]) -> None:
    from lab.analysis.claims import scoreboard

    folders, given = _options(arguments, switches=["--json", "--markdown"])
    print(printable(scoreboard.render([Path(folder) for folder in folders or ["results"]], *given)))


def _export(arguments: list[str]) -> None:
    from lab.records import export

    folders, given = _options(arguments, ["--to", "--out"])
    if len(folders) != 1 or not given.get("--to"):
        raise RequestError(f"lab export DIR --to {'|'.join(export.destinations())} [--out FOLDER]")
    said = export.export_records(Path(folders[0]), given["--to"], Path(given["--out"]) if "--out" in given else None)
    print(printable(said))


def _check(arguments: list[str]) -> None:
    from lab.analysis.guard import check, render
    from lab.core import files

    writers = {"--junit": render.junit, "--markdown": render.markdown}
    known = ["--baseline", "--margin", "--html", *writers]
    folders, given = _options(arguments, known, ["--json"])
    if len(folders) != 1 or not given.get("--baseline"):
        raise RequestError("lab check DIR --baseline FILE|DIR [--margin 5%]")
    folder, margin = Path(folders[0]), check.margin_of(given.get("--margin", "5%"))
    held = check.check_folder(folder, Path(given["--baseline"]), margin)
    found = held.comparison
    print(printable(render.as_json(found) if "--json" in given else "\n".join(render.text(found))), flush=True)
    for option, write in writers.items():
        if option in given:
            files.write_text(Path(given[option]), write(found))
    if "--html" in given or folder.is_dir():
        files.write_text(Path(given.get("--html", folder / "check.html")), held.page())
    raise SystemExit(render.EXIT_CODES[found.verdict])


def _baseline(arguments: list[str]) -> None:
    from lab.analysis.guard import baseline, check

    match list(map(Path, arguments[1:])), arguments[:1]:
        case [folder, file], ["save"]:
            lines = check.save_baseline(folder, file)
        case [place], ["show"]:
            lines = check.describe_baseline(baseline.read(place))
        case [old, new], ["diff"]:
            lines = check.diff_baselines(baseline.read(old), baseline.read(new))
        case _:
            raise RequestError("lab baseline save DIR FILE, lab baseline show FILE, or lab baseline diff OLD NEW")
    for line in lines:
        print(printable(line))


def _options(
    arguments: list[str], known: Sequence[str] = (), switches: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Plain words, and what is given as ``--key value`` or ``--key=value``, or as a switch, which takes no value."""
    words, given, rest = [], {}, iter(arguments)
    for word in rest:
        key, equals, value = word.partition("=")
        if not word.startswith("-"):
            words.append(word)
        elif key not in (*known, *switches):
            raise RequestError(f"unknown option {key!r}; {nearest(key, [*known, *switches])}")
        else:
            given[key] = value if equals or key in switches else next(rest, "")
            if key in known and (not given[key] or given[key].startswith("--")):
                raise RequestError(f"{key} wants a value")
    return words, given


def _list(arguments: list[str]) -> None:
    from lab.cli import listing

    for line in listing.lines(arguments):
        print(line)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "sweep": _sweep,
    "train": _train,
    "report": _report,
    "coordcheck": _coordcheck,
    "predict": _predict,
    "claims": _claims,
    "check": _check,
    "baseline": _baseline,
    "export": _export,
    "list": _list,
}
