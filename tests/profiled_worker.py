"""Profiles some steps as one of the workers of TF_CONFIG: `python -m tests.profiled_worker FILE FLAG …`.

The chief writes the shares into FILE. The workers do not meet in Python first, which would notice that their addresses
of the chief differ.
"""

import json
import sys
from pathlib import Path

from benchmarks.breakdown import profiled
from benchmarks.trainer_loop import TrainingLoop
from trainer.base.settings.resolution import resolve
from trainer.cluster.cluster_spec import read_cluster
from trainer.cluster.strategy import make_replicas
from trainer.run.training_setup import build_setup

if __name__ == "__main__":
    config = resolve(sys.argv[2:]).config
    replicas = make_replicas(config, read_cluster())
    loop = TrainingLoop(build_setup(config, replicas))
    loop(2)
    shares, _ = profiled(loop, 5)
    if replicas.cluster.is_chief:
        Path(sys.argv[1]).write_text(json.dumps(shares))
