"""A set of images that has been listed: its classes and its two splits."""

from dataclasses import dataclass

from headrace.data.sets.samples import Samples


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """A set of images: its path, its classes and its two splits."""

    kind: str
    place: str
    class_names: tuple[str, ...]
    train: Samples
    validation: Samples
    split_by: str = ""  # how the splits were separated
    remarks: tuple[str, ...] = ()  # what the user should know, such as files that are not read
