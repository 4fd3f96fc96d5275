"""The help of a request: the config groups, and its config with the comments of the files from which it is composed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from omegaconf import OmegaConf

from lab.cli import hydra_app
from lab.cli.compose import Request, compose_config, groups
from lab.core.files import read_text
from lab.core.shipped import comment_of

KEY = re.compile(r"( *)([\w.-]+):")
COMMENT = re.compile(r"\s# (.*)")


def lines(request: Request) -> Iterator[str]:
    """The choices of every config group, then the config of a request, composed but not resolved.

    Raises:
        RequestError: Hydra cannot compose it.
    """
    config = compose_config(request, request.overrides, return_hydra_config=True)
    own = groups(request.config_dir)
    folders = [hydra_app.data_folder("conf"), *([request.config_dir] if request.config_dir else [])]
    chosen = {group: name for group, name in config.hydra.runtime.choices.items() if group in own and name}
    yield "config groups, as in optimizer=sgd:"
    for group in sorted(own):
        yield f"  {group}: {', '.join(sorted({path.stem for f in folders for path in f.glob(f'{group}/*.yaml')}))}"
    comments = dict[str, str]()
    for folder in folders:
        for group, path in [("", "config.yaml"), *((group, f"{group}/{name}.yaml") for group, name in chosen.items())]:
            if (folder / path).is_file():
                comments |= _comments(read_text(folder / path), group)
    own_keys = OmegaConf.masked_copy(config, [key for key in map(str, config) if key not in ("hydra", "fleet")])
    yield ""
    yield "keys, as in optimizer.lr=3e-3:"
    for key, line in _keyed(OmegaConf.to_yaml(own_keys)):
        yield f"  {line}  # {comments[key]}" if key in comments else f"  {line}"


def _comments(text: str, group: str) -> dict[str, str]:
    """The comments of a config file by the dotted key of the whole config; the first is about the whole group."""
    package = "" if "# @package _global_" in text else group
    found = {".".join(filter(None, (package, key))): COMMENT.search(line) for key, line in _keyed(text) if key}
    comments = {key: comment[1] for key, comment in found.items() if comment}
    return {group: comment_of(text), **comments} if group and comment_of(text) else comments


def _keyed(text: str) -> Iterator[tuple[str, str]]:
    """Yield each line of YAML in block style after its dotted key, which is empty for an entry of a list."""
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = KEY.match(line)
        if match:
            parents = [*(parent for parent in parents if parent[0] < len(match[1])), (len(match[1]), match[2])]
        yield ".".join(name for _, name in parents) if match else "", line
