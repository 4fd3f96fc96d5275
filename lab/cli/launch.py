"""From the words of a command line to Hydra, and from Hydra's errors back to one line."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lab.cli import hydra_app, override_rules
from lab.cli.compose import CONFIG_DIR_FLAGS, composer, expand, known_keys, use_config_dir
from lab.core.errors import RequestError, nearest
from lab.sweep import run

# Hydra's flags that show something and run nothing, and those that say how.
SHOW = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version")
HOW = ("--package", "-p", "--resolve")
# Launchers that come with other packages, and the extra of ours that installs them.
EXTRAS = {"submitit_slurm": "slurm", "submitit_local": "slurm", "ray": "ray", "ray_aws": "ray"}
# Where we hand over to Hydra what the user wrote.
OURS = [Path(inspect.getfile(ours)) for ours in (override_rules, expand)] + [Path(__file__)]


def sweeps() -> dict[str, Path]:
    """The sweeps that come with the lab, by name."""
    return {path.stem: path for path in sorted(hydra_app.data_folder("sweeps").glob("*.yaml"))}


def find_sweep(named: str) -> Path:
    """The file of a sweep, given by name or by path.

    Raises:
        RequestError: there is no such sweep.
    """
    path = Path(named)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise RequestError(f"no sweep file {path}")
        return path
    if named not in sweeps():
        raise RequestError(f"unknown sweep {named!r}; {nearest(named, sweeps())}; or give a FILE.yaml")
    return sweeps()[named]


def read_sweep(path: Path) -> DictConfig:
    """A sweep file as Hydra will compose it.

    Raises:
        RequestError: it is not a YAML mapping.
    """
    try:
        content = OmegaConf.load(path)
    except Exception as refusal:  # whatever the YAML reader says
        raise RequestError(f"{path} is not YAML: {' '.join(str(refusal).split())}") from None
    if not isinstance(content, DictConfig):
        raise RequestError(f"{path} must hold keys and values, as the files in sweeps/ do")
    return content


def run_hydra(words: Sequence[str], *, name: str, sweep: Path | None = None, one: bool = False) -> None:
    """Hand a request to Hydra: train (or with --dry-run only cost) its points, or show what --cfg or --help ask for.

    ``name`` names the default results folder, ``runs/NAME``; ``one`` refuses a list of values.
    """
    run.COMMAND.set(shlex.join([*_called(sys.argv[0]), *sys.argv[1:]]))
    content = read_sweep(sweep) if sweep else OmegaConf.create()
    chosen: list[str] = []
    if sweep:
        # under a name of our own, since a file may be called anything
        ConfigStore.instance().store(group="sweeps", name="requested", node=content, package="_global_")
        chosen = ["sweeps=requested"]
    shard = [word for word in words if word.startswith("shard=")]  # asked of the sweeper, not of a run
    overrides = [word for word in words if "=" in word and not word.startswith("-") and word not in shard]
    flags = [word for word in words if word not in [*overrides, *shard, "--dry-run"]]
    for flag in flags:
        if flag.startswith("-") and flag.split("=")[0] not in [*SHOW, *HOW, *CONFIG_DIR_FLAGS]:
            raise RequestError(f"unknown option {flag!r}; {nearest(flag, ['--dry-run', *SHOW, *CONFIG_DIR_FLAGS])}")
    use_config_dir(flags)
    if any(word.lstrip("+~").startswith("fleet") for word in overrides):
        raise RequestError("key 'fleet' is the sweeper's own")
    override_rules.check_overrides(overrides)
    override_rules.check_defaults(content)
    if "out" not in content and not any(word.lstrip("+").startswith("out=") for word in overrides):
        chosen.append(f"out={run.quoted(Path('runs', name))}")
    shows = any(flag.split("=")[0] in SHOW for flag in flags)
    if shows or sweep not in (None, *sweeps().values()) or not override_rules.is_ours(overrides):
        point = override_rules.first_point([*chosen, *overrides], one=one)
    if shows:
        sys.argv = ["lab", *flags, *point]
    else:
        options = {"dry_run=true": "--dry-run" in words, "one=true": one}
        asked = [f"hydra.sweeper.{option}" for option in [*shard, *(o for o, given in options.items() if given)]]
        sys.argv = ["lab", "--multirun", *flags, *chosen, *overrides, *asked]
    _check_flags(sys.argv[1:])
    hydra_app.hydra_main()


def _called(program: str) -> list[str]:
    """How this program was started: as ``lab``, or as a user's own script that ends in ``lab.main()``."""
    is_script = program.endswith(".py") and Path(program).name != "__main__.py"
    return ["python", program] if is_script else ["lab"]


def _check_flags(arguments: Sequence[str]) -> None:
    """Refuse what Hydra's own parser would answer with its usage."""

    def refuse(message: str) -> NoReturn:
        raise RequestError(message)

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args(list(arguments))


def compose_points(words: Sequence[str]) -> list[dict[str, Any]]:
    """Resolved config trees, one for every point these overrides ask for, for whoever trains them in this process.

    Raises:
        RequestError: a word that is no override.
    """
    overrides = use_config_dir(words)
    for word in overrides:
        if word.startswith("-") or "=" not in word:
            raise RequestError(f"unknown option {word!r}; all that can be given here is key=value, and --config-dir")
    override_rules.check_overrides(overrides)
    trees = []
    with composer() as composed:
        for point in expand(OverridesParser.create().parse_overrides(overrides)):
            tree: Any = OmegaConf.to_container(composed(point), resolve=True, throw_on_missing=True)
            trees.append({key: value for key, value in tree.items() if key != "fleet"})
    return trees


def is_refusal(fault: Exception) -> bool:
    """Whether Hydra refused the request: it says so, or broke while it read or composed what the user wrote."""
    if isinstance(fault, (HydraException, OmegaConfBaseException)):
        return True
    frames = extract_tb(fault.__traceback__)
    ours = [frame.name for frame in frames if Path(frame.filename) in OURS]
    return (
        bool(ours)
        and ours[-1]
        in ("run", "points", "_settings", "check_words", "first_point", "_params", "_parse", "_compose", "expand")
        and frames[-1].name not in ours
    )


def one_line(fault: BaseException) -> str:
    """What Hydra or OmegaConf refused, in one line that names the nearest valid choice."""
    text = str(fault)
    if isinstance(fault, OverrideParseException):
        return f"cannot read '{fault.override}'; quote the value, as in \"key='value'\""
    if "raised while composing config" in text and fault.__cause__ is not None:
        return one_line(fault.__cause__)
    if found := re.search(r"already at '([^']*)'", text):
        return f"key '{found[1]}' is there already; give it without the +"
    if found := re.search(r"Could not (?:find|load) '([\w/]+)/([^/']+)'", text):
        listed = re.search(r"Available options in '[^']*':\n((?:\t.*\n?)*)", text)
        if found[1] == "hydra/launcher" and found[2] in EXTRAS:
            return f"launcher {found[2]!r} needs an extra: pip install 'instability-lab[{EXTRAS[found[2]]}]'"
        there = (
            listed[1].split() if listed else [p.stem for p in hydra_app.data_folder("conf").glob(f"{found[1]}/*.yaml")]
        )
        return f"unknown {found[1]} {found[2]!r}; {nearest(found[2], there)}"
    if found := re.search(r"Could not (?:override|append|delete|find).*?'[+~]*([^'=\n]*)", text):
        key, known = found[1], known_keys()
        if key in known:
            return f"key '{key}' is not there in every choice of groups asked for"
        if (group := key.split(".")[0]) in ("guest", "intervention"):  # which hold what is present
            alike = nearest(key, [name for name in known if name.startswith(group)])
            return f"unknown key '{key}'; {alike}; one of your own is added by +{key}=VALUE"
        return f"unknown key '{key}'; {nearest(key, known)}"
    if isinstance(fault, OmegaConfBaseException) and fault.full_key:
        return f"{fault.full_key}: {text.splitlines()[0]}"
    said = text.split("raised while composing config:\n")[-1]
    return (said.splitlines() or [type(fault).__name__])[0].rstrip(".:")
