"""Where an accelerator is at hand: stages on it are refused, not run wrongly."""

from __future__ import annotations

import pytest
import torch

from rota import Cluster, Costs, Pipeline, PipelineError, place
from rota.schedules import gpipe
from support.networks import chain, loss_fn
from support.pool import Pool

pytestmark = pytest.mark.dist


def stages_on_a_gpu(rank: int) -> str:
    stages = chain(2)
    for module in stages.modules:
        module.to("cuda")
    with pytest.raises(PipelineError) as error:
        Pipeline(stages, gpipe(place(Costs.uniform(2), Cluster.uniform(1), [rank] * 2), 2), loss_fn)
    return str(error.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and there is none here")
def test_two_stages_of_one_process_are_refused(pool: Pool) -> None:
    (told,) = pool.run(1, stages_on_a_gpu)
    assert told.endswith("only CPU stages can be run")
