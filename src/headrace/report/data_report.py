"""The page about a dataset: counts, sizes, images of each class, images that are nearly equal, doubtful labels."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.core.units import format_bytes, format_percent
from headrace.data.feeding.balance import EVEN_OUT, describe_uneven
from headrace.data.survey import SPLITS, Pair, Survey, Surveyed
from headrace.report.images import thumbnail
from headrace.report.markup import Html, element, page, rows_table, section

_MOST_SHEETS = 200  # classes whose images are shown
_IMAGES_OF_ALL, _OF_ONE = 400, (2, 12)  # images on all sheets together, and of a class: at least, at most
_MOST_PAIRS, _MOST_DOUBTS = 30, 48
_PERCENTS = (0, 5, 50, 95, 100)
_SIDE = 96


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """An image whose label a network that was not trained on it disagrees with."""

    image: Surveyed
    predicted: str
    probability: float
    own: float  # the probability of its label


@dataclass(frozen=True, kw_only=True)
class Doubts:
    """The doubtful labels, the worst first, and how they were found."""

    found: Sequence[Doubt]
    judged: int
    how: str


def data_page(found: Survey, pairs: Sequence[Pair], doubts: Doubts | None) -> str:
    """Return the page."""
    images = found.images
    body = [
        element("h1", f"Images of {images.place}"),
        element("div", f"{images.kind}, {images.split_by}", class_="faint"),
        _summary(found, pairs),
        _classes(found),
        _sizes(found),
        *([_doubts(found, doubts)] if doubts else []),
        _pairs(found, pairs),
        _sheets(found),
        _unreadable(found),
    ]
    return page(f"Images of {images.place}", body, {"panels": []})


def _summary(found: Survey, pairs: Sequence[Pair]) -> Html:
    counts, readable = found.counts(), found.readable
    tiles = [
        ("training images", f"{counts[0].sum():,}"),
        ("validation images", f"{counts[1].sum():,}"),
        ("classes", f"{len(found.images.class_names):,}"),
        ("together", format_bytes(sum(each.num_bytes for each in readable))),
        ("pairs nearly equal", f"{len(pairs):,}"),
        ("cannot be read", f"{len(found.found) - len(readable):,}"),
    ]
    texts = [
        element(
            "div",
            *(element("div", element("b", value), element("span", name), class_="tile") for name, value in tiles),
            class_="tiles",
        )
    ]
    notes = (*found.images.remarks, *describe_uneven(found.images.class_names, counts[0].tolist(), EVEN_OUT))
    texts += [element("p", note[0].upper() + note[1:] + ".", class_="problem") for note in notes]
    if counts[0].sum():
        mean, deviation = (" ".join(f"{level:.4f}" for level in levels) for levels in found.channel_statistics())
        text = f"Channels of the training images, from 0 to 1: mean {mean}, standard deviation {deviation}."
        texts.append(element("p", text, class_="note"))
    return section("summary", "Summary", *texts)


def _classes(found: Survey) -> Html:
    counts = found.counts()
    total = max(1, counts[0].sum())
    rows = [
        (name, f"{counts[0, k]:,}", format_percent(counts[0, k] / total), f"{counts[1, k]:,}")
        for k, name in enumerate(found.images.class_names)
    ]
    return section("classes", "Classes", rows_table(rows, ("class", "training", "share", "validation"), (1, 2, 3)))


def _sizes(found: Survey) -> Html:
    hw = np.array([each.hw for each in found.readable])
    columns = {
        "width": hw[:, 1],
        "height": hw[:, 0],
        "shorter side": hw.min(1),
        "width to height": hw[:, 1] / hw[:, 0],
        "bytes": np.array([each.num_bytes for each in found.readable]),
    }
    rows = [
        (name, *(f"{level:,.2f}" if name == "width to height" else f"{level:,.0f}" for level in levels))
        for name, values in columns.items()
        for levels in [np.percentile(values, _PERCENTS)]
    ]
    heading = ("", "least", "5 %", "middle", "95 %", "most")
    sizes = Counter(f"{width} x {height}" for height, width in hw.tolist()).most_common(8)
    kinds = Counter(each.kind for each in found.readable).most_common()
    common = [(name, f"{count:,}") for name, count in (*kinds, *sizes)]
    left = element("div", element("h3", "As they are stored"), rows_table(rows, heading, (1, 2, 3, 4, 5)))
    right = element("div", element("h3", "Most frequent"), rows_table(common, ("type or size", "images"), (1,)))
    return section("sizes", "Sizes", element("div", left, right, class_="pair"))


def _figure(found: Survey, each: Surveyed, *lines: Html | str) -> Html:
    picture = Html(f'<img src="{thumbnail(found.content(each), _SIDE)}" alt="">')
    name = element("div", each.name.rpartition("/")[2], class_="faint", title=each.name)
    return element("figure", picture, element("figcaption", *lines, name))


def _doubts(found: Survey, doubts: Doubts) -> Html:
    names = found.images.class_names
    figures = [
        _figure(
            found,
            each.image,
            element("b", f"{names[each.image.label]}?"),
            Html("<br>"),
            f"{each.predicted} {100 * each.probability:.1f} %, own {100 * each.own:.1f} %",
        )
        for each in doubts.found[:_MOST_DOUBTS]
    ]
    text = f"{doubts.how} Of {doubts.judged:,} images judged, {len(doubts.found):,} are taken for another class."
    shown = f" The {len(figures)} most confident are shown." if len(figures) < len(doubts.found) else ""
    note = "A label may be wrong, an image hard, or the network weak: look before anything is changed."
    parts = [element("p", text + shown), element("p", note, class_="note")]
    return section("doubts", "Doubtful labels", *parts, element("div", *figures, class_="images"))


def _pairs(found: Survey, pairs: Sequence[Pair]) -> Html:
    if not pairs:
        return section("pairs", "Nearly equal images", element("p", "There are none."))
    names = found.images.class_names
    figures = [
        element(
            "div",
            *(
                _figure(found, each, element("b", names[each.label]), f", {SPLITS[each.split]}")
                for each in (pair.first, pair.second)
            ),
            class_="duo",
        )
        for pair in pairs[:_MOST_PAIRS]
    ]
    apart = sum(pair.first.label != pair.second.label for pair in pairs)
    leaked = sum(pair.first.split != pair.second.split for pair in pairs)
    text = f"{len(pairs):,} pairs; {apart:,} are of two classes, {leaked:,} in training and validation, where accuracy "
    text += "then looks better than it is."
    shown = f" The first {_MOST_PAIRS} are shown, side by side." if len(pairs) > _MOST_PAIRS else ""
    grid = element("div", *figures, class_="images pairs")
    return section("pairs", "Nearly equal images", element("p", text + shown), grid)


def _sheets(found: Survey) -> Html:
    names = found.images.class_names[:_MOST_SHEETS]
    count = min(max(_IMAGES_OF_ALL // len(names), _OF_ONE[0]), _OF_ONE[1])
    parts: list[Html] = []
    for label, name in enumerate(names):
        figures = [_figure(found, each) for each in found.samples_of(label, count)]
        parts += [element("h3", name), element("div", *figures, class_="images")] if figures else []
    if len(names) < len(found.images.class_names):
        parts.append(element("p", f"The first {len(names)} classes are shown.", class_="note"))
    return section("sheets", "Training images of each class", *parts)


def _unreadable(found: Survey) -> Html:
    rows = [(each.name, each.problem) for each in found.found if each.problem][:100]
    return section("unreadable", "Cannot be read", rows_table(rows, ("file", "why"))) if rows else Html("")
