"""Predictions as the mean of an image and of its mirror image."""

import numpy as np
from PIL import Image

from headrace.cli.main import main
from headrace.run.fit import train
from headrace.run.prediction import logits_of, with_flip
from headrace.run.read_weights import find_weights


def test_predictions_of_mirror_images_are_averaged_as_the_run_validates(quick, tmp_path, capsys):
    """The mean of the logits of the files and of mirrored files, by --flip or because the run says so."""
    given = {"num_epochs": 1, "weight_updates_per_epoch": 2, "ema_decay": 0}
    plain, flipped = (
        train(quick(run_name=f"{flip}", validation_flip=flip, **given)).directory for flip in (False, True)
    )
    files, mirrored = [], []
    for number in range(3):
        image = np.random.default_rng(number).integers(0, 256, (32, 32), np.uint8)
        for name, pixels, found in (("a", image, files), ("b", image[:, ::-1], mirrored)):
            found.append(tmp_path / f"{name}{number}.png")
            Image.fromarray(pixels).save(found[-1])
    weights = find_weights(str(plain), "raw")
    ours = logits_of(with_flip(weights, None), files)
    mean = (ours + logits_of(weights, mirrored)) / 2
    assert np.abs(mean - ours).max() > 1e-3
    np.testing.assert_allclose(logits_of(with_flip(weights, True), files), mean, atol=1e-5)
    of_run = find_weights(str(flipped), "raw")
    np.testing.assert_allclose(logits_of(of_run, files), mean, atol=1e-5)  # trained alike
    np.testing.assert_allclose(logits_of(with_flip(of_run, False), files), ours, atol=1e-5)
    texts = []
    for words in ([], ["--flip"], ["--no-flip"]):
        assert main(["predict", str(plain), str(files[0]), "--format", "json", *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[2] != texts[1]
