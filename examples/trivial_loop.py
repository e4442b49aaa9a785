"""The smallest loop: a dataset, an infeed, a body that runs ten times on the device, and an outfeed.

    python examples/trivial_loop.py

prints the results for the ten elements, x1 + x2 as d1 and x1 - x2 as d2:

    d1 (10, 4) float32 [4. 4. 4. 4. 4. 4. 4. 4. 4. 4.]
    d2 (10, 4) float32 [-2. -2. -2. -2. -2. -2. -2. -2. -2. -2.]
"""

import numpy as np

from headrace import Infeed, Outfeed, loops

# An endless dataset of one constant pair of arrays.
value = np.full(4, 1.0, np.float32)
infeed = Infeed([(value, 3 * value)], repeat=True)
outfeed = Outfeed()


def body(x1, x2):
    """Compute with one element of the infeed; what is enqueued leaves the device at once."""
    return outfeed.enqueue({"d1": x1 + x2, "d2": x1 - x2})


loops.repeat(10, body, [], infeed)
for name, rows in outfeed.dequeue().items():
    print(name, rows.shape, rows.dtype, rows[:, 0])
