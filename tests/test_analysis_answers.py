"""The question of a report, its answer by rule, the arm that others are compared with, and the default recipe."""

import json
import math

import pytest

import planted
from lab.analysis.curves import arm_factors, points
from lab.analysis.sensitivity import Study, all_pairs, by_curve, judge, per_seed
from lab.cli.launch import compose_points
from lab.core import shipped
from lab.core.shipped import default_recipe, question
from lab.records import store
from lab.report.answers import answer, compared, dates, questions
from lab.report.comparisons import contrasts, nearest, reference_arm
from lab.report.findings import brief_headline
from planted import BOTH, LRS, cards


def study(made):
    """A study of cards, without a folder and without probes."""
    records = planted.records(list(made))
    ended = points(records.runs)
    return Study(records, judge(ended), seeds := per_seed(ended), by_curve(seeds), all_pairs(ended))


def diverged(made):
    return [card | {"status": "diverged", "diverged_at": 9, "final_val_loss": math.nan} for card in made]


def test_of_two_arms_the_lower_one_is_named_with_its_interval_where_it_is_lower_everywhere():
    text = answer(study(cards()))
    assert text.startswith("LR sensitivity is lower with qk-layernorm than without it at every size, by 0.16")
    assert text.endswith(" at 98.6k parameters.")
    pairs = study(cards()).pairs
    interval = pairs["total"].iloc[-1]
    assert f"(95 % interval {interval.low:.3f} to {interval.high:.3f})" in text


def test_the_answer_turns_with_the_records():
    swapped = [card | {"intervention": BOTH[1 - BOTH.index(card["intervention"])]} for card in cards(widths=(32,))]
    swapped = [card | {"parameters_without_embeddings": 24_736} for card in swapped]
    assert answer(study(swapped)).startswith("LR sensitivity is lower without qk-layernorm than with it, by")


def test_arms_that_differ_by_noise_are_not_said_to_differ():
    def noisy(card):
        same = 2 + (card["optimizer.lr"] == 0.3) * (card["seed"] - 1) * (0.1 if card["intervention"] == BOTH[0] else 0)
        return card | {"final_val_loss": same}

    text = answer(study(map(noisy, cards())))
    assert text.startswith(
        "No difference in LR sensitivity between runs without qk-layernorm and runs with qk-layernorm is"
    )
    assert "certain at any size" in text


def test_sizes_that_disagree_are_told_apart():
    def turned(card):
        better = (card["model.width"] == 32) == (card["intervention"] == BOTH[0])
        return card | {"final_val_loss": 2 + (card["optimizer.lr"] == 0.3) * (0.1 if better else 0.9)}

    text = answer(study(map(turned, cards())))
    assert text == (
        "LR sensitivity is, against that with qk-layernorm, lower without qk-layernorm at 24.7k and higher without "
        "qk-layernorm at 98.6k parameters."
    )


def test_a_largest_size_of_which_all_runs_diverged_has_no_best_learning_rate():
    made = [*cards(BOTH[:1], (32,)), *diverged(cards(BOTH[:1], (64,)))]
    assert answer(study(made)).endswith(" at 98.6k parameters; all runs there diverged.")


@pytest.mark.parametrize(
    ("made", "beginning", "part"),
    [
        (
            cards(BOTH[1:], (32,), (1e-2,), (0,)),
            "One run with qk-layernorm and z-loss, of 24.8k parameters",
            "below the",
        ),
        (diverged(cards(BOTH[:1], (32,), (1e-2,), (0,))), "The only run diverged, at learning rate 0.01", "no final"),
        (diverged(cards()), "All 84 runs diverged, at learning rates 0.0003 to 0.3", "no final loss to compare."),
        (cards(BOTH[:1]), "LR sensitivity with z-loss is 0.", "at 98.6k parameters; the best learning rate there is"),
        (cards(BOTH[:1], seeds=(0,)), "LR sensitivity with z-loss is 0.", "(one seed, so no interval)"),
        (cards(BOTH[:1], lrs=(1e-2,)), "The final loss with z-loss is 2.", "95 % interval"),
        (cards(seeds=(0,)), "LR sensitivity without qk-layernorm minus that with", "from one seed: too few to tell"),
        (cards(lrs=LRS[-2:]), "The best loss over the learning rates is lower with qk", "at every size, by 0."),
        (
            cards(("none", "qk_layernorm", *BOTH), seeds=(0, 1)),
            "Against runs with qk-layernorm and z-loss, LR sens",
            "from too few seeds",
        ),
    ],
    ids=["run", "diverged run", "all diverged", "arm", "arm and seed", "no curve", "seed", "two rates", "four arms"],
)
def test_less_than_a_whole_sweep_gets_an_honest_sentence(made, beginning, part):
    text = answer(study(made))
    assert text.startswith(beginning)
    assert part in text
    assert text.count(". ") == 0, "one sentence"


def test_arms_are_compared_on_what_both_ran():
    """An arm that skips its worst learning rate is no better for it."""
    whole = [card | {"final_val_loss": 2 + (card["optimizer.lr"] == 0.3)} for card in cards(widths=(32,))]
    partial = [card for card in whole if card["intervention"] == BOTH[0] or card["optimizer.lr"] < 0.3]
    assert answer(study(partial)).startswith("No difference in LR sensitivity")
    apart = [card for card in whole if (card["intervention"] == BOTH[0]) == (card["seed"] == 0)]
    assert answer(study(apart)).startswith("No arm has runs of the same size, seed and learning rate")


def test_of_many_arms_each_is_set_against_the_one_nearest_the_default_recipe():
    def shaped(card):
        steps = {100: 0.9, 400: 0.2, 1600: 0.2}[card["steps"]]
        return card | {"final_val_loss": 2 + (card["optimizer.lr"] == 0.3) * (steps + 0.001 * card["seed"])}

    made = [shaped(card) for steps in (100, 400, 1600) for card in cards(BOTH[1:], (32,), steps=steps)]
    text = answer(study(made))
    assert text.startswith(
        "Against steps 400, the arm nearest the default recipe, LR sensitivity at 24.8k parameters is"
    )
    assert "higher for steps 100, by 0.1" in text
    assert text.endswith("not certainly different for steps 1600.")


def test_an_arm_that_never_learns_is_not_said_to_be_robust():
    changed = {
        "relu": lambda card: card["final_val_loss"] + 0.1,
        "post_layernorm": lambda card: 3 + 1e-3 * card["seed"],
    }
    made = list(cards(BOTH[1:], (32,)))
    made += [
        card | {"intervention": f"{name}+{BOTH[1]}", "final_val_loss": loss(card), "id": f"{name} {number}"}
        for name, loss in changed.items()
        for number, card in enumerate(cards(BOTH[1:], (32,)))
    ]
    text = answer(study(made))
    assert "meaningless with post-layernorm, no run of which beat a bigram model" in text
    assert "lower with post-layernorm" not in text


def test_arms_whose_learning_rates_mean_different_things_are_compared_by_their_losses():
    def study_of(name):
        made = [
            card for each in ("standard", name) for card in cards(BOTH[1:], (32,), **{"parametrization.name": each})
        ]
        for card in made:
            card["final_val_loss"] += 0.1 * (card["parametrization.name"] == name)
        return study(made)

    assert answer(study_of("inverse_head_width")).startswith(
        "No difference in LR sensitivity between inverse_head_width and standard"
    )
    text = answer(study_of("mup_full"))
    assert text.startswith("The best loss over the learning rates is lower for standard than for mup_full, by 0.100")
    subjects, pairs = compared(study_of("mup_full"))
    (sentence,) = brief_headline(pairs, subjects)
    assert sentence.startswith(
        "The best loss over the learning rates is lower for standard than for mup_full, by 0.100"
    )


def test_many_pairs_get_a_sentence_where_they_differ_and_share_one_where_not():
    made = [card for steps in (100, 200, 400, 800, 1600) for card in cards(BOTH[1:], (32,), steps=steps)]
    for card in made:
        card["final_val_loss"] += (card["optimizer.lr"] == 0.3) * (card["steps"] == 100) * (1 + 0.01 * card["seed"])
    differing, alike = brief_headline(*compared(study(made))[::-1])
    assert differing.startswith("LR sensitivity is lower for steps 400 than for steps 100, by 0.14")
    assert (
        alike
        == "LR sensitivity differs certainly at no size between steps 400 and any of: steps 200, steps 800, steps 1600."
    )


def test_the_reference_has_the_values_of_the_recipe_or_the_nearest():
    factors = {
        "a": {"parametrization.name": "mup_full", "intervention.qk_layernorm": None},
        "b": {"parametrization.name": "standard", "intervention.qk_layernorm": None},
        "c": {"parametrization.name": "standard", "intervention.qk_layernorm": "on"},
        "d": {"parametrization.name": "mup_full", "intervention.qk_layernorm": "on"},
    }
    assert reference_arm(factors, default_recipe()) == "c"
    assert nearest([1e-3, 3e-5, 0.0], 1e-4) == 3e-5
    assert nearest(["x", "y"], "z") == "x"


def test_pairs_differ_in_one_thing_and_many_are_paired_with_the_reference_only():
    names = ("standard", "mup_full", "mup_simple")
    made = [card for name in names for card in cards(widths=(32,), **{"parametrization.name": name})]
    few = study(card for card in made if card["parametrization.name"] != "mup_simple")
    pairs = {(first, second) for first, second in zip(contrasts(few)["first"], contrasts(few)["second"], strict=True)}
    assert len(pairs) == 4
    assert all(("standard" in second) or (first[:4] == second[:4]) for first, second in pairs)
    assert next(iter(arm_factors(few.records.runs))) == "standard without qk-layernorm", "not the first of the alphabet"
    many = contrasts(study(made))
    assert set(many["second"]) == {"standard with qk-layernorm"}
    assert set(many["first"]) == {f"{name} with qk-layernorm" for name in names[1:]} | {"standard without qk-layernorm"}


def test_the_default_recipe_is_what_hydra_composes():
    (composed,) = compose_points([])
    recipe = default_recipe()
    for key in ("optimizer.eps", "optimizer.weight_decay", "schedule.warmup", "steps", "batch_size", "model.depth"):
        value = composed
        for part in key.split("."):
            value = value[part]
        assert recipe[key] == value, key
    for group in ("parametrization", "optimizer", "schedule"):
        assert recipe[f"{group}.name"] == composed[group]["name"]
    switched_on = {key.split(".")[1] for key, value in recipe.items() if value == "on"}
    assert switched_on == set(composed["intervention"])
    assert default_recipe("gpu")["steps"] == compose_points(["scale=gpu"])[0]["steps"]
    assert default_recipe("no such scale") == recipe


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Does it?\n# Source: none.\nsteps: 3\n", "Does it?"),
        ("# Does this\n# or that help? It may.\n", "Does this or that help?"),
        ("# A sweep of mine\n#\n# It is long.\n", "A sweep of mine"),
        ("# A sweep of mine\n# Cost: 3 runs.\n", "A sweep of mine"),
        ("steps: 3 # how many?\n", ""),
        ("", ""),
    ],
)
def test_a_question_is_the_first_comment_of_a_sweep(text, expected):
    assert question(text) == expected


def test_every_sweep_of_the_lab_asks_a_question():
    for path in shipped.sweeps().values():
        assert question(path.read_text()).endswith("?"), path


def test_a_folder_knows_its_questions_and_when_they_were_asked(tmp_path):
    store.note_command(tmp_path, "lab sweep quickstart seed=3")
    store.note_command(tmp_path, "lab sweep mine.yaml", "Does mine?")
    store.note_command(tmp_path, "lab sweep mine.yaml", "Does another?")
    store.note_command(tmp_path, "lab train out='x")
    store.note_command(tmp_path, "lab sweep")
    assert questions([tmp_path, tmp_path]) == [
        question(shipped.sweeps()["quickstart"].read_text()),
        "Does mine?",
    ]
    assert all(len(request.day) == 10 for request in store.requests(tmp_path).values())
    (tmp_path / "requests.json").write_text("{")
    assert questions([tmp_path])[0].startswith("Does qk-layernorm make")
    store.note_command(tmp_path, "lab sweep mine.yaml", "Does mine?")
    assert store.requests(tmp_path) == {"lab sweep mine.yaml": store.RecordedCommand("", "Does mine?")}, (
        "its day is not known"
    )


def test_dates_are_those_on_record_and_never_left_out(tmp_path):
    """A folder older than the record of dates says so."""
    old, new, both = tmp_path / "old", tmp_path / "new", tmp_path / "both"
    for folder in (old, both):
        folder.mkdir()
        (folder / "commands.json").write_text('["lab sweep quickstart"]')
    for folder in (new, both):
        store.note_command(folder, "lab sweep quickstart seed=3")
    requests = json.loads((new / "requests.json").read_text())
    requests["lab sweep quickstart seed=4"] = {"day": "2024-02-29", "question": ""}
    today = requests["lab sweep quickstart seed=3"]["day"]
    assert dates([old]) == "date not recorded"
    assert dates([new]) == today
    assert dates([both]) == f"{today} (and before)"
    (new / "requests.json").write_text(json.dumps(requests))
    assert dates([new]) == f"2024-02-29 to {today}"
