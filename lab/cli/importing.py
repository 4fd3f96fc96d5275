"""`lab import`: runs of any trainer, from a table or a folder of logs."""

from __future__ import annotations

import shlex
from pathlib import Path

from lab.core.errors import RequestError
from lab.core.printing import say, say_json
from lab.core.usage import OptionParser
from labwatch.events.logs import measurements
from labwatch.tables import run_folders, run_table, table_files
from labwatch.tables.columns import Columns


def run(arguments: list[str]) -> None:
    """Import what the words of the command line name, and say what each column was taken for."""
    given = OptionParser("import").read(arguments)
    words = list(map(str, given.folders))
    out = next((word.removeprefix("out=") for word in words if word.startswith("out=")), "")
    tables = [word for word in words if not word.startswith("out=")]
    if len(tables) != 1 or not out:
        raise RequestError("lab import TABLE|DIR out=DIR, a file, a folder of runs, or - for standard input")
    options = {key: getattr(given, key) for key in Columns._fields}
    lists = {key: options[key].split(",") for key in ("arm", "best_over") if options[key] is not None}
    source, named = Path(tables[0]), Columns(**options | lists)
    if source.is_dir():
        found = run_folders.read_run_folder(source, measurements, given.loss)
        read = run_table.records_of(found.table, named, source.resolve().name, found.measured)
        read.mapping.extend(found.remarks)
    else:
        read = run_table.records_of(table_files.read_table(tables[0]), named, source.name)
    command = shlex.join(["lab", "import", *arguments])
    is_new = run_table.write(Path(out), read.records, command, replace=given.replace)
    runs = len(read.records.runs)
    failed = int((read.records.runs["status"] == "failed").sum())
    if given.json:
        say_json({"folder": out, "runs": runs, "is_new": is_new, "mapping": dict(read.mapping)})
        return
    width = max(len(meaning) for meaning, _ in read.mapping)
    for meaning, column in read.mapping:
        say(f"{meaning:{width}}  {column}")
    left_out = f", {failed} left out" if failed else ""
    say(f"{runs - failed} runs {'imported' if is_new else 'already there'}{left_out}; lab report {shlex.quote(out)}")
