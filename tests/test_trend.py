"""Loss spikes above the trend of a log: steep falls, small rises, any spacing of rows, and pieces of any length."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from planted_spikes import judge, synthetic_log

from lab.analysis.spikes import trend as rules
from lab.analysis.spikes.trend import Rise, TrendWatch, loss_spikes, spikes_of_runs


def found(loss_n: np.ndarray, spacing: int = 1) -> list[tuple[int, str]]:
    """Steps and endings of the spikes of a log."""
    return [(spacing * span.first, span.ending) for span in loss_spikes(spacing * np.arange(len(loss_n)), loss_n)]


def falling(rows: int, spacing: int, seed: int = 0, noise: float = 0.02) -> np.ndarray:
    """A power law from 10.5 nats on, which at step 1000 still falls by more than a nat in 1000 steps."""
    step_n = spacing * np.arange(rows)
    return 2 + 8.5 * (1 + step_n / 100) ** -0.4 + np.random.default_rng(seed).normal(0, noise, rows)


@pytest.mark.parametrize("start", [500, 5000])
def test_a_short_spike_is_found_where_the_loss_falls(start: int) -> None:
    loss_n = falling(1000, 10)
    loss_n[start // 10 : start // 10 + 4] += 1.5
    assert found(loss_n, 10) == [(start, "recovered")]


@pytest.mark.parametrize(("spacing", "seed"), [(1, 0), (10, 1), (50, 0)])
def test_a_calm_log_has_no_spike_at_any_spacing(spacing: int, seed: int) -> None:
    assert found(falling(3000, spacing, seed), spacing) == []


@pytest.mark.parametrize(("spacing", "rows"), [(1, 200), (10, 20), (50, 4)])
def test_a_spike_of_two_hundred_steps_is_one_at_any_spacing(spacing: int, rows: int) -> None:
    loss_n = falling(2000, spacing)
    loss_n[1500 : 1500 + rows] += 0.5
    ((step, ending),) = found(loss_n, spacing)
    assert (step, ending) == (1500 * spacing, "recovered")


def test_a_rise_within_the_noise_of_a_row_shows_in_several() -> None:
    """0.3 nats over 60 rows, where a row has a noise of 0.1."""
    loss_n = falling(2000, 1, noise=0.1)
    loss_n[1500:1560] += 0.3
    ((step, _),) = found(loss_n)
    assert 1500 <= step < 1540


def test_a_sudden_fall_is_no_spike_and_hides_none() -> None:
    """As at the end of an epoch; a line through rows on both sides would lead far below."""
    loss_n = falling(2000, 1) - 0.5 * (np.arange(2000) >= 1000)
    assert found(loss_n) == []
    loss_n[1100:1110] += 0.5
    assert found(loss_n) == [(1100, "recovered")]


def test_a_spike_follows_another_in_a_loss_that_falls_steeply() -> None:
    """The line from before a long spike leads too far down over its steps, since the loss bends."""
    loss_n = falling(2000, 1, noise=0.005)
    loss_n[300:400] += 0.5
    loss_n[600:610] += 0.3
    assert found(loss_n) == [(300, "recovered"), (600, "recovered")]


def test_rises_that_are_close_are_one_spike() -> None:
    for apart, spikes in ((15, 1), (60, 2)):
        loss_n = falling(2000, 1)
        loss_n[[1500, 1500 + apart]] += 2.0
        assert len(found(loss_n)) == spikes


def test_endings() -> None:
    row_n = np.arange(2000)
    risen = falling(2000, 1) + 1.0 * (row_n >= 1500)
    lost = falling(2000, 1) + 9.0 * (row_n >= 1500)
    broken = np.where(row_n >= 1500, math.nan, falling(2000, 1))
    late = falling(2000, 1) + 1.0 * (row_n >= 1990)
    assert [found(loss_n) for loss_n in (risen, lost, broken, late)] == [
        [(1500, "stuck")],
        [(1500, "diverged")],
        [(1500, "diverged")],
        [(1990, "none")],
    ]


def test_a_loss_that_comes_back_late_recovers_and_one_that_does_not_is_not_said_to() -> None:
    """Also after it was given up as stuck or diverged; a loss that falls on at its new level does not come back."""
    row_n = np.arange(3000)
    for height in (1.0, 9.0):
        returns = falling(3000, 1) + height * ((row_n >= 1000) & (row_n < 1900))
        ((first, ending),) = found(returns)
        assert (first, ending) == (1000, "recovered")
        (span,) = loss_spikes(row_n, returns)
        assert span.end == 1900
    assert found(falling(3000, 1) + 1.0 * (row_n >= 1000)) == [(1000, "stuck")]


@pytest.mark.parametrize("spacing", [1, 50])
@pytest.mark.parametrize("length", [40, 90])
def test_the_end_of_a_slow_recovery_is_no_further_spike(spacing: int, length: int) -> None:
    """The trend that begins anew in a spike falls as the spike does, and the loss then stays where it was before."""
    row_n = np.arange(500)
    loss_n = 2.3 + np.random.default_rng(length).normal(0, 0.02, 500)
    loss_n[100 : 100 + length] += np.linspace(1.5, 0.1, length)
    assert found(loss_n, spacing) == [(100 * spacing, "recovered")]
    loss_n[420:424] += 0.5  # and hides none
    assert found(loss_n, spacing) == [(100 * spacing, "recovered"), (420 * spacing, "recovered")]
    assert len(found(loss_n + 0.5 * ((row_n >= 300) & (row_n < 310)), spacing)) == 3


def test_a_loss_above_its_first_one_has_diverged_however_slowly_it_got_there() -> None:
    """Rows that are logged every 50 steps reach the patience for a stuck loss before the one for a lost one."""
    row_n = np.arange(400)
    loss_n = 2 + 8 * np.exp(-row_n / 20) + np.random.default_rng(0).normal(0, 0.02, 400)
    loss_n[200:] += np.minimum(np.arange(200) / 2, 14.0)
    assert found(loss_n, 10) == [(2010, "diverged")]


def test_rows_far_apart_are_judged_in_means_of_few() -> None:
    """What shows in means of many rows only is a spike in some hundred steps, and a bend of the trend in thousands."""
    loss_n = 2.3 + np.random.default_rng(3).normal(0, 0.05, 600)
    loss_n[300:360] += 0.2
    assert len(found(loss_n, 1)) == 1
    assert found(loss_n, 100) == []


@pytest.mark.parametrize("spacing", [1, 10])
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_a_log_that_begins_late_in_training_has_no_loss_at_initialization(spacing: int, start: float) -> None:
    """Its first row, here up to half a nat above the rest, is neither what was lost nor where training starts anew."""
    row_n = np.arange(600)
    usual_n = 2.3 + start * np.exp(-row_n / 60) + np.random.default_rng(spacing).normal(0, 0.02, 600)
    back_n = usual_n + np.where(row_n >= 200, 2.0 * np.exp(-(row_n - 200) / 25), 0)
    held_n = usual_n + 0.6 * (row_n >= 200)
    lost_n = usual_n + 5.0 * (row_n >= 200)
    endings = ["recovered", "stuck", "diverged"]
    for loss_n, ending in zip((back_n, held_n, lost_n), endings, strict=True):
        assert found(loss_n, spacing) == [(200 * spacing, ending)]


def test_a_loss_that_is_not_finite_for_a_while_recovers() -> None:
    loss_n = falling(1000, 1)
    loss_n[500:510] = math.nan
    loss_n[700:702] = math.inf
    assert found(loss_n) == [(500, "recovered"), (700, "isolated")]
    loss_n[510:900:7] = math.nan
    assert found(loss_n[:900])[0][0] == 500


@pytest.mark.parametrize("after", [[8.5, 8.4, 8.6], [8.8, 8.7, 7.9, 8.1]])
def test_an_explosion_that_ends_below_the_first_loss_has_not_diverged(after: list[float]) -> None:
    ((first, ending),) = found(np.array([9, 8, 7, 90, 95, *after]))
    assert (first, ending) == (3, "none")


def test_losses_that_are_logged_at_few_rows_are_no_divergence() -> None:
    """As of a run whose gradient norm is logged at every step; a NaN that goes on for several such gaps is one."""
    sparse_n = np.where(np.arange(3000) % 25 == 0, falling(3000, 1), math.nan)
    assert found(sparse_n) == found(sparse_n[:2990]) == []
    sparse_n[2000:2100] += 3.0
    assert found(sparse_n) == [(2000, "recovered")]
    sparse_n[2500:] = math.nan
    assert found(sparse_n)[-1] == (2476, "diverged")


def test_after_a_loss_that_stays_higher_spikes_are_found_again() -> None:
    row_n = np.arange(3000)
    loss_n = falling(3000, 1) + 1.0 * (row_n >= 1000) + 0.5 * ((row_n >= 2000) & (row_n < 2010))
    assert found(loss_n) == [(1000, "stuck"), (2000, "recovered")]


@pytest.mark.parametrize(("rows", "spikes"), [(rules.FEWEST_ROWS - 1, 0), (rules.FEWEST_ROWS, 1)])
def test_the_fewest_rows_that_make_a_trend(rows: int, spikes: int) -> None:
    """Before there is one, a rise by less than half a nat is none if the losses before have a larger range."""
    loss_n = np.random.default_rng(0).normal(2, 0.01, rows)
    loss_n[0], loss_n[-1] = 8.0, 2.3
    assert len(found(loss_n)) == spikes


def early(rows: int, fall: float = 6.0, noise: float = 0.01) -> np.ndarray:
    """A loss that falls steeply in its first rows, by so many nats; without a fall, that of a resumed run."""
    row_n = np.arange(rows)
    return 2.5 + fall * np.exp(-row_n / 8) + np.random.default_rng(rows).normal(0, noise, rows)


@pytest.mark.parametrize("fall", [6.0, 0.0], ids=["from scratch", "resumed"])
@pytest.mark.parametrize("row", [*range(4, 36), 60])
def test_a_spike_begins_in_its_row_from_the_fifth_on(row: int, fall: float) -> None:
    """A jump, and one that builds up over three rows, of which the first is as high as the noise is wide."""
    for build_up in ([], [0.4, 1.6]):
        wave = [*build_up, 5.0, 2.0, 0.7]
        loss_n = early(80, fall)
        loss_n[row : row + len(wave)] += wave
        ((first, ending),) = found(loss_n, 500)
        assert ending == "recovered"
        assert 0 <= first // 500 - row <= (len(build_up) > 0)


@pytest.mark.parametrize("row", [7, 12, 20, 28])
@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_a_rise_over_several_rows_is_seen_at_a_smaller_size_than_one_of_a_row(row: int, noise: float) -> None:
    """By what both the curve and its noise allow: below the first losses, where these fall steeply."""
    row_n = np.arange(40)
    steep_n = 2.3 + 8.5 * (1 + row_n / 6) ** -0.7 + np.random.default_rng(row).normal(0, noise, 40)
    assert found(steep_n) == []
    steep_n[row : row + 5] += np.array([0.6, 1.1, 1.6, 0.9, 0.3]) * (1 + 2 * noise)
    ((first, ending),) = found(steep_n)
    assert (abs(first - row) <= 1, ending) == (True, "recovered")


def test_what_rebounds_from_a_single_low_row_is_no_spike() -> None:
    """Though two rows rise one after another, and by more than half a nat."""
    loss_n = early(40, 0.0, 0.02)
    loss_n[20:23] -= [0.5, 0.2, -0.25]
    assert found(loss_n) == []


@pytest.mark.parametrize(
    "losses", [[7.8, 5.1, 5.2, 310, 44, 8.3], [7.8, 5.1, 5.2, 6.0, 40, 310, 240], [9, 8, 7, 90, 95, 99]]
)
def test_an_explosion_of_few_rows_that_stays_above_the_first_loss_diverges(losses: list[float]) -> None:
    spans = loss_spikes(np.arange(len(losses)), np.array(losses))
    assert [span.ending for span in spans] == ["diverged"]
    assert spans[0].first in (3, 4)
    sound = np.array([7.8, 5.1, 3.2, 3.1, 3.05, 3.0])
    assert found(sound) == []
    assert found(np.append(losses, [4.5, 4.4]))[-1][1] == "recovered"


@pytest.mark.parametrize(("rows", "noise"), [(12, 0.1), (30, 0.1), (30, 0.02), (60, 0.05), (100, 0.02)])
def test_a_clean_start_has_no_spike(rows: int, noise: float) -> None:
    """Steep or flat, 200 of each; a line through the first rows bends away from a steep start."""
    row_n = np.arange(rows)
    for seed in range(100):
        random = np.random.default_rng([seed, rows])
        noise_n = random.normal(0, noise, rows)
        steep_n = 2.6 + 7.5 * np.exp(-row_n / random.uniform(5, 40)) + noise_n
        assert found(steep_n, 10) == found(2.3 - 0.3 * row_n / rows + noise_n, 10) == []


def test_a_single_low_row_is_followed_by_no_spike() -> None:
    loss_n = early(60, 0.0, 0.02)
    loss_n[[12, 20]] = 0.0
    assert found(loss_n) == []


def test_an_early_spike_hides_no_later_one() -> None:
    """Its height does not make the next one small, and its rows count, so that there is a trend in row 30."""
    steep_n, flat_n = early(60), early(60, 0.0)
    steep_n[[12, 13, 32]] += [3.0, 2.0, 0.6]
    flat_n[[12, 13, 22, 34]] += [3.0, 2.0, 0.5, 0.2]
    assert found(steep_n, 500) == [(6000, "recovered"), (16000, "recovered")]
    assert found(flat_n, 500) == [(6000, "recovered"), (11000, "recovered"), (17000, "recovered")]


@pytest.mark.parametrize("rows", [4, 12, 41, 200])
def test_runs_judged_together_have_the_spikes_of_each(rows: int) -> None:
    """Of 90 runs with the same steps, calm or not, and one whose spacing changes; the spikes found are some of all."""
    random, row_n = np.random.default_rng(rows), np.arange(rows)
    loss_rn = 3 + 4 * np.exp(-row_n / 8) + random.normal(0, 0.02, (90, rows))
    for run, height in enumerate(np.geomspace(0.05, 5, 40)):
        loss_rn[run, random.integers(rows) :][: run % 7 + 1] += height
    loss_rn[40:44, rows // 2] = [math.nan, math.inf, 20, 0]
    runs = [(50 * row_n, loss_n) for loss_n in loss_rn] + [(row_n * (1 + (row_n > 30)), loss_rn[39])]
    alone = [loss_spikes(*run) for run in runs]
    assert repr(spikes_of_runs(runs)) == repr(alone)
    assert rows < 12 or 3 < sum(map(bool, alone)) < 50


def final(rises: list[Rise]) -> list[Rise]:
    """The last that was said of each spike."""
    return list({rise.step: rise for rise in rises}.values())


def test_pieces_and_resumed_states_give_the_same_spikes() -> None:
    seed = 31
    step_n, columns = synthetic_log(seed).log.step_n, synthetic_log(seed).log.columns
    loss_n = columns["loss"].copy()
    loss_n[[700, 1201]] = math.nan
    whole = TrendWatch()
    expected = final([*whole.add(step_n, loss_n), *whole.finish()])
    assert len(expected) > 2
    random, watch, rises, at = np.random.default_rng(seed), TrendWatch(), list[Rise](), 0
    while at < len(step_n):
        more = int(random.choice([1, 2, 30, 400]))
        rises += watch.add(step_n[at : at + more], loss_n[at : at + more])
        at += more
        if random.random() < 0.3:
            watch = TrendWatch.resume(json.loads(json.dumps(watch.state())))
    assert repr(final([*rises, *watch.finish()])) == repr(expected)


def test_a_row_that_is_written_again_counts_once() -> None:
    """Back by 50 rows, out of a spike; what follows is judged as if these had never been."""
    loss_n, step_n = falling(1000, 1), np.arange(1000)
    spiking_n = loss_n + 2.0 * (step_n >= 480)
    straight, back = TrendWatch(), TrendWatch()
    list(straight.add(step_n[:500], loss_n[:500]))
    assert [rise.step for rise in back.add(step_n[:500], spiking_n[:500])] == [480]
    back.rewind(450)
    assert list(back.add(step_n[450:500], loss_n[450:500])) == []
    assert back.event is None
    assert back.row == straight.row == 499
    np.testing.assert_array_equal(back.history, straight.history)


def naive_line(step_w: list[int], loss_w: list[float], step: int) -> float:
    """The line through a window, at another step, as `lines` has it but from its definition."""
    place_w, apart = [math.log(each + rules.OFFSET) for each in step_w], len(step_w) // 4

    def middle(values: list[float]) -> float:
        ordered = sorted(values)
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    pairs = [(row, row + apart) for row in range(len(step_w) - apart)]
    slope = min(middle([(loss_w[b] - loss_w[a]) / (place_w[b] - place_w[a]) for a, b in pairs]), 0)
    rest = [loss - slope * place for loss, place in zip(loss_w, place_w, strict=True)]
    level = middle(rest)
    level += max(middle(rest[-rules.RECENT :]) - level, 0)
    return level + slope * math.log(step + rules.OFFSET)


def test_misses_and_tolerances_are_those_of_their_definition() -> None:
    """Of rows that rise by more than the least that counts, since no tolerance is smaller."""
    step_n, loss_n = 10 * np.arange(700), falling(700, 10)
    loss_n[[650, 699]] += 2 * rules.LEAST_RISE
    both = rules.measured(np.empty((0, rules.WIDTH)), step_n, loss_n, spacing=10.0)
    rise_nk, allowed_nk, _ = rules.judged(both, known=0, spacing=10.0)
    for row in (650, 699):
        window = slice(row - rules.LEAST_ROWS, row)
        expected = loss_n[row] - naive_line(step_n[window].tolist(), loss_n[window].tolist(), int(step_n[row]))
        assert rise_nk[row, 0] == pytest.approx(expected, rel=1e-9)
        past_n = both[row - rules.PASTS[0] : row, rules.MISSES]
        deviation = 1.4826 * np.median(np.abs(past_n - np.median(past_n)))
        times = rules.DEVIATIONS[0] * (1 + rules.UNCERTAINTY / len(past_n))
        allowed = max(np.median(past_n), 0) + max(times * deviation, rules.LEAST_RISE)
        assert allowed_nk[row, 0] == pytest.approx(allowed, rel=1e-9)


@pytest.mark.slow
def test_synthetic_logs_are_scored_as_the_page_says() -> None:
    """Twenty logs; the page has four hundred."""
    planted, found_there, extra, rows = 0, 0, 0, 0
    for seed in range(5000, 5020):
        made = synthetic_log(seed)
        hits, false = judge(made, lambda log: loss_spikes(log.step_n, log.columns["loss"]))
        visible = [hit for hit, spike in zip(hits, made.spikes, strict=True) if spike.visibility >= 8]
        planted, found_there = planted + len(visible), found_there + sum(visible)
        extra, rows = extra + false, rows + len(made.log.step_n)
    assert planted > 15
    assert found_there / planted > 0.85
    assert extra < rows / 10_000
