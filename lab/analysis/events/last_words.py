"""Lines with which a trainer says that it stops because training diverged.

Trainers that stop by themselves seldom log the row that made them: fairseq, Megatron-LM, DeepSpeed, detectron2,
mmengine, Keras, Lightning and scripts in the manner of MAE print a sentence or raise an error instead. What only
configures such a check, asks for it, or says that an update was skipped, has none of these forms.
"""

from __future__ import annotations

import re
from pathlib import Path

from lab.core import shipped

_PARTS = {
    name: re.compile("|".join(patterns), 0 if name == "errors" else re.IGNORECASE)
    for name, patterns in shipped.load(Path(__file__).with_name("last_words.yaml")).items()
}


def says_the_end(line: str) -> bool:
    """Whether a line says that the program stops since its loss, a gradient or a weight is no number, or has diverged.

    >>> says_the_end("Loss is nan, stopping training"), says_the_end("terminate_on_nan=True")
    (True, False)
    """

    def has(part: str) -> bool:
        return _PARTS[part].search(line) is not None

    if not has("hints"):
        return False
    if _PARTS["asserted"].match(line):
        return True
    if _PARTS["code"].match(line) or has("goes_on") or (has("settings") and not has("errors")):
        return False
    if has("skipped") and not has("stops"):
        return False
    if has("phrases"):
        return True
    return (has("errors") or has("stops")) and has("not_finite") and (has("of_loss") or not has("early"))
