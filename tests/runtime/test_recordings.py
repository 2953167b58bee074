"""Recordings: formats, channels and rates to the samples that models hear, or one clear line."""

import io
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from inkrt.errors import RequestError, UsageError
from inkrt.runtime.media import recording
from inkrt.runtime.media.recording import RATE, read_recording

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")


def wav(samples: np.ndarray, rate: int = RATE, width: int = 2) -> bytes:
    """A WAV file of integers [n] or [n, channels] that fill `width` bytes."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        out.setsampwidth(width)
        out.setframerate(rate)
        if width == 1:
            data = (samples + 128).astype(np.uint8).tobytes()
        else:
            data = samples.astype("<i4").reshape(-1, 1).view(np.uint8)[:, :width].tobytes()
        out.writeframes(data)
    return file.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_integers_of_every_width(width: int) -> None:
    top = 2 ** (8 * width - 1)
    values = np.array([0, 1, -1, top - 1, -top, top // 3])
    got = read_recording(wav(values, width=width))
    assert got.dtype == np.float32
    assert np.array_equal(got, (values / top).astype(np.float32))


def test_both_readers_agree_on_what_both_read(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(-32768, 32768, (1001, 2))
    own = read_recording(wav(values))
    path = tmp_path / "same.flac"
    soundfile.write(path, values.astype(np.int16), RATE)
    assert np.array_equal(read_recording(path), own)
    assert np.array_equal(read_recording(str(path)), own)
    expected = values.mean(axis=1) / 32768
    np.testing.assert_allclose(own, expected, atol=1e-7)


def test_samples_that_a_caller_has_decoded() -> None:
    floats = np.random.default_rng(1).uniform(-1, 1, 777)
    assert np.array_equal(read_recording((floats, RATE)), floats.astype(np.float32))
    integers = np.array([0, -32768, 16384], np.int16)
    assert read_recording((integers, RATE)).tolist() == [0.0, -1.0, 0.5]
    assert read_recording(([[0.25, 0.75]], RATE)).tolist() == [0.5]


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_other_rates_are_resampled(rate: int) -> None:
    """A tone keeps its frequency, amplitude and phase."""
    seconds, hertz = 0.5, 440.0
    tone = 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)
    got = read_recording((tone, rate))
    assert abs(len(got) - RATE * seconds) <= 1
    expected = 0.5 * np.sin(2 * np.pi * hertz * np.arange(len(got)) / RATE)
    middle = slice(800, -800)  # filters ring at both ends
    assert np.abs(got - expected)[middle].max() < 1e-3


def test_one_sample_of_a_higher_rate_is_one_sample() -> None:
    assert len(read_recording(([0.5], 48_000))) == 1


REFUSED = {
    "no file": ("nowhere.wav", "cannot be read from 'nowhere.wav': No such file or directory"),
    "no path": (3, "is of type int, it must be bytes, a path, or samples and their rate as a pair"),
    "no format": (b"hello" * 99, "is damaged or of no format that is read"),
    "nothing": (b"", "is damaged or of no format that is read"),
    "truncated": (wav(np.zeros(99))[:-7], "is truncated: 191 of 198 bytes of samples are there"),
    "empty": (wav(np.zeros(0)), "has no samples; leave it out"),
    "too long": ((np.zeros(601 * 1000), 1000), "takes 601.0 s, models hear 600 at most; cut it"),
    "rate": ((np.zeros(9), 0), "has 0 samples a second, 1000 to 768000 can be read"),
    "rate of floats": ((np.zeros(9), 16e3), "has 16000.0 samples a second, 1000 to 768000 can"),
    "nan": (([0.0, float("nan")], RATE), "has samples that are not finite"),
    "shape": ((np.zeros((2, 2, 2)), RATE), "has samples of float64 [2, 2, 2], they must be"),
    "no channels": ((np.zeros((4, 0)), RATE), "has samples of float64 [4, 0], they must be"),
    "words": ((["a"], RATE), "has samples of <U1 [1], they must be numbers [n] or [n, channels]"),
    "unsigned": ((np.zeros(4, np.uint8), RATE), "has samples of uint8; give signed integers or"),
    "triple": ((np.zeros(4), RATE, 1), "is a tuple, but no pair of samples and their rate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_one_line(name: str) -> None:
    source, message = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        read_recording(source, name="audio[2]")  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"audio[2] {message}")
    assert "\n" not in str(caught.value)
    assert caught.value.param == "audio"


def test_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_FILE_BYTES", 100)
    path = tmp_path / "large.wav"
    path.write_bytes(wav(np.zeros(99)))
    with pytest.raises(RequestError, match="has 242 bytes, at most 100 are read"):
        read_recording(path)


@pytest.mark.parametrize(
    ("library", "source", "message"),
    [
        ("soundfile", b"fLaC", r"is no PCM WAV file \(.*\); other formats need soundfile, install"),
        ("soxr", ([0.0], 8000), "has 8000 samples a second, models hear 16000; resampling needs"),
    ],
)
def test_a_library_that_is_missing_is_named(
    library: str, source: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=message) as caught:
        read_recording(source)  # type: ignore[arg-type]
    assert "pip install 'inkrt[audio]'" in str(caught.value)
    assert len(read_recording(wav(np.zeros(3)))) == 3  # needs neither
