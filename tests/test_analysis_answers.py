"""The question of a report, its answer by rule, the arm that others are compared with, and the default recipe."""

import json
import math
import re

import pytest

import planted
from lab.analysis import Study, all_pairs, by_curve, contrasts, judge, per_seed, points, tables
from lab.core import shipped
from lab.core.shipped import default_recipe, question
from lab.records import store
from lab.report.replies import answer, dates, nearest, questions, reference_arm
from lab.sweeping.launch import compose_points
from planted import BOTH, LRS, cards


def study(made):
    """A study of cards, without a folder and without probes."""
    records = planted.records(list(made))
    ended = points(records.runs)
    return Study(records, judge(ended), seeds := per_seed(ended), by_curve(seeds), all_pairs(ended))


def diverged(made):
    return [card | {"status": "diverged", "diverged_at": 9, "final_val_loss": math.nan} for card in made]


def shown(said):
    """The table of an answer, by arm."""
    return contrasts.table(said.contrasts).set_index("arm")


def test_every_arm_stands_beside_the_reference():
    made = study(cards())
    said = answer(made)
    assert said.text.startswith("LR sensitivity at 98.6k parameters is lowest with qk-layernorm: 0.")
    table = shown(said)
    assert set(table.index) == {"with qk-layernorm (reference)", "without qk-layernorm"}
    (pair,) = made.pairs.loc[made.pairs["size"] == 98_624, "total"]
    mean, low, high = re.findall(r"[\d.]+", table.loc["without qk-layernorm", "at 98.6k parameters"])
    assert [float(mean), float(low), float(high)] == pytest.approx([pair.mean, pair.low, pair.high], abs=6e-4)
    swapped = [card | {"intervention": BOTH[1 - BOTH.index(card["intervention"])]} for card in cards(widths=(32,))]
    swapped = [card | {"parameters_without_embeddings": 24_736} for card in swapped]
    turned = answer(study(swapped)).text
    assert turned.startswith("LR sensitivity at 24.7k parameters is lowest without qk-layernorm: ")
    assert turned.endswith("with qk-layernorm, the reference.")


def optimizers(lrs):
    """A study of two optimizers over learning rates, without a question."""
    known = list(cards(BOTH[:1], (32,), lrs))
    own = {"optimizer.name": "mine", "optimizer.chain": ["clip", "mine", "peak", "schedule"]}
    return study([*known, *(card | own | {"id": f"{card['id']}-mine"} for card in known)])


def test_two_optimizers_over_learning_rates_are_compared_by_their_sensitivity():
    for lrs in (LRS, LRS[2:5], (1e-3, 1e-2, 1e-1)):
        said = answer(optimizers(lrs))
        assert said.text.startswith("LR sensitivity at 24.7k parameters is lowest for adamw, tied with mine: ")
        assert said.subject == "LR sensitivity: adamw, mine"
    outside = answer(optimizers((1e-3, 1e-1)))
    assert outside.text.startswith("Best loss over learning rates at 24.7k parameters is lowest for adamw")
    assert outside.text.endswith(" LR sensitivity takes 3 learning rates from 0.0003 to 0.3, which no arm has.")
    assert outside.subject == "Best loss over learning rates: adamw, mine"
    assert "sensitivity" not in answer(optimizers((1e-2,))).text


def test_arms_that_differ_by_noise_are_tied():
    def noisy(card):
        same = 2 + (card["optimizer.lr"] == 0.3) * (card["seed"] - 1) * (0.1 if card["intervention"] == BOTH[0] else 0)
        return card | {"final_val_loss": same}

    assert ", tied with runs with" in answer(study(map(noisy, cards()))).text


@pytest.mark.parametrize(
    ("made", "beginning", "part"),
    [
        (
            cards(BOTH[1:], (32,), (1e-2,), (0,)),
            "One run with qk-layernorm and z-loss, of 24.8k parameters",
            "below the",
        ),
        (diverged(cards()), "All 84 runs diverged, at learning rates 0.0003 to 0.3", "no final loss to compare."),
        (cards(BOTH[:1]), "LR sensitivity with z-loss is 0.", "] nats/token at 98.6k parameters."),
        (cards(seeds=(0,)), "LR sensitivity at 98.6k parameters is 0.", "from one seed: too few for"),
        (cards(lrs=LRS[-2:]), "Best loss over learning rates at 98.6k parameters is lowest with qk", "2."),
    ],
    ids=["run", "all diverged", "arm", "seed", "two rates"],
)
def test_less_than_a_whole_sweep_gets_an_honest_sentence(made, beginning, part):
    text = answer(study(made)).text
    assert text.startswith(beginning)
    assert part in text


def test_arms_are_compared_on_what_both_ran():
    """An arm that skips its worst learning rate is no better for it."""
    whole = [card | {"final_val_loss": 2 + (card["optimizer.lr"] == 0.3)} for card in cards(widths=(32,))]
    partial = [card for card in whole if card["intervention"] == BOTH[0] or card["optimizer.lr"] < 0.3]
    difference = shown(answer(study(partial))).loc["without qk-layernorm", "difference"]
    assert [float(number) for number in re.findall(r"[-+.\d]+", difference)] == [0, 0, 0]
    worse = [card | {"final_val_loss": card["final_val_loss"] + 0.1 * (card["optimizer.lr"] == 0.01)} for card in whole]
    skips = [card for card in worse if card["intervention"] == BOTH[0] and card["optimizer.lr"] < 0.3]
    full = [card for card in whole if card["intervention"] == BOTH[1]]
    assert " is lowest with qk-layernorm: " in answer(study([*skips, *full])).text
    apart = [card for card in whole if (card["intervention"] == BOTH[0]) == (card["seed"] == 0)]
    assert answer(study(apart)).text.startswith(
        "No arm can be compared with runs with qk-layernorm: that takes runs of the same size, seed"
    )


def test_the_reference_is_the_arm_nearest_the_default_recipe_of_its_scale():
    def made(scale, values):
        return [
            card for eps in values for card in cards(BOTH[1:], (32,), **{"optimizer.eps": eps, "scale.name": scale})
        ]

    for scale in ("cpu", "day"):
        said = answer(study(made(scale, (0.0, 1e-15, 1e-8, 1e-4))))
        assert said.contrasts[0].reference == "epsilon 1e-8", scale
        assert list(said.contrasts[0].levels) == ["epsilon 0", "epsilon 1e-15", "epsilon 1e-8", "epsilon 0.0001"]


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
    said = answer(study(made))
    assert "with post-layernorm" not in said.text
    assert shown(said).loc["with post-layernorm", ["difference", "n"]].tolist() == ["undefined", "0"]


def test_arms_of_other_units_are_compared_by_their_losses():
    def study_of(name):
        made = [
            card for each in ("standard", name) for card in cards(BOTH[1:], (32,), **{"parametrization.name": each})
        ]
        for card in made:
            card["final_val_loss"] += 0.1 * (card["parametrization.name"] == name)
        return study(made)

    assert answer(study_of("inverse_head_width")).text.startswith("LR sensitivity")
    said = answer(study_of("mup_full"))
    assert said.text.startswith("Best loss over learning rates at 24.8k parameters is lowest for standard: ")
    assert shown(said).loc["mup_full", "difference"] == "+0.100 [+0.100, +0.100]"


def test_a_decided_question_begins_with_yes_or_no():
    """Does the schedule change sensitivity, and does a batch that grows end below a constant one?"""

    def made(key, changes, **others):
        return study(
            card | {"final_val_loss": card["final_val_loss"] + change * (card["optimizer.lr"] == 0.3)}
            for name, change in changes.items()
            for card in cards(BOTH[1:], (32,), **{key: name}, **others)
        )

    schedules = {"cosine": 0.0, "linear": 0.0, "rsqrt": 0.5}
    said = answer(made("schedule.name", schedules), ["schedules"])
    assert (said.word, "for rsqrt" in said.text, "linear" in said.text) == ("Yes", True, False)
    assert answer(made("schedule.name", dict.fromkeys(schedules, 0.0)), ["schedules"]).word == "Undecided"

    def ramps(**losses):
        runs = [
            card | {"final_val_loss": losses[name] + 1e-3 * card["seed"], "id": f"{name} {number}"}
            for name in losses
            for number, card in enumerate(cards(BOTH[1:], (32,), **{"batch.name": name}))
        ]
        return answer(study(runs), ["batch_ramps"])

    assert ramps(quarter=1.8, constant=2.0, palm=1.9).word == "No"
    won = ramps(quarter=1.8, constant=2.0, palm=1.7)
    assert (won.word, "-0.100" in won.text, "palm" in won.text) == ("Yes", True, True)


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
    assert default_recipe("day")["optimizer.eps"] == recipe["optimizer.eps"], "a scale changes the decay alone"
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


def test_no_unstable_rate_where_no_run_beat_the_bigram() -> None:
    """One arm learns nothing, at any rate; the other one does."""
    idle = {"loss_bigram": 1.0}
    runs = [card | (idle if card["intervention"] == BOTH[0] else {}) for card in cards(widths=(32,))]
    made = study(runs)
    text = tables.sensitivities_as_text(made).set_index("arm")["eta_div"]
    numbers = tables.sensitivities(made).set_index("arm")
    assert text["without qk-layernorm"] == "—"
    assert text["with qk-layernorm"] != "—"
    assert math.isnan(numbers.loc["without qk-layernorm", "eta_div_least"])
    assert numbers.loc["without qk-layernorm", "eta_div_seeds"] == 0
    assert made._repr_html_().count("<td>—</td>") == 1
