"""Average precision, thresholds and R2 against brute force, with equal scores and labels without images."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.rows.output_metrics import average_precision, best_threshold, r2_of

CASES = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=30)


@given(CASES)
def test_average_precision_is_the_sum_of_precision_times_recall_gained(cases):
    scores, has = np.array([score for score, _ in cases], float), np.array([flag for _, flag in cases])
    found = average_precision(scores, has)
    if not has.any():
        assert found is None
        return
    wanted, before = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        answered = scores >= threshold
        recall = has[answered].sum() / has.sum()
        wanted += (recall - before) * has[answered].mean()
        before = recall
    assert found is not None
    assert abs(found - wanted) < 1e-12


@given(CASES)
def test_no_threshold_has_a_higher_f1(cases):
    scores, has = np.array([score for score, _ in cases], float), np.array([flag for _, flag in cases])
    found = best_threshold(scores, has)
    if found is None:
        assert not has.any()
        return

    def f1(threshold):
        answered = scores >= threshold
        return 2 * (answered & has).sum() / (answered.sum() + has.sum())

    assert abs(f1(found[0]) - found[1]) < 1e-12
    assert all(f1(threshold) <= found[1] + 1e-12 for threshold in scores)


def test_r2():
    targets = np.array([1.0, 2.0, 4.0])
    assert r2_of(targets, targets) == 1
    assert abs(r2_of(np.full(3, targets.mean()), targets) or 0.0) < 1e-12
    assert r2_of(targets, np.ones(3)) is None
