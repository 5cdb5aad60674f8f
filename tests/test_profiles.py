"""The nouns: LayerCosts as stages, by hand; profiles and clusters as files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rota import FormatError, LayerCosts, PipelineError, PlacementError, Profile


def layers(num_layers: int = 3, rows: int = 2, **columns: Any) -> LayerCosts:
    """A chain in which every layer takes 10, and keeps 100; what else is wanted is in `columns`."""
    n, edges = num_layers, columns.pop("edges", tuple((i, i + 1) for i in range(num_layers - 1)))
    by_layer = {
        **dict.fromkeys(("forward_us", "backward_us", "recompute_us", "optimizer_us"), 10),
        **dict.fromkeys(("input_us", "weight_us"), 6),
        "kept_bytes": 100,
        "waiting_bytes": 150,
        **dict.fromkeys(("forward_peak_bytes", "backward_peak_bytes", "input_peak_bytes", "weight_peak_bytes"), 7),
        **dict.fromkeys(("parameter_bytes", "gradient_bytes", "buffer_bytes", "optimizer_bytes"), 1000),
    }
    by_edge = {"boundary_bytes": 20, "boundary_gradient_bytes": 20, "received_bytes": 0}
    made: dict[str, Any] = {name: (value,) * n for name, value in by_layer.items()}
    made |= {name: (value,) * len(edges) for name, value in by_edge.items()}
    made |= {"rows": rows, "cuts": tuple(f"cuts[{i}]" for i in range(n - 1)), "edges": edges}
    return LayerCosts(**(made | columns))


def test_stages_are_sums_of_layers_and_share_what_two_keep() -> None:
    costs = layers(4, shared=((0, 1, 30), (1, 2, 40)), tied=((0, 3, 500),)).stages([0, 2, 4])
    assert costs.forward_us == costs.backward_us == (20, 20)
    assert costs.activation_bytes == (200 - 30, 200)
    assert costs.static_bytes == (8000, 8000)
    assert layers(4, tied=((0, 3, 500),)).stages([0, 4]).static_bytes == (16000 - 500,)
    assert (costs.boundary_bytes, costs.edges) == ((20,), ((0, 1),))


def test_a_whole_backward_holds_what_arrives_and_a_split_one_does_not() -> None:
    of = layers(received_bytes=(0, 20))
    assert of.stages([0, 2, 3]).activation_bytes == (200, 120)
    assert of.stages([0, 1, 3]).activation_bytes == (100, 200)  # what layer 2 does not keep stays inside of a stage
    assert of.stages([0, 2, 3], split_backward=True).activation_bytes == (200, 100)


def test_where_nothing_wants_a_gradient_w_does_all() -> None:
    costs = layers().stages([0, 2, 3], split_backward=True)
    assert (costs.backward_us, costs.weight_us) == ((0, 6), (20, 6))
    # The first stage's W keeps all of it, and the gradient that arrived; the other's what was measured.
    assert costs.freed_by_input == (-20, -50)
    assert costs.backward_peak_bytes == (0, 7)
    assert costs.weight_peak_bytes == (7 + 20, 7)


def test_what_two_layers_of_a_stage_read_of_one_arrives_once() -> None:
    branches = layers(4, edges=((0, 1), (0, 2), (1, 3), (2, 3)), received_bytes=(20, 0, 20, 20))
    costs = branches.stages([0, 1, 4])
    assert (costs.edges, costs.boundary_bytes, costs.activation_bytes) == (((0, 1),), (20,), (100, 300))
    apart = branches.stages([0, 1, 2, 4])
    assert apart.edges == ((0, 1), (0, 2), (1, 2))
    assert apart.activation_bytes == (100, 120, 200 + 20)


def test_a_recomputed_stage_keeps_what_it_receives_and_buffers_as_they_were() -> None:
    costs = layers(changed_bytes=(0, 8, 8)).stages([0, 1, 3], recompute=[1])
    assert costs.recompute_us == (None, 20)
    assert costs.checkpoint_bytes[1] == 20 + 16
    assert costs.activation_bytes == (100, 200 + 16)
    assert costs.forward_peak_bytes == (7, 107)  # a layer's own activations are there while it runs


def test_layers_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(PlacementError, match="kept_bytes has 2 entries, expected 3"):
        layers(kept_bytes=(1, 2))
    with pytest.raises(PlacementError, match=r"\(2, 1\) must join a layer to a later one of the 3"):
        layers(waiting_shared=((2, 1, 5),))
    with pytest.raises(PlacementError, match=r"boundaries are \[0, 2, 2, 3\]; they must rise from 0 to 3"):
        layers().stages([0, 2, 2, 3])


def test_a_profile_is_a_mapping_by_rows_and_a_file() -> None:
    profile = Profile((layers(rows=4), layers(rows=1, shared=((0, 1, 3),))), (("device", "h100"),))
    assert [*profile] == [1, 4]
    assert profile[4].rows == 4
    assert 2 not in profile
    assert Profile.from_json(profile.to_json()) == profile
    added = profile.with_layers(replace(layers(rows=4), note="anew"), {"inputs of 4 rows": "float32[4, 8]"})
    assert added[4].note == "anew"
    assert dict(added.key) == {"device": "h100", "inputs of 4 rows": "float32[4, 8]"}


def test_profiles_that_are_none_are_refused() -> None:
    with pytest.raises(PlacementError, match="layers is empty"):
        Profile(())
    with pytest.raises(PlacementError, match="give each number of rows once"):
        Profile((layers(), layers()))
    with pytest.raises(PlacementError, match="layers of 2 rows have other cuts than those of 1"):
        Profile((layers(rows=1), layers(4)))
    good = Profile((layers(),), (("device", "h100"),)).to_json()
    for wrong, told in (
        (good.replace('"rows": 2', '"rows": 0'), r"profile\.layers\[0\]\.rows is 0; expected 1 or more"),
        (good.replace('{"device": "h100"}', "[]"), r"profile\.key is \[\]; expected an object"),
        (good.replace('"h100"', "100"), r'profile\.key\[\.\.\.\] is {"device": 100}; expected a text'),
        (good.replace('"kept_bytes": [100, ', '"kept_bytes": [-1, '), r"kept_bytes\[0\] is -1; expected 0 or more"),
        (good.replace('"rota": "profile"', '"rota": "plan"'), "not a profile file"),
    ):
        assert wrong != good
        with pytest.raises(FormatError, match=told):
            Profile.from_json(wrong)


def test_what_a_cached_profile_says_is_told_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from rota.profiling.profile_cache import ProfileCache

    path = tmp_path / "profile.json"
    path.write_text(Profile((layers(),), (("device", "\x1b[2J\n" + "x" * 5000),)).to_json())
    with pytest.raises(PipelineError, match="is stale: device was ") as error:
        ProfileCache.of(path, "model", {"device": "a GPU"}, refresh=False)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="not a text file in UTF-8"):
        ProfileCache.of(path, "model", {}, refresh=False)
