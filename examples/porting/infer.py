"""Step 4: the weights of a run, made on any plan, on one device; and evaluated through the stages of a pipeline.

python examples/porting/infer.py RUN
"""

from importlib import import_module

import cifar10
import numpy as np

from headrace import Model

parser = cifar10.options(__doc__)
parser.add_argument("run", help="a run directory (its best checkpoint is taken), or a checkpoint")
parser.add_argument("--model", choices=("linen", "nnx", "equinox"), default="linen", help="[linen]")
args = parser.parse_args()
images, labels = cifar10.load(args)[2:]
blocks = import_module(f"{args.model}_model").blocks(num_classes=10)

staged = Model.load(args.run, blocks, num_pipeline_stages=4, num_replicas=1)
report = staged.evaluate(images, labels)
print(f"through 4 stages: {report['num_samples']} images, top-1 {report['top1']:.3f}")

single = Model.load(args.run, blocks, num_pipeline_stages=1, num_replicas=1)
predictions = single.predict(images)
print(f"on one device: top-1 {np.mean(predictions.labels == labels):.3f}")
print(predictions[0])
