"""The table of commands, from which the usage, the help and the option parsers are made."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from lab.core.errors import RequestError, nearest

COLUMN = 52  # where meanings begin in the usage


class Command(NamedTuple):
    """One command.

    Attributes:
        takes: the arguments that must or may follow the name of the command.
        does: the purpose of the command, in half a sentence.
        example: the arguments of an example.
        options: the meaning of each option, by its form, such as ``--margin PERCENT``; the form shows its values.
    """

    takes: str
    does: str
    example: str
    options: Mapping[str, str] = {}

    @property
    def parsed_options(self) -> dict[str, list[str]]:
        """The values that each option takes, by its name; three dots end the value of an option that may be repeated.

        Overrides such as ``out=DIR`` are left out, since Hydra parses them.
        """
        words = (form.split() for form in self.options if form.startswith("--"))
        return {option: values for option, *values in words}


_REQUEST = {
    "KEY=VALUE": "sets a key of the run; KEY=A,B trains a run for each value",
    "GROUP=NAME": "chooses a file of conf/, such as optimizer=sgd; lab list names them",
    "out=DIR": "the folder of the records (default: runs/NAME)",
    "shard=I/N": "train the I-th of N parts, for machines that share a folder",
    "--dry-run": "print fleets, hours and memory, and train nothing; --dry-run=full lists every run",
    "--cfg job": "print the config of the first run, and train nothing",
    "--config-dir DIR": "a folder with config files of your own, laid out as conf/ is",
}
_JSON = {"--json": "the same for programs"}
_WINDOW = {"--window LOW HIGH": "sensitivity over these learning rates (default: 3e-4 to 3e-1)"}

COMMANDS: dict[str, Command] = {
    "sweep": Command(
        "NAME|FILE.yaml [KEY=VALUE,VALUE ...]",
        "train a sweep; the same command again trains only what is missing",
        "quickstart seed=3,4",
        {**_REQUEST, "--help": "after NAME: the config of the sweep, with its comments"},
    ),
    "train": Command(
        "[KEY=VALUE ...]",
        "train one run, or with -m a sweep without a file",
        "-m optimizer.lr=1e-3,1e-2,1e-1 seed=0,1,2 out=runs/mine",
        {"-m": "train a run for each combination of the values given", **_REQUEST},
    ),
    "stress": Command(
        "[RECIPE [RECIPE]] [KEY=VALUE ...]",
        "crash-test a recipe, or two side by side: a card of what it cannot stand",
        "--minutes 5 'intervention=[z_loss]'",
        {
            "RECIPE": "a name that lab list recipes gives, or a FILE.yaml",
            **{key: _REQUEST[key] for key in ("KEY=VALUE", "GROUP=NAME")},
            "--model FILE.py:NAME|CONFIG": "a model of your own: what builds a module, or a config of transformers",
            "--optimizer FILE.py:CLASS": "an optimizer of your own, a torch.optim.Optimizer",
            "out=DIR": "the folder of the records and of the card (default: runs/stress/NAME)",
            "--minutes 1|5|30": "how long it may take on two cores, which decides on tests and seeds (default: 1)",
            "--tests NAME,NAME": "these tests only",
            "--cures N|NAME,NAME|none": "changes to try on each failed test (default: none in 1 minute, else 10)",
            "--dry-run": "print fleets, hours and memory, and train nothing",
            "--config-dir DIR": _REQUEST["--config-dir DIR"],
            **_JSON,
        },
    ),
    "import": Command(
        "TABLE|DIR out=DIR",
        "import runs of any trainer: a table of them, or a folder of their logs",
        "docs/tables/my_trainer.csv out=runs/theirs --initial-loss eval/loss_at_step_0",
        {
            "out=DIR": "the results folder to make",
            "--lr COLUMN": "the peak learning rate; this and the columns below are found by their usual names",
            "--loss COLUMN": "the final loss; empty or non-finite where the run diverged",
            "--size COLUMN|NUMBER": "the parameters of the model",
            "--seed COLUMN": "the seed",
            "--steps COLUMN|NUMBER": "the steps of training",
            "--arm COLUMN,COLUMN": "the columns whose values distinguish arms",
            "--initial-loss COLUMN|NUMBER": "the loss before training, at which a diverged run counts",
            "--axis COLUMN": "the setting along which curves run, such as beta2, instead of the learning rate",
            "--best-over COLUMN,COLUMN": "take the best run over these settings, such as the batch size",
            "--unit nats|bits|bits_per_byte|perplexity": "the unit of the losses (default: as the column is called)",
            "--keep last|best|error": "which row counts of a run that was tried again (default: error)",
            "--replace": "replace what was imported from another table",
            **_JSON,
        },
    ),
    "report": Command(
        "DIR [DIR ...]",
        "draw figures and report.html again; several folders are overlaid in the first",
        "runs/decay --format pdf --width 3.25",
        {
            "--open": "open the page in the browser",
            "--format pdf|png": "instead, write the figures for a paper",
            "--width INCHES": "the width of such a figure (default: 3.25)",
            "--difference NUMBER": "of an imported table: how many seeds find a difference of arms as small as this",
            **_WINDOW,
            **_JSON,
        },
    ),
    "coordcheck": Command(
        "[KEY=VALUE ...]",
        "check whether updates keep their scale as the model gets wider, or deeper",
        "parametrization=mup_full",
        {key: _REQUEST[key] for key in ("KEY=VALUE", "GROUP=NAME", "out=DIR", "--config-dir DIR")},
    ),
    "predict": Command(
        "DIR",
        "forecast which larger sizes or learning rates fail, or advise a batch size",
        "results/logit_growth",
        {**_WINDOW, **_JSON},
    ),
    "watch": Command(
        "DIR|LOG",
        "find loss spikes and other alarms, also in logs of other trainers",
        "log.csv --replay again.csv",
        {
            "--columns step=COLUMN,loss=COLUMN": "the columns, where no usual name is found",
            "--replay DIR|LOG...": "logs of the same steps trained again, to find what made the loss rise",
            "--follow": "read on while the log grows, and raise each alarm once",
            "--on-alarm COMMAND": "with --follow: a command that gets each alarm as JSON on its standard input",
            "--mantissa-bits N": "mantissa bits of the format that rounds output logits (default: 7, as bf16 has)",
            **_JSON,
        },
    ),
    "claims": Command(
        "[DIR ...]",
        "list which claims of papers the records reproduce (default: results)",
        "--source PaLM-540B",
        {
            "--source NAME": "the claims of one source, such as PaLM-540B, and the figures that show them",
            "--figure NAME": "the claims of one figure of the paper, or of a section of another source, such as E.7",
            "--verdict WORD": "the claims of one verdict; claims without runs are shown by 'not run' only",
            "--html FILE": "write a page whose table can be sorted and filtered",
            "--markdown": "print Markdown",
            "--power CLAIM": "instead, how many seeds a claim takes, from the pilot seeds in DIR",
            "--effect NUMBER": "with --power: the effect to detect (default: the mean of the pilot seeds)",
            **_JSON,
        },
    ),
    "leaderboard": Command(
        "[DIR ...]",
        "rank changes of a recipe by how they lower LR sensitivity (default: results)",
        "runs/leaderboard",
        {
            "--pairs": "instead, which pairs of the best dozen arms to train next, then which of them help",
            "--recipe FILE.yaml": "instead, in two stages, what to add to a recipe of your own; DIR holds both",
            "--html FILE": "write a page whose tables can be sorted and filtered",
            "--transfer [TABLE.csv]": "instead, whether the board predicts published outcomes, or those of a table",
            "--csv": "print a line of CSV for each comparison",
            **_WINDOW,
            **_JSON,
        },
    ),
    "check": Command(
        "DIR --baseline FILE|DIR",
        "compare curves or a card with a baseline: exit code 0 unchanged, 1 worse, 2 undecided",
        "runs/smoke --baseline results/baselines/smoke.json",
        {
            "--baseline FILE|DIR": "the baseline: a file that --save wrote, or a results folder",
            "--save FILE": "instead, keep the curves or the card of DIR in a small file to commit",
            "--show FILE": "instead, list the curves that such a file holds",
            "--margin PERCENT": "how much a curve may worsen (default: 5%)",
            "--strict": "fail on smaller changes, too, if they are significant",
            "--junit FILE": "write the outcome for a CI system",
            "--markdown FILE": "write the outcome as Markdown",
            **_WINDOW,
            **_JSON,
        },
    ),
    "compare": Command(
        "A B | LOG LOG [...]",
        "compare two results folders arm by arm, or logs: shared batches, and the gap",
        "results/quickstart results/logit_growth",
        {
            "--within NATS": "between logs: losses are equal if they differ by less (default: 0.25 % of the loss of A)",
            "--html FILE": "between logs: write a page with curves, gap and events",
            "--siblings": "instead: from which step on the first log leaves the curve of the others, of other sizes",
            **_WINDOW,
            **_JSON,
        },
    ),
    "status": Command(
        "DIR",
        "list the runs that are done, missing, failed and running, and their times",
        "runs/decay",
        _JSON,
    ),
    "export": Command(
        "DIR --to csv|tensorboard|wandb|trackio",
        "export records to another format or tracker",
        "runs/decay --to csv",
        {
            "--to csv|tensorboard|wandb|trackio": "the format; all but csv need an extra of the same name",
            "--out FOLDER": "where the files are written",
        },
    ),
    "list": Command(
        "[sweeps|recipes|models|interventions|optimizers|...]",
        "list the names that can be given, with a line about each",
        "sweeps",
        _JSON,
    ),
}
# Words that were commands, and the command that each is part of now.
FORMER = {
    "baseline": "lab check DIR --save FILE, lab check --show FILE or lab check FILE --baseline FILE",
    "batch": "lab predict DIR",
    "transfer": "lab leaderboard --transfer [TABLE.csv]",
}
NOTE = (
    "lab COMMAND --help says what a command takes, with an example; lab train --help shows every key.",
    'Tab completion: eval "$(lab -sc install=bash)"',
)


def overview() -> str:
    """One or two lines for each command, and the notes."""
    return "\n".join(
        [*_rows({f"lab {word} {command.takes}": command.does for word, command in COMMANDS.items()}), "", *NOTE]
    )


def command_help(word: str) -> str:
    """The help of a command: its arguments, its purpose, its options and an example."""
    command = COMMANDS[word]
    lines = [f"lab {word} {command.takes}{' [OPTION ...]' * bool(command.options)}", "", f"  {command.does}", ""]
    options = [f"  {row}" for row in _rows(command.options)]
    return "\n".join([*lines, *options, *[""] * bool(options), f"example: lab {word} {command.example}"])


def _rows(meanings: Mapping[str, str]) -> Iterator[str]:
    column = min(COLUMN, max(map(len, meanings), default=0) + 2)
    for form, meaning in meanings.items():
        if len(form) + 2 > column:
            yield form
        yield f"{'' if len(form) + 2 > column else form:{column}}{meaning}"


class OptionParser(argparse.ArgumentParser):
    """Parser of the folders and options of a command; its errors are one line each, instead of a usage."""

    def __init__(self, word: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.options = COMMANDS[word].parsed_options
        self.add_argument("folders", nargs="*", type=Path)
        for option, values in self.options.items():
            if len(values) > 1:
                self.add_argument(option, nargs=len(values))
            elif values and values[0].startswith("["):
                self.add_argument(option, nargs="?", const="")
            elif values and values[0].endswith("..."):
                self.add_argument(option, type=_nonempty, action="append", default=[])
            elif values:
                self.add_argument(option, type=_nonempty)
            else:
                self.add_argument(option, action="store_true")

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
        raise RequestError(f"{option} wants {'two learning rates, LOW HIGH' if option == '--window' else 'a value'}")


def _nonempty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected one argument")
    return text
