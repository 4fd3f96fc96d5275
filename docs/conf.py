"""The site: the repository's Markdown and notebooks as they stand, and a reference from the docstrings."""

import re
from importlib.metadata import version as installed_version
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.search.en import SearchEnglish

project, author, version = "instability-lab", "The instability-lab authors", installed_version("instability-lab")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

# The source folder is the repository, so that the links between pages work on GitHub and on the site.
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/interventions/*.md",
    "notebooks/*.ipynb",
    "results/*.md",
    "results/stress/cards.md",
    "studies/*/README.md",
    "benchmarks/*.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "tests"]
templates_path = ["_templates"]
html_additional_pages = {"index": "index.html"}
html_theme = "furo"
html_title = "instability-lab"
html_copy_source, html_show_copyright = False, False
html_math_renderer = "mathml"
html_static_path, html_css_files = ["_static"], ["wide.css"]

myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]  # as in notebooks
nb_execution_mode = "off"  # git keeps the outputs
add_module_names = False
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring, napoleon_use_ivar = True, False, True
python_maximum_signature_line_length = 100

# The table of contents, appended to the README, since GitHub would show it as code.
CONTENTS = """
```{toctree}
:hidden:
:caption: Use it
docs/quickstart
docs/findings
docs/before_you_launch
docs/crash_test
docs/your_numbers
docs/held_to_real_runs
docs/commands
docs/data
docs/your_own_sweep
docs/your_own_recipe
docs/guard_your_recipe
docs/gates
docs/which_batch_size
docs/my_run_has_spiked
docs/record_your_run
docs/two_logs
docs/low_precision
docs/experts
docs/undecidable
docs/laptop_to_cluster
docs/one_large_run
```

```{toctree}
:hidden:
:caption: Understand it
docs/notebooks
notebooks/00_tour
notebooks/01_lr_sensitivity
notebooks/02_attention_logits
notebooks/03_output_logits
notebooks/04_optimizer_interventions
notebooks/05_scaling_and_mup
notebooks/06_predicting_instability
notebooks/07_your_own_question
notebooks/08_loss_spikes
notebooks/09_batch_size
notebooks/10_which_intervention
notebooks/11_own_spikes_and_low_precision
notebooks/12_a_sweep_and_a_log_i_did_not_make
notebooks/13_crash_test
notebooks/14_experts
notebooks/15_my_model_while_it_trains
```

```{toctree}
:hidden:
:glob:
:caption: Studies
studies/*/README
```

```{toctree}
:hidden:
:caption: Look it up
results/README
results/published_runs
results/stress/cards
docs/interventions/index
docs/api
docs/architecture
benchmarks/RESULTS
benchmarks/RESULTS_AMX
benchmarks/RESULTS_FP32
benchmarks/PARTS
benchmarks/ACCELERATOR
benchmarks/FALSE_ALARMS
benchmarks/PLANTED_FAULTS
benchmarks/PLANTED_SPIKES
benchmarks/RECORDED_FAULTS
benchmarks/RECORDED_PEERS
benchmarks/OTHER_LOOPS
benchmarks/SCALE
CONTRIBUTING
CHANGELOG
```
"""

# What people in trouble type, and the page that answers it: entries of the index, which the search ranks first.
TYPED = {
    "docs/my_run_has_spiked": [
        "loss spike",
        "loss spikes",
        "diverges",
        "loss diverged",
        "NaN",
        "loss is NaN",
        "loss explodes",
    ],
    "docs/your_numbers": ["learning rate too high", "is my learning rate too high"],
    "docs/which_batch_size": ["batch size too large"],
    "docs/low_precision": ["fp8", "unstable in low precision"],
    "docs/experts": ["dead experts", "router collapse"],
    "docs/crash_test": ["unstable recipe"],
    "docs/guard_your_recipe": ["regression test"],
}


def add_contents(_app: object, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += CONTENTS


def add_typed(_app: object, page: str, source: list[str]) -> None:
    """Below the title, so that a result leads to the top of the page; ``!`` puts it before other results."""
    if page in TYPED:
        title, text = source[0].split("\n", 1)
        source[0] = f"{title}\n\n```{{index}} {', '.join(f'! {words}' for words in TYPED[page])}\n```\n{text}"


def skip_tuple_fields(
    _app: object, _what: str, _name: str, member: object, _skip: bool, _options: object
) -> bool | None:
    """Leave out the fields of named tuples, whose docstrings only count them; the class describes them."""
    return True if str(getattr(member, "__doc__", "")).startswith("Alias for field number") else None


class Search(SearchEnglish):
    """English in which ``warm-up``, ``warmup`` and ``warm_up`` find one another: the parts, and all of them joined."""

    js_splitter_code = r"""
    function splitQuery(query) {
      return query.split(/[^\p{Letter}\p{Number}_-]+/u).map((word) => word.replace(/[-_]/g, "")).filter((word) => word);
    }
    """

    def split(self, input: str) -> list[str]:  # noqa: A002
        joined = [re.sub("[-_]", "", word) for word in re.findall(r"\w+(?:[-_]\w+)+", input)]
        return [*super().split(input), *joined]


def formula(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """MathML, which browsers show without a script from elsewhere."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_search_language(Search)
    app.add_html_math_renderer("mathml", inline_renderers=(formula, None), block_renderers=(formula, None))
    app.connect("source-read", add_contents)
    app.connect("source-read", add_typed)
    app.connect("autodoc-skip-member", skip_tuple_fields)
