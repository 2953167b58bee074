"""Levels of frequency bands against the feature extractor of transformers."""

import numpy as np
import pytest
import torch

from inkrt.runtime.media import dmel
from inkrt.runtime.media.dmel import dmel_inputs, log_mel, num_frames
from inkrt.runtime.tower_spec import Dmel

PUBLISHED = Dmel(80, 16, -7.0, 2.0)


def reference(samples: np.ndarray, settings: Dmel) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms and levels, [frames, bands] each."""
    pytest.importorskip("transformers")
    from transformers.models.inkling.feature_extraction_inkling import InklingFeatureExtractor

    extractor = InklingFeatureExtractor(feature_size=settings.num_bands)
    logs = extractor(samples, sampling_rate=16_000)["input_features"][0]
    # As `InklingProcessor` does.
    even = torch.linspace(
        settings.lowest, settings.highest, settings.num_levels, dtype=torch.float64
    ).float()
    clamped = logs.clamp(settings.lowest, settings.highest)
    levels = (clamped.unsqueeze(-1) - even).abs().argmin(-1)
    return logs.numpy(), levels.numpy()


@pytest.mark.parametrize("num_samples", [1, 2, 799, 800, 801, 1600, 16_123])
def test_noise(num_samples: int) -> None:
    generator = np.random.default_rng(num_samples)
    samples = (generator.integers(-32768, 32768, num_samples) / 32768).astype(np.float32)
    logs, levels = reference(samples, PUBLISHED)
    ours = np.concatenate(list(log_mel(samples, 80)))
    assert ours.shape == logs.shape == (num_frames(num_samples), 80)
    assert np.abs(ours - logs).max() < 1e-6
    found = dmel_inputs(samples, PUBLISHED)
    assert found.num_rows == num_frames(num_samples)
    assert np.array_equal(found.values["levels"], levels)
    assert found.values["levels"].dtype == np.int32


def test_silence_and_sounds_beyond_the_levels() -> None:
    settings = Dmel(20, 7, -3.0, -0.5)
    found = {}
    for loudness in (0.0, 1e-4, 1.0):
        samples = np.full(1600, loudness, np.float32)  # 0.1 s
        samples[::2] *= -1
        _, expected = reference(samples, settings)
        found[loudness] = dmel_inputs(samples, settings).values["levels"]
        assert np.array_equal(found[loudness], expected)
    assert not found[0.0].any()
    assert found[1.0].max() == 6


def test_of_two_levels_as_near_the_lower_is_taken() -> None:
    settings = Dmel(3, 5, -4.0, 4.0)
    values = np.array([[-5.0, -3.0, -1.0], [1.0, 2.9, 9.0], [-3.0 + 1e-9, 3.0, 3.1]])
    expected = [[0, 0, 1], [2, 3, 4], [1, 3, 4]]
    assert dmel._nearest(values, settings).tolist() == expected


def test_long_recordings_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(2).uniform(-1, 1, 800 * 10 + 5).astype(np.float32)
    whole = dmel_inputs(samples, PUBLISHED).values["levels"]
    monkeypatch.setattr(dmel, "_BLOCK", 3)
    assert [len(block) for block in log_mel(samples, 80)] == [3, 3, 3, 2]
    assert np.array_equal(dmel_inputs(samples, PUBLISHED).values["levels"], whole)
