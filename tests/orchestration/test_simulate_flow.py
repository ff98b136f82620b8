"""The flow `simulate`: a small sweep with its artifacts; bad input is refused before anything runs."""

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

import gyre_core.sim.presets as presets
from flows.simulate import simulate
from gyre_core.sim.presets import Preset, Published
from tests.support.worlds import small


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    preset = Preset(name="tiny", title="tiny", scenario=small(), published=Published(), sources={})
    monkeypatch.setitem(presets.PRESETS, "tiny", preset)
    return preset.name


def test_sweep_gives_a_row_for_each_value_a_table_and_a_picture(tiny: str) -> None:
    result = simulate(tiny, "costs.beta_s", [0.001, 0.004], steps=2)
    light, heavy = result["rows"]
    assert heavy["hours"]["elastic"] > light["hours"]["elastic"]
    assert heavy["over_predictive"]["elastic_predictive"] == 1.0
    with get_client(sync_client=True) as client:
        keys = ["simulate-tiny-costs-beta-s-hours", "simulate-tiny-costs-beta-s-picture"]
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=keys)))
    assert sorted(artifact.key or "" for artifact in found) == keys
    picture = next(str(artifact.data) for artifact in found if artifact.key == keys[1])
    assert "data:image/png;base64," in picture


def test_sweep_of_an_unknown_parameter_is_refused(tiny: str) -> None:
    with pytest.raises(ValueError, match="there is no parameter"):
        simulate(tiny, "costs.nothing", [1.0])
