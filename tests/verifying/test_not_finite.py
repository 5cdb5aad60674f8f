"""verify where numbers are NaN or infinite: equal ones are equal, others are not passed over."""

import json
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from rota import Verification, split, verify
from rota.verifying.comparing import compare_outputs
from support.odd_stages import Calls
from verifying.test_verify import WIDTH, by_hand, sequential

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1.0, NAN, INF, -INF], [1.0, NAN, INF, -INF], 0.0),
        ([2.0, NAN, -INF], [1.0, NAN, -INF], 0.5),  # relative to the largest finite number
        ([1.0, NAN], [NAN, 1.0], NAN),
        ([1.0, INF], [1.0, -INF], NAN),
        ([1.0, 2.0], [1.0, INF], NAN),
    ],
)
def test_differences_of_tensors(left: list[float], right: list[float], expected: float) -> None:
    a, b = torch.tensor(left), torch.tensor(right)
    same = torch.ones(1)
    for leaves in (0, 1):  # the worst one counts, wherever it stands
        difference = compare_outputs([[same] * leaves + [a, same]], [[same] * leaves + [b, same]])
        assert difference == pytest.approx(expected, nan_ok=True)


def test_equal_nans_are_equal_and_noted() -> None:
    model, x = sequential()
    x[0, 0] = NAN
    result = verify(split(model, 2), x, torch.zeros(8, 4), functional.mse_loss)
    assert result.exact, result.to_text()
    assert len(result.comparisons) == 2
    (note,) = result.notes
    assert note.startswith("the unsplit model's loss is nan, and 4 of its 4 gradients have NaN or infinite elements")


def test_a_gradient_that_is_nan_in_one_model_only_is_not_exact() -> None:
    torch.manual_seed(0)
    # The first parameters are those of the last layer.
    model = Calls(lambda s, x: s.head(s.stem(x)), head=nn.Linear(WIDTH, 4), stem=nn.Linear(WIDTH, WIDTH))
    rooted = Calls(lambda _, x: x + 0 * (x - x.detach()).sqrt())  # adds nothing, but its gradient is 0 / 0
    x, stages = torch.randn(8, WIDTH), by_hand(model, model.stem, nn.Sequential(rooted, model.head))
    result = verify(stages, x, torch.zeros(8, 4), functional.mse_loss)
    comparison = result.comparisons[0]
    assert not result.exact
    assert max(comparison.loss_difference, comparison.output_difference or 0.0) <= 1e-10
    assert math.isnan(comparison.largest)
    assert "stage 0, stem.weight: an element is NaN or infinite in only one of the two" in result.to_text()


def numbers(value: object) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from numbers(item)


def test_json_has_only_finite_numbers() -> None:
    model, x = sequential()
    with_nan, target = x.clone(), torch.zeros(8, 4)
    with_nan[0, 0] = NAN
    missing = by_hand(model, nn.Sequential(model[0]), nn.Sequential(nn.Linear(WIDTH, 4)))
    for stages, batch in ((split(model, 2), with_nan), (missing, x)):
        result = verify(stages, batch, target, functional.mse_loss)
        fields = json.loads(json.dumps(result.to_fields()))
        assert all(map(math.isfinite, numbers(fields)))
        again = Verification.from_fields(fields)
        assert (again.by_microbatches, again.reasons, again.notes) == (
            result.by_microbatches,
            result.reasons,
            result.notes,
        )
        assert repr(again.comparisons) == repr(result.comparisons)  # NaN is not equal to itself
