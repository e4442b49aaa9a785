"""Make the small torch files beside this one: `python make_files.py` where torch is installed. Their values are counts.

Made with torch 2.13. Both formats, types of 8 to 64 bits, a transposed tensor, two tensors on one storage, a scalar.
"""

from collections import OrderedDict
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
shared = torch.arange(10, dtype=torch.float32)
weights = OrderedDict(
    [
        ("module.turned", torch.arange(6, dtype=torch.float32).reshape(2, 3).T),
        ("module.first", shared[:4]),
        ("module.last", shared[4:].reshape(2, 3)),
        ("module.half", torch.arange(3, dtype=torch.float16) / 2),
        ("module.brain", torch.arange(3, dtype=torch.bfloat16) * 4),
        ("module.double", torch.arange(2, dtype=torch.float64) / 3),
        ("module.count", torch.tensor(7)),
        ("module.parameter", torch.nn.Parameter(torch.full((2, 1), -1.5))),
    ]
)
average = OrderedDict((name, tensor + 1) for name, tensor in weights.items())
content = {"epoch": 3, "state_dict": weights, "state_dict_ema": average, "best": 0.5, "names": ["a", "b"]}
torch.save(content, HERE / "zip.pth")
torch.save(content, HERE / "legacy.pth", _use_new_zipfile_serialization=False)
