"""What `rota run --verify` starts on each rank: the user's script, whose Pipelines are verified before they step.

python -m rota.verifying.run_worker SCRIPT [ARGUMENT …]
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rota.core.errors import PipelineError
from rota.runtime import Pipeline
from rota.runtime.launching import worker
from rota.verifying.verification import verify

AGAINST = "ROTA_VERIFY"  # an environment variable, set by `rota run`: what the stages are compared with


def verify_first(pipeline: Pipeline, inputs: Any, targets: Any) -> None:
    """Compare the pipeline with the model that was split, on its first batch. Raises PipelineError, on all ranks."""
    against: Any = os.environ[AGAINST]
    verification = verify(pipeline, inputs, targets, against=against)
    if pipeline.rank == pipeline.replica == 0:
        print(f"rota: before the first step: {verification.to_text()}", file=sys.stderr, flush=True)
    if not verification.exact:
        raise PipelineError("the split model is not exact, so nothing is trained; the first process has printed why")


if __name__ == "__main__":
    Pipeline.before_first_step = verify_first
    worker.main()
