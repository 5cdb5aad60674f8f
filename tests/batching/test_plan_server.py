"""The planner's process by itself: a model in, plans out."""

import json
import subprocess
import sys

from batching.test_planning import model
from rota import Cluster, Plan, plan_replicas


def test_it_answers_as_plan_replicas_and_a_refusal_as_an_error() -> None:
    costs, cluster, lengths = model(2, False), Cluster.uniform(2, 9_000), [5, 9, 30, 12, 8, 7]
    first = {"function": None, "options": {"model": costs.to_json(), "cluster": cluster.to_json(), "tries": 20}}
    requests = [first, {"lengths": lengths, "num_replicas": 2}, {"lengths": lengths, "num_replicas": 9}]
    lines = "".join(f"{json.dumps(request)}\n" for request in requests)
    command = [sys.executable, "-m", "rota.plan_server"]
    out = subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout.splitlines()
    answer, refusal = map(json.loads, out)
    expected = plan_replicas(costs, cluster, lengths, 2, tries=20)
    assert [Plan.from_json(replica["plan"]) for replica in answer["replicas"]] == [plan.plan for plan in expected]
    assert "give each replica at least one" in refusal["error"]
