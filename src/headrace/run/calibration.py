"""Calibration, thresholds and areas under curves, from the probabilities of every validation image."""

from dataclasses import dataclass
from typing import Any

import numpy as np

# As many as is usual for the expected calibration error.
NUM_BINS = 15
_MOST_IMAGES = 24  # of a kind, in a report
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def calibration(probabilities: np.ndarray, labels: np.ndarray, num_bins: int = NUM_BINS) -> dict[str, Any]:
    """Return the expected calibration error and its bins of equal width, by the probability of the predicted class.

    ECE is the mean over the images of |accuracy - mean probability| of the bin that an image is in.
    """
    confidence, right = probabilities.max(1).astype(np.float64), probabilities.argmax(1) == labels
    place = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)  # bins include their upper edge
    bins = []
    for number in range(num_bins):
        inside = place == number
        count = int(inside.sum())
        bins.append(
            {
                "low": number / num_bins,
                "high": (number + 1) / num_bins,
                "count": count,
                "confidence": float(confidence[inside].mean()) if count else None,
                "accuracy": float(right[inside].mean()) if count else None,
            }
        )
    gaps = [each["count"] * abs(each["accuracy"] - each["confidence"]) for each in bins if each["count"]]
    return {"ece": sum(gaps) / max(len(labels), 1), "bins": bins}


def top_k(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the share of images whose class is among the best 1, 2, 3, 5 and 10; equal probabilities count against."""
    own = probabilities[np.arange(len(labels)), labels]
    rank = (probabilities >= own[:, None]).sum(1)  # its own probability included: 1 is the best
    # Among as many classes as there are, every image would be right.
    return {str(k): float((rank <= k).mean()) for k in (1, 2, 3, 5, 10) if k < probabilities.shape[1] or k == 1}


def threshold_table(score: np.ndarray, positive: np.ndarray) -> list[dict[str, float | None]]:
    """Return precision, recall, F1 and accuracy where images with at least a threshold's score count as positive."""
    rows = []
    for threshold in THRESHOLDS:
        chosen = score >= threshold
        hits, num_chosen, num_positive = int((chosen & positive).sum()), int(chosen.sum()), int(positive.sum())
        rows.append(
            {
                "threshold": threshold,
                "precision": hits / num_chosen if num_chosen else None,
                "recall": hits / num_positive if num_positive else None,
                "f1": 2 * hits / (num_chosen + num_positive) if num_chosen + num_positive else None,
                "accuracy": float((chosen == positive).mean()),
            }
        )
    return rows


def area_under_roc(score: np.ndarray, positive: np.ndarray) -> float | None:
    """Return the probability that a positive image scores above a negative one, equal scores counting half."""
    above, below = np.sort(score[positive]), np.sort(score[~positive])
    if not len(above) or not len(below):
        return None
    smaller = np.searchsorted(below, above, "left").sum()
    equal = np.searchsorted(below, above, "right").sum() - smaller
    return float((smaller + equal / 2) / (len(above) * len(below)))


@dataclass(frozen=True, kw_only=True)
class NotableImages:
    """Sample numbers: mistakes, most confident first, and images predicted right, least confident first."""

    mistakes: list[int]
    hardest: list[int]


def notable_images(probabilities: np.ndarray, labels: np.ndarray) -> NotableImages:
    """Choose the images that are worth looking at."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    order = np.argsort(confidence, kind="stable")
    mistakes = [int(k) for k in order[::-1] if not right[k]][:_MOST_IMAGES]
    return NotableImages(mistakes=mistakes, hardest=[int(k) for k in order if right[k]][:_MOST_IMAGES])
