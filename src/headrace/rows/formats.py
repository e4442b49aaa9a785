"""The formats of image sets, a row each. How one is recognised and listed is in the module that its row names.

The most specific come first, as they are looked for in this order: nearly any directory of images is a set of class
folders.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Format:
    """One format.

    `module` has `open_set`(path, options), an ImageSet, and `fits`(path), whether a path has this format.
    """

    name: str  # for --dataset, too
    says: str  # in a few words, for messages
    contents: str  # for people who want to make one
    classes: str  # where their names come from
    module: str
    any_label: bool = False  # labels may be several of an image, or numbers: of every task
    path_option: str = "dataset_path"  # names the set; others than this one are not recognised by their contents

    @property
    def is_detected(self) -> bool:
        """Whether the format is recognised by what is at dataset_path."""
        return self.path_option == "dataset_path"


FORMATS: Mapping[str, Format] = {
    row.name: row
    for row in (
        Format(
            name="packed",
            says="a packed file (*.hrp)",
            contents="a file made by `headrace data pack`",
            classes="as in the original",
            module="headrace.data.sets.formats.packed",
        ),
        Format(
            name="npz",
            says="arrays of images and labels (*.npz)",
            contents="a file of NumPy arrays: `images` and `labels`; or `train_images`, `train_labels`, `val_images`, "
            "`val_labels`; or `x_train`, `y_train`, `x_test`, `y_test`",
            classes="`class_names` in the file, or numbers",
            module="headrace.data.sets.formats.npz",
            any_label=True,
        ),
        Format(
            name="parquet",
            says="tables with images and labels (*.parquet)",
            contents="tables as Hugging Face `datasets` stores them: `*.parquet` or `data/*.parquet` with images and "
            "labels (`pip install 'headrace[parquet]'`)",
            classes="names in the file, or numbers",
            module="headrace.data.sets.formats.parquet",
        ),
        Format(
            name="tfrecord",
            says="ImageNet's TFRecords (train-00000-of-01024)",
            contents="`train-00000-of-01024` ..., `validation-00000-of-00128` ..., as ImageNet's",
            classes="`image/class/text`; labels from 1",
            module="headrace.data.sets.formats.tfrecord",
        ),
        Format(
            name="tfds",
            says="records that TFDS prepared (NAME-train.tfrecord-00000-of-00001)",
            contents="a folder that TFDS prepared: `NAME-train.tfrecord-00000-of-00001` ...",
            classes="`label.labels.txt`; labels from 0",
            module="headrace.data.sets.formats.tfds",
        ),
        Format(
            name="array_record",
            says="ArrayRecords that TFDS prepared (NAME-train.array_record-00000-of-00001)",
            contents="the same as ArrayRecords: `NAME-train.array_record-00000-of-00001` ... (`pip install "
            "'headrace[array-record]'`)",
            classes="`label.labels.txt`; labels from 0",
            module="headrace.data.sets.formats.array_record",
        ),
        Format(
            name="tar",
            says="tar shards (*.tar, *.tar.gz)",
            contents="`*.tar` with `KEY.jpg` and `KEY.cls` or `KEY.json` (WebDataset); compressed ones (`.tar.gz`, "
            "`.tgz`, `.tar.bz2`, `.tar.xz`, `.tar.zst` from Python 3.14 on) are unpacked once into "
            "`$XDG_CACHE_HOME/headrace/unpacked`; shards with `val` or `test` in their name are for validation",
            classes="`classes.txt`, or numbers",
            module="headrace.data.sets.formats.tar",
        ),
        Format(
            name="folder",
            says="class folders (train/CLASS/*.jpg or CLASS/*.jpg)",
            contents="`train/CLASS/*.jpg` and `val/CLASS/*.jpg` (also `validation`, `valid`, `test`), or `CLASS/*.jpg`",
            classes="names of the folders, in order",
            module="headrace.data.sets.formats.folder",
        ),
        Format(
            name="csv",
            says="images that a CSV file lists (--labels FILE)",
            contents="images listed in the file `--labels` names, see [below](#a-csv-file)",
            classes="its labels, in order",
            module="headrace.data.sets.formats.csv",
            any_label=True,
            path_option="labels",
        ),
    )
}
DETECTED = tuple(row for row in FORMATS.values() if row.is_detected)
