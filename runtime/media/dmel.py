"""Recordings as levels of frequency bands (dMel): 20 frames a second.

Per frame of 100 ms, of which every 50 ms begins one:

    level = nearest of V even steps of [lowest, highest] to log10( mel( | FFT( Hann * x ) | ) )

Half a frame of silence stands before a recording, and silence fills its last frame. Mel bands are
triangles of equal area on Slaney's scale, which is linear below 1 kHz and logarithmic above.
Source: `InklingFeatureExtractor` and `InklingProcessor` of transformers.
"""

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from inkrt.runtime.media.encode import TowerInputs
from inkrt.runtime.media.recording import RATE
from inkrt.runtime.tower_spec import Dmel

HOP = RATE // 20
WINDOW = 2 * HOP
_LEAST = 1e-10  # power of a frequency, and amplitude of a band, before the logarithm
# Frames that are computed at once.
_BLOCK = 512


def num_frames(num_samples: int) -> int:
    """Frames of a recording: placeholders that stand for it in a prompt."""
    return -(-num_samples // HOP)


def dmel_inputs(samples: NDArray[np.float32], settings: Dmel) -> TowerInputs:
    """What a tower takes of one recording: levels, int32 [frames, bands]."""
    levels = [_nearest(block, settings) for block in log_mel(samples, settings.num_bands)]
    return TowerInputs(num_frames(len(samples)), {"levels": np.concatenate(levels)})


def log_mel(samples: NDArray[np.float32], num_bands: int) -> Iterator[NDArray[np.float64]]:
    """Decimal logarithms of the bands' amplitudes, float64 [frames, bands], block by block.

    Args:
        samples: float32 [n], n > 0, one channel at RATE.
        num_bands: mel bands up to half the rate.
    """
    count = num_frames(len(samples))
    padded = np.zeros(WINDOW - HOP + count * HOP)
    padded[WINDOW - HOP : WINDOW - HOP + len(samples)] = samples
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    window = 0.5 - 0.5 * np.cos(2 * math.pi * np.arange(WINDOW) / WINDOW)
    bands = _mel_bands(num_bands)
    for start in range(0, count, _BLOCK):
        spectrum = np.fft.rfft(frames[start : start + _BLOCK] * window)
        amplitude = np.sqrt(np.maximum(spectrum.real**2 + spectrum.imag**2, _LEAST))
        yield np.log10(np.maximum(amplitude @ bands, _LEAST))


def _nearest(values: NDArray[np.float64], settings: Dmel) -> NDArray[np.int32]:
    """The nearest level, the lower of two that are as near."""
    step = (settings.highest - settings.lowest) / (settings.num_levels - 1)
    places = (np.clip(values, settings.lowest, settings.highest) - settings.lowest) / step
    return np.ceil(places - 0.5).astype(np.int32)


@cache
def _mel_bands(num_bands: int) -> NDArray[np.float64]:
    """Weights [frequencies, bands] of a spectrum's frequencies in bands."""
    edges = _hertz(np.linspace(0, _mel(RATE / 2), num_bands + 2))
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    triangles = np.maximum(0, np.minimum(rising, falling))
    return np.asarray(triangles * (2 / (edges[2:] - edges[:-2])))


_KNEE_HZ, _MELS_PER_HZ = 1000.0, 3 / 200
_KNEE = _KNEE_HZ * _MELS_PER_HZ
_MELS_PER_E = 27 / math.log(6.4)


def _mel(hertz: float) -> float:
    """A frequency above 1 kHz on Slaney's scale."""
    return _KNEE + math.log(hertz / _KNEE_HZ) * _MELS_PER_E


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = mels / _MELS_PER_HZ
    above = _KNEE_HZ * np.exp((np.maximum(mels, _KNEE) - _KNEE) / _MELS_PER_E)
    return np.where(mels < _KNEE, linear, above)
